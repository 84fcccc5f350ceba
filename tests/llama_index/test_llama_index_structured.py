"""CacheCraftLLM predicts pydantic models by decoding that is bound to their schema."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core import get_response_synthesizer
from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate
from llama_index.core.schema import NodeWithScore, TextNode
from pydantic import BaseModel, Field, RootModel, field_validator

from cachecraft_rag.engine import StructuredOutput
from cachecraft_rag.errors import EngineError, InvalidRequestError
from cachecraft_rag.llama_index import CacheCraftLLM
from cachecraft_rag.testing import FakeEngine

PROMPT = PromptTemplate("Who wrote {work}?")


class Author(BaseModel):
    """A writer."""

    name: str = Field(description="First and last name.")
    born: int
    works: list[str] = []


GOETHE = Author(name="J. W. Goethe", born=1749, works=["Faust", "Egmont"])
ANSWER = '{"name": "J. W. Goethe", "born": 1749, "works": ["Faust", "Egmont"]}'


def llm_with(reply: str, **settings: Any) -> tuple[CacheCraftLLM, FakeEngine]:
    engine = FakeEngine(reply, has_tool_parser=False)
    return CacheCraftLLM(engine=engine, **settings), engine


async def predict(llm: CacheCraftLLM, how: str, **arguments: Any) -> BaseModel:
    """The (last) object that one of the four methods gives."""
    if how == "structured_predict":
        return llm.structured_predict(Author, PROMPT, work="Faust", **arguments)
    if how == "astructured_predict":
        return await llm.astructured_predict(Author, PROMPT, work="Faust", **arguments)
    if how == "stream_structured_predict":
        return list(llm.stream_structured_predict(Author, PROMPT, work="Faust", **arguments))[-1]
    stream = await llm.astream_structured_predict(Author, PROMPT, work="Faust", **arguments)
    return [partial async for partial in stream][-1]


METHODS = {
    "structured_predict": "chat",
    "astructured_predict": "achat",
    "stream_structured_predict": "stream_chat",
    "astream_structured_predict": "astream_chat",
}
each_way = pytest.mark.parametrize("how", METHODS)


@each_way
async def test_answers_are_objects(how: str) -> None:
    """Decoding is bound to the schema, without any tool, by the engine's method of the same kind."""
    llm, engine = llm_with(ANSWER)
    assert await predict(llm, how) == GOETHE
    assert engine.last_call.method == METHODS[how]
    options = engine.last_call.options
    assert options["structured"] == StructuredOutput(json_schema=Author.model_json_schema())
    assert "tools" not in options


@each_way
async def test_options_of_the_call_are_respected(how: str) -> None:
    """`llm_kwargs` reach the engine; what LlamaIndex adds for tools is left out, for none are used."""
    llm, engine = llm_with(ANSWER)
    await predict(llm, how, llm_kwargs={"max_tokens": 99, "reuse": "off", "tool_required": True})
    options = engine.last_call.options
    assert (options["max_tokens"], options["reuse"], "tool_required" in options) == (99, "off", False)


@each_way
async def test_unknown_options_are_an_error(how: str) -> None:
    """As in a chat."""
    llm, _ = llm_with(ANSWER)
    with pytest.raises(InvalidRequestError, match="'best_of'"):
        await predict(llm, how, llm_kwargs={"best_of": 2})


@each_way
async def test_a_cut_answer_is_an_error(how: str) -> None:
    """The error names the cause, the limit and the remedy; LlamaIndex's synthesizers may skip it."""
    llm, _ = llm_with(ANSWER, max_tokens=4)
    with pytest.raises(EngineError, match=r"cut after 4 tokens.*Author.*raise max_tokens") as caught:
        await predict(llm, how)
    assert isinstance(caught.value, ValueError)


@each_way
async def test_an_answer_that_does_not_fit_is_an_error(how: str) -> None:
    """Such as where a validator has a rule that no JSON schema expresses; pydantic's words are kept."""
    llm, _ = llm_with('{"name": "J. W. Goethe"}')
    with pytest.raises(EngineError, match=r"no valid Author: (.|\n)*born"):
        await predict(llm, how)


def test_a_validators_rule_is_kept() -> None:
    """A rule beyond the schema is checked by pydantic."""

    class Even(BaseModel):
        number: int

        @field_validator("number")
        @classmethod
        def is_even(cls, number: int) -> int:
            if number % 2:
                raise ValueError("the number is odd")
            return number

    llm, _ = llm_with('{"number": 3}')
    with pytest.raises(EngineError, match="the number is odd"):
        llm.structured_predict(Even, PROMPT, work="Faust")


def test_the_model_is_shown_the_schema_behind_the_question() -> None:
    """Text before it stays as it is, so that what was computed for it is found again."""
    llm, engine = llm_with(ANSWER, system_prompt="Be brief.")
    llm.structured_predict(Author, PROMPT, work="Faust")
    system, user = engine.last_call.messages
    assert system == {"role": "system", "content": "Be brief."}
    question, shown = (block["text"] for block in user["content"])
    assert question == "Who wrote Faust?"
    assert "First and last name." in shown and "{{" not in shown


