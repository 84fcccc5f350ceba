"""CacheCraftLLM calls tools: what the engine is asked, what comes back, and LlamaIndex's agents on top."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.agent.workflow import AgentStream, AgentWorkflow, FunctionAgent, ToolCallResult
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel

from cachecraft_rag.errors import AnswerFormError, EngineError, InvalidRequestError
from cachecraft_rag.llama_index import CacheCraftLLM
from cachecraft_rag.testing import FakeAnswer, FakeEngine

QUESTION = ChatMessage("What is 2 + 3?")
CALL = FakeAnswer("Let me see.", (("add", {"a": 2, "b": 3}),))


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def shout(text: str) -> str:
    """Write in capitals."""
    return text.upper()


TOOLS = [FunctionTool.from_defaults(add), FunctionTool.from_defaults(shout)]


def llm_with(*replies: str | FakeAnswer, **settings: Any) -> tuple[CacheCraftLLM, FakeEngine]:
    engine = FakeEngine(replies, **settings)
    return CacheCraftLLM(engine=engine), engine


def assert_asks_to_add(response: ChatResponse) -> None:
    text, call = response.message.blocks
    assert isinstance(text, TextBlock) and text.text == "Let me see."
    assert isinstance(call, ToolCallBlock)
    assert (call.tool_call_id, call.tool_name, call.tool_kwargs) == ("call-1-0", "add", {"a": 2, "b": 3})
    assert response.raw["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("has_parser", [True, False])
def test_function_calling_follows_the_engines_parser(has_parser: bool) -> None:
    """LlamaIndex is told that the model calls functions where the engine reads calls out of answers."""
    llm, _ = llm_with("x", has_tool_parser=has_parser)
    assert llm.metadata.is_function_calling_model is has_parser


def test_tools_reach_the_engine_in_openais_form() -> None:
    """Name, description and schema of each tool, in order; the history stands before the question."""
    llm, engine = llm_with(CALL)
    llm.chat_with_tools(TOOLS, "What is 2 + 3?", chat_history=[ChatMessage("Be brief.", role="system")])
    options = engine.last_call.options
    assert [tool["function"]["name"] for tool in options["tools"]] == ["add", "shout"]
    first = options["tools"][0]
    assert first["type"] == "function" and "Add two numbers." in first["function"]["description"]
    assert first["function"]["parameters"]["required"] == ["a", "b"]
    assert [message["role"] for message in engine.last_call.messages] == ["system", "user"]


def test_a_long_description_is_no_error() -> None:
    """The length limit of OpenAI's service does not hold for an embedded model."""
    llm, engine = llm_with("x")
    llm.chat_with_tools([FunctionTool.from_defaults(add, description="long " * 400)], QUESTION)
    assert len(engine.last_call.options["tools"][0]["function"]["description"]) == 2000


@pytest.mark.parametrize(
    ("asked", "choice"),
    [
        ({}, "auto"),
        ({"tool_required": True}, "required"),
        ({"tool_choice": "none", "tool_required": True}, "none"),
        ({"tool_choice": "shout"}, "shout"),
        ({"tool_choice": {"type": "function", "function": {"name": "shout"}}}, "shout"),
        ({"tool_choice": None, "tool_required": True}, "required"),
    ],
)
def test_tool_choice(asked: dict[str, Any], choice: str) -> None:
    """A choice that is passed wins over `tool_required`; OpenAI's form of naming a tool is understood."""
    llm, engine = llm_with("x")
    llm.chat_with_tools(TOOLS, QUESTION, **asked)
    assert engine.last_call.options["tool_choice"] == choice


def test_choosing_an_unknown_tool_is_an_error() -> None:
    """The error names the tools there are."""
    llm, _ = llm_with("x")
    with pytest.raises(InvalidRequestError, match=r"tool_choice is 'divide'.*'add', 'shout'"):
        llm.chat_with_tools(TOOLS, QUESTION, tool_choice="divide")


@pytest.mark.parametrize("is_allowed", [True, False])
def test_parallel_calls_and_other_options_are_passed_on(is_allowed: bool) -> None:
    """Options of a call that do not concern tools reach the engine as from `chat`."""
    llm, engine = llm_with("x")
    llm.chat_with_tools(TOOLS, QUESTION, allow_parallel_tool_calls=is_allowed, reuse="off")
    options = engine.last_call.options
    assert (options["parallel_tool_calls"], options["reuse"]) == (is_allowed, "off")


def test_calls_come_back_as_blocks() -> None:
    """Text before the call stays, the call keeps its id, and LlamaIndex gets it as a selection."""
    llm, _ = llm_with(CALL)
    response = llm.chat_with_tools(TOOLS, QUESTION)
    assert_asks_to_add(response)
    [selection] = llm.get_tool_calls_from_response(response)
    expected = {"tool_id": "call-1-0", "tool_name": "add", "tool_kwargs": {"a": 2, "b": 3}}
    assert selection.model_dump() == expected


