"""Tools of `ChatCacheCraft`: bound, called, and told of in the conversation."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel

from cachecraft_rag.errors import InvalidRequestError
from cachecraft_rag.langchain import ChatCacheCraft
from cachecraft_rag.testing import FakeAnswer, FakeEngine

CALLS = FakeAnswer("Let me look.", (("search", {"query": "der Fluß „Elm“"}), ("add", {"a": 1, "b": 2})))


@tool
def search(query: str) -> str:
    """Find passages."""
    return query


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Book(BaseModel):
    """Book a room."""

    room: str


def names_sent(engine: FakeEngine) -> list[str]:
    return [tool["function"]["name"] for tool in engine.last_call.options["tools"]]


def joined(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    first, *others = chunks
    return first + others


def test_tools_of_every_kind_reach_the_engine() -> None:
    """Tools, functions, pydantic classes and OpenAI's form are converted, in their order."""
    engine = FakeEngine()
    openai_form = {"type": "function", "function": {"name": "wait", "parameters": {"type": "object"}}}
    ChatCacheCraft(engine=engine).bind_tools([search, add, Book, openai_form]).invoke("hi")
    assert names_sent(engine) == ["search", "add", "Book", "wait"]
    assert engine.last_call.options["tools"][0]["function"]["parameters"]["required"] == ["query"]
    assert engine.last_call.options.keys() == {"tools"}


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        (None, None),
        (False, None),
        (True, "required"),
        ("any", "required"),
        ("required", "required"),
        ("auto", "auto"),
        ("none", "none"),
        ("add", "add"),
        ({"type": "function", "function": {"name": "add"}}, "add"),
    ],
)
def test_tool_choice_is_translated(choice: Any, sent: str | None) -> None:
    """LangChain's words become the engine's, when bound and when given with a call."""
    engine = FakeEngine()
    llm = ChatCacheCraft(engine=engine)
    llm.bind_tools([search, add], tool_choice=choice).invoke("hi")
    assert engine.last_call.options.get("tool_choice") == sent
    llm.bind_tools([search, add]).invoke("hi", tool_choice=choice)
    assert engine.last_call.options.get("tool_choice") == sent


def test_parallel_calls_and_strict_schemas_can_be_asked_for() -> None:
    """`parallel_tool_calls` is an option of the call; `strict` closes the schemas."""
    engine = FakeEngine()
    ChatCacheCraft(engine=engine).bind_tools([add], parallel_tool_calls=False, strict=True).invoke("hi")
    assert engine.last_call.options["parallel_tool_calls"] is False
    assert engine.last_call.options["tools"][0]["function"]["parameters"]["additionalProperties"] is False


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([search, 5], None, r"tools\[1\] is 5"),
        ([{"type": "web_search"}], None, r"tools\[0\] is .*web_search"),
        ([search], "find", "tool_choice is 'find'.*'search'"),
        ([search], {"name": "search"}, "tool_choice is {'name': 'search'}"),
        ([], "any", "no tools are given"),
    ],
)
def test_tools_that_break_a_rule_fail_when_bound(tools: list[Any], choice: Any, message: str) -> None:
    """Errors appear where the tools are written, before any call."""
    with pytest.raises(InvalidRequestError, match=message):
        ChatCacheCraft(engine=FakeEngine()).bind_tools(tools, tool_choice=choice)


def test_two_tools_of_one_name_are_refused_by_the_call() -> None:
    """Binding them is allowed, for LangChain's conformance suite does it."""
    llm = ChatCacheCraft(engine=FakeEngine()).bind_tools([search, search])
    with pytest.raises(InvalidRequestError, match="search, search: each needs a name of its own"):
        llm.invoke("hi")


def test_no_tools_can_be_bound() -> None:
    """Agents without tools bind an empty list."""
    assert ChatCacheCraft(engine=FakeEngine("yes")).bind_tools([]).invoke("hi").content == "yes"


def assert_holds_calls(message: AIMessage) -> None:
    """The text before the calls, and each call whole, in order, with an id of its own."""
    assert message.text == CALLS.text
    assert [(call["name"], call["args"]) for call in message.tool_calls] == list(CALLS.tool_calls)
    assert len({call["id"] for call in message.tool_calls}) == 2
    assert all(call["type"] == "tool_call" for call in message.tool_calls)
    assert message.response_metadata["finish_reason"] == "tool_calls"