def test_streams_only_gain() -> None:
    """Fields come one by one, lists item by item, and nothing that was there vanishes."""
    llm, _ = llm_with(ANSWER)
    partials = list(llm.stream_structured_predict(Author, PROMPT, work="Faust"))
    names = [partial.name for partial in partials if partial.name is not None]
    assert names == sorted(names, key=len) and len(set(names)) > 1
    num_works = [len(partial.works or []) for partial in partials]
    assert num_works == sorted(num_works) and set(num_works) == {0, 1, 2}
    assert partials[-1] == GOETHE


class Authors(RootModel[list[Author]]):
    root: list[Author] = Field(min_length=1)


def test_a_list_of_objects_is_predicted() -> None:
    """A root model is a form too, streamed as well; what is unfinished stands in `root`."""
    llm, _ = llm_with("no list")  # so the fake makes an example of the schema
    example = Authors([Author(name="text", born=1)])
    assert llm.structured_predict(Authors, PROMPT, work="Faust") == example
    first, *_, last = llm.stream_structured_predict(Authors, PROMPT, work="Faust")
    assert not isinstance(first, Authors) and isinstance(first.root, list)
    assert last == example


def test_structured_llm_answers_chats_and_completions() -> None:
    """`as_structured_llm` gives the object as `raw` and its JSON as text; streams give partial ones."""
    llm, engine = llm_with(ANSWER)
    structured = llm.as_structured_llm(Author)
    chat = structured.chat([ChatMessage("Who wrote Faust?")], max_tokens=77)
    assert (chat.raw, Author.model_validate_json(chat.message.content or "")) == (GOETHE, GOETHE)
    assert engine.last_call.options["max_tokens"] == 77
    assert structured.complete("Who wrote Faust?").raw == GOETHE
    assert list(structured.stream_chat([ChatMessage("Who?")]))[-1].raw == GOETHE


async def test_structured_llm_answers_asynchronously() -> None:
    """As the synchronous endpoints, by the engine's coroutines."""
    llm, engine = llm_with(ANSWER)
    structured = llm.as_structured_llm(Author)
    assert (await structured.achat([ChatMessage("Who?")])).raw == GOETHE
    assert (await structured.acomplete("Who?")).raw == GOETHE
    pieces: list[ChatResponse] = [piece async for piece in await structured.astream_chat([ChatMessage("?")])]
    assert pieces[-1].raw == GOETHE
    assert [call.method for call in engine.calls] == ["achat", "achat", "astream_chat"]


@pytest.mark.parametrize("text", ["{braces} and {work}", 'a "quoted" {', "line\r\nbreak", "Oslo 🇳🇴", ""])
def test_structured_llm_keeps_the_text_of_messages(text: str) -> None:
    """LlamaIndex makes a template of the messages; what looks like a variable in them stays."""
    llm, engine = llm_with(ANSWER)
    llm.as_structured_llm(Author).chat([ChatMessage(text)])
    assert engine.last_call.messages[0]["content"][0]["text"] == text


def test_chat_templates_are_prompts() -> None:
    """Variables are filled in in each message."""
    llm, engine = llm_with(ANSWER)
    template = ChatPromptTemplate.from_messages([("system", "Speak {language}."), ("user", "Who?")])
    llm.structured_predict(Author, template, language="German")
    assert engine.last_call.messages[0]["content"] == "Speak German."


@pytest.mark.parametrize("mode", ["compact", "refine", "tree_summarize", "accumulate"])
def test_synthesizers_with_an_output_class(mode: str) -> None:
    """`output_cls` of LlamaIndex's synthesizers works."""
    llm, engine = llm_with(ANSWER)
    synthesizer = get_response_synthesizer(llm=llm, response_mode=mode, output_cls=Author)
    nodes = [NodeWithScore(node=TextNode(text="Faust is by {Goethe}."))]
    assert "J. W. Goethe" in str(synthesizer.synthesize("Who wrote Faust?", nodes))
    asked = [call for call in engine.calls if call.method != "prefetch"]
    assert all(isinstance(call.options["structured"], StructuredOutput) for call in asked) and asked


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (StructuredOutput(choice=("yes", "no")), "yes"),
        (StructuredOutput(json_schema=Author.model_json_schema()), '{"name": "text", "born": 1}'),
    ],
)
def test_a_plain_chat_may_be_bound_too(form: StructuredOutput, text: str) -> None:
    """`structured=` is an option of every endpoint and of the constructor."""
    llm, engine = llm_with("neither")
    assert llm.chat([ChatMessage("Well?")], structured=form).message.content == text
    assert llm.complete("Well?", structured=form).text == text
    always = CacheCraftLLM(engine=engine, additional_kwargs={"structured": form})
    assert always.chat([ChatMessage("Well?")]).message.content == text


def test_a_form_of_the_wrong_type_is_an_error() -> None:
    """The error names the class to pass."""
    llm, _ = llm_with("x")
    with pytest.raises(InvalidRequestError, match="pass a StructuredOutput"):
        llm.chat([ChatMessage("Well?")], structured=Author)