async def test_calls_come_back_from_the_async_endpoint() -> None:
    """As `chat_with_tools`."""
    llm, engine = llm_with(CALL)
    assert_asks_to_add(await llm.achat_with_tools(TOOLS, QUESTION))
    assert engine.last_call.method == "achat"


def test_a_stream_ends_with_its_calls() -> None:
    """Pieces of the text come first; the calls come with the last piece only."""
    llm, _ = llm_with(CALL)
    *pieces, last = llm.stream_chat_with_tools(TOOLS, QUESTION)
    assert [piece.delta for piece in pieces] == ["Let", " me", " see."]
    assert not any(isinstance(block, ToolCallBlock) for piece in pieces for block in piece.message.blocks)
    assert_asks_to_add(last)


async def test_an_async_stream_ends_with_its_calls() -> None:
    """As the synchronous stream."""
    llm, engine = llm_with(CALL)
    pieces = [piece async for piece in await llm.astream_chat_with_tools(TOOLS, QUESTION)]
    assert_asks_to_add(pieces[-1])
    assert engine.last_call.method == "astream_chat"


def test_a_call_without_text_is_the_only_block() -> None:
    """No empty text stands beside it."""
    llm, _ = llm_with("x")
    message = llm.chat_with_tools(TOOLS, QUESTION, tool_required=True).message
    assert [type(block) for block in message.blocks] == [ToolCallBlock]


def test_no_call_is_an_error_only_where_asked() -> None:
    """The error says what the model answered instead, and is one that LlamaIndex skips."""
    llm, _ = llm_with("It is five")
    response = llm.chat_with_tools(TOOLS, QUESTION)
    assert llm.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
    with pytest.raises(EngineError, match=r"'It is five'.*tool_required=True") as caught:
        llm.get_tool_calls_from_response(response)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("written", "kwargs"), [('{"a": 1}', {"a": 1}), ("no json", {}), ("[1]", {}), ({"a": 1}, {"a": 1})]
)
def test_arguments_written_as_text_are_read(written: str | dict[str, Any], kwargs: dict[str, Any]) -> None:
    """Another model's answer may hold arguments as JSON text; what is none is empty, as LlamaIndex has it."""
    llm, _ = llm_with("x")
    message = ChatMessage(role="assistant", blocks=[ToolCallBlock(tool_name="add", tool_kwargs=written)])
    [selection] = llm.get_tool_calls_from_response(ChatResponse(message=message))
    assert (selection.tool_id, selection.tool_kwargs) == ("", kwargs)


def test_history_with_calls_keeps_openais_form() -> None:
    """An answer of ours and its tool's result, as agents put them into the history, arrive whole."""
    llm, engine = llm_with(CALL, "5")
    answer = llm.chat_with_tools(TOOLS, QUESTION).message
    result = ChatMessage("5", role="tool", additional_kwargs={"tool_call_id": "call-1-0", "name": "add"})
    llm.chat([QUESTION, answer, result])
    _, called, replied = engine.last_call.messages
    assert (called["role"], called["content"]) == ("assistant", "Let me see.")
    [call] = called["tool_calls"]
    assert (call["id"], call["type"], call["function"]["name"]) == ("call-1-0", "function", "add")
    assert json.loads(call["function"]["arguments"]) == {"a": 2, "b": 3}
    assert replied == {"role": "tool", "content": "5", "tool_call_id": "call-1-0", "name": "add"}


def test_arguments_keep_their_letters() -> None:
    """JSON escapes would cost tokens and differ from what the model wrote."""
    llm, engine = llm_with("x")
    call = ToolCallBlock(tool_call_id="1", tool_name="shout", tool_kwargs={"text": "Ångström 🇳🇴"})
    llm.chat([ChatMessage(role="assistant", blocks=[call])])
    [sent] = engine.last_call.messages[0]["tool_calls"]
    assert sent["function"]["arguments"] == '{"text": "Ångström 🇳🇴"}'


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (ThinkingBlock(content="hm"), r"messages\[0\] holds a ThinkingBlock"),
        (ToolCallBlock(tool_name="add"), r"messages\[0\] of role 'user' holds a ToolCallBlock"),
    ],
)
def test_blocks_out_of_place_are_refused(block: Any, message: str) -> None:
    """What the chat template would leave out silently is an error."""
    llm, _ = llm_with("x")
    with pytest.raises(InvalidRequestError, match=message):
        llm.chat([ChatMessage(blocks=[block])])