async def test_calls_come_with_the_message() -> None:
    """Whole answers hold the calls that the engine handed out."""
    llm = ChatCacheCraft(engine=FakeEngine(CALLS)).bind_tools([search, add])
    assert_holds_calls(llm.invoke("hi"))
    assert_holds_calls(await llm.ainvoke("hi"))


async def test_calls_come_with_the_last_piece_of_a_stream() -> None:
    """Joined pieces hold the same calls; only the last piece has them."""
    llm = ChatCacheCraft(engine=FakeEngine(CALLS)).bind_tools([search, add])
    for pieces in (list(llm.stream("hi")), [piece async for piece in llm.astream("hi")]):
        assert [bool(piece.tool_call_chunks) for piece in pieces] == [False, False, False, True]
        assert_holds_calls(joined(pieces))


def test_history_is_told_in_openais_form() -> None:
    """Calls and their results go back to the engine with their ids; arguments are JSON texts."""
    engine = FakeEngine(CALLS)
    llm = ChatCacheCraft(engine=engine).bind_tools([search, add])
    answer = llm.invoke("Where is the Elm?")
    result = ToolMessage("In the east.", tool_call_id=answer.tool_calls[0]["id"], name="search")
    llm.invoke([HumanMessage("Where is the Elm?"), answer, result])
    _, told, found = engine.last_call.messages
    assert told["role"] == "assistant" and told["content"] == "Let me look."
    assert told["tool_calls"][0] == {
        "id": answer.tool_calls[0]["id"],
        "type": "function",
        "function": {"name": "search", "arguments": '{"query": "der Fluß „Elm“"}'},
    }
    assert [call["function"]["name"] for call in told["tool_calls"]] == ["search", "add"]
    assert found == {
        "role": "tool",
        "content": "In the east.",
        "tool_call_id": answer.tool_calls[0]["id"],
        "name": "search",
    }


def test_broken_calls_of_other_models_stay_in_the_history() -> None:
    """A call whose arguments are no JSON is told as it was written."""
    engine = FakeEngine()
    broken = {"name": "add", "args": "{a:", "id": "1", "error": "no JSON", "type": "invalid_tool_call"}
    ChatCacheCraft(engine=engine).invoke([AIMessage("", invalid_tool_calls=[broken])])
    [message] = engine.last_call.messages
    assert message["tool_calls"] == [
        {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{a:"}}
    ]


def test_calls_repeated_among_the_blocks_are_told_once() -> None:
    """Other models' messages hold their calls as blocks too; those need no rendering."""
    engine = FakeEngine()
    call = {"name": "add", "args": {"a": 1, "b": 2}, "id": "1", "type": "tool_call"}
    block = {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1, "b": 2}}
    ChatCacheCraft(engine=engine).invoke(
        [
            AIMessage([{"type": "text", "text": "So:"}, block], tool_calls=[call]),
            AIMessage([block], tool_calls=[call]),
        ]
    )
    first, second = engine.last_call.messages
    assert first["content"] == [{"type": "text", "text": "So:"}]
    assert second["content"] == ""
    assert len(first["tool_calls"]) == len(second["tool_calls"]) == 1


def test_a_call_that_is_only_a_block_is_refused() -> None:
    """Leaving it out in silence would change the conversation."""
    block = {"type": "tool_use", "id": "1", "name": "add", "input": {}}
    with pytest.raises(InvalidRequestError, match=r"messages\[0\].content\[0\] is of type 'tool_use'"):
        ChatCacheCraft(engine=FakeEngine()).invoke([AIMessage([block])])


def test_an_agent_runs_its_tool() -> None:
    """LangChain's agent calls the tool, tells the result, and returns the answer."""
    agents = pytest.importorskip("langchain.agents", reason="agents are in the langchain package")
    engine = FakeEngine([FakeAnswer("", (("search", {"query": "Elm"}),)), "It is in the east."])
    agent = agents.create_agent(ChatCacheCraft(engine=engine), [search])
    messages = agent.invoke({"messages": [HumanMessage("Where is the Elm?")]})["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
    assert messages[2].content == "Elm"
    assert messages[-1].content == "It is in the east."