@pytest.mark.parametrize("endpoint", ["complete", "stream_complete"])
def test_completions_refuse_tools(endpoint: str) -> None:
    """A completion has no place for calls, so they would be lost."""
    llm, _ = llm_with("x")
    with pytest.raises(InvalidRequestError, match="pass tools= to chat"):
        getattr(llm, endpoint)("Add!", tools=[tool.metadata.to_openai_tool() for tool in TOOLS])


@pytest.mark.parametrize("is_async", [False, True])
async def test_predict_and_call_runs_the_tool(is_async: bool) -> None:
    """LlamaIndex's one-step agent gets the tool's result."""
    llm, _ = llm_with(CALL)
    arguments = {"tools": TOOLS, "user_msg": QUESTION}
    answer = await llm.apredict_and_call(**arguments) if is_async else llm.predict_and_call(**arguments)
    assert str(answer) == "5"


class Sum(BaseModel):
    a: int
    b: int


def test_function_calling_program() -> None:
    """LlamaIndex's own program for structured output by tools works, whole and streamed."""
    llm, _ = llm_with(FakeAnswer("", (("Sum", {"a": 2, "b": 3}),)))
    program = FunctionCallingProgram.from_defaults(Sum, prompt_template_str="Add {x}", llm=llm)
    assert program(x="2 and 3") == Sum(a=2, b=3)
    assert list(program.stream_call(x="2 and 3"))[-1] == Sum(a=2, b=3)


def function_agent(llm: CacheCraftLLM, **settings: Any) -> FunctionAgent:
    return FunctionAgent(name="adder", description="Adds.", tools=TOOLS, llm=llm, **settings)


def workflow(llm: CacheCraftLLM, **settings: Any) -> AgentWorkflow:
    return AgentWorkflow(agents=[function_agent(llm, **settings)], root_agent="adder")


@pytest.mark.parametrize("make", [function_agent, workflow])
@pytest.mark.parametrize("streaming", [True, False])
async def test_agents_call_tools_and_answer(
    make: Callable[..., FunctionAgent | AgentWorkflow], streaming: bool
) -> None:
    """The agent runs the tool that the model asks for, shows the model its result, and answers."""
    llm, engine = llm_with(CALL, "The sum is 5")
    handler = make(llm, streaming=streaming).run("What is 2 + 3?")
    events = [event async for event in handler.stream_events()]
    assert str(await handler) == "The sum is 5"
    method = "astream_chat" if streaming else "achat"
    assert [call.method for call in engine.calls] == [method, method]
    assert engine.last_call.messages[-1] == {"role": "tool", "content": "5", "tool_call_id": "call-1-0"}
    [result] = [event for event in events if isinstance(event, ToolCallResult)]
    assert (result.tool_id, str(result.tool_output)) == ("call-1-0", "5")
    deltas = [event.delta for event in events if isinstance(event, AgentStream)]
    assert ("".join(deltas) == "Let me see.The sum is 5") is streaming


async def test_an_agent_forces_its_first_call() -> None:
    """`initial_tool_choice` of a FunctionAgent binds its first answer only."""
    llm, engine = llm_with(CALL, "done")
    await function_agent(llm, initial_tool_choice="add").run("What is 2 + 3?")
    assert [call.options["tool_choice"] for call in engine.calls] == ["add", "auto"]


async def test_an_agent_calls_two_tools_at_once() -> None:
    """Each result goes back under the id of its call."""
    both = FakeAnswer("", (("add", {"a": 1, "b": 1}), ("shout", {"text": "hi"})))
    llm, engine = llm_with(both, "done")
    await function_agent(llm).run("Add and shout")
    results = [message for message in engine.last_call.messages if message["role"] == "tool"]
    assert {result["tool_call_id"]: result["content"] for result in results} == {
        "call-1-0": "2",
        "call-1-1": "HI",
    }


def test_roles_of_other_providers_may_call_tools() -> None:
    """`model` and `chatbot` are the assistant by other names."""
    llm, engine = llm_with("x")
    llm.chat([ChatMessage(role=MessageRole.MODEL, blocks=[ToolCallBlock(tool_name="add")])])
    assert engine.last_call.messages[0]["tool_calls"][0]["function"]["name"] == "add"


@pytest.mark.parametrize(("finish_reason", "advice"), [("length", "max_tokens"), ("stop", "tool_required")])
def test_an_answer_without_a_call_says_what_to_do(finish_reason: str, advice: str) -> None:
    """One that was cut needs more tokens, another one to be forced."""
    llm, _ = llm_with("text")
    response = ChatResponse(
        message=ChatMessage(role=MessageRole.ASSISTANT, content='{"name": "add"'),
        raw={"finish_reason": finish_reason},
    )
    with pytest.raises(AnswerFormError, match=advice):
        llm.get_tool_calls_from_response(response)
