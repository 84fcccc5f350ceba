"""Answers of `ChatCacheCraft` in the form of a schema."""

from __future__ import annotations

import functools
import operator
from typing import Any

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import HumanMessage
from langchain_core.tracers import BaseTracer
from langchain_core.tracers.schemas import Run
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from pydantic import BaseModel
from pydantic.v1 import BaseModel as BaseModelV1
from typing_extensions import TypedDict

from cachecraft_rag.engine import StructuredOutput
from cachecraft_rag.errors import InvalidRequestError
from cachecraft_rag.langchain import ChatCacheCraft
from cachecraft_rag.testing import FakeAnswer, FakeEngine

METHODS = ("json_schema", "function_calling", "json_mode")
VALUES = {"name": "Elm", "length_km": 41}
TEXT = '{"name": "Elm", "length_km": 41}'


class River(BaseModel):
    """A river."""

    name: str
    length_km: int


class RiverV1(BaseModelV1):
    """A river."""

    name: str
    length_km: int


class RiverDict(TypedDict):
    """A river."""

    name: str
    length_km: int


RIVER_SCHEMA = River.model_json_schema()
SCHEMAS = (River, RiverV1, RiverDict, RIVER_SCHEMA, convert_to_openai_tool(River))


class Runs(BaseTracer):
    """Keeps the parameters that tracing sees of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.extras: list[dict[str, Any]] = []

    def on_chat_model_start(self, *args: Any, **kwargs: Any) -> Run:
        self.extras.append(kwargs)
        return super().on_chat_model_start(*args, **kwargs)

    def _persist_run(self, run: Run) -> None:
        pass


def engine_for(schema: Any, method: str) -> FakeEngine:
    """Answers with the river, as the method has it."""
    name = convert_to_openai_tool(schema)["function"]["name"]
    return FakeEngine(FakeAnswer("", ((name, VALUES),)) if method == "function_calling" else TEXT)


def as_values(answer: Any) -> dict[str, Any]:
    return dict(answer)


@pytest.mark.parametrize(
    "schema", SCHEMAS, ids=["pydantic", "pydantic-v1", "typed-dict", "json-schema", "tool"]
)
@pytest.mark.parametrize("method", METHODS)
async def test_answers_are_parsed_into_the_schema(schema: Any, method: str) -> None:
    """Pydantic classes give their instances, all else gives mappings; the four ways of calling agree."""
    llm = ChatCacheCraft(engine=engine_for(schema, method)).with_structured_output(schema, method=method)
    answers = [llm.invoke("hi"), await llm.ainvoke("hi")]
    answers += [list(llm.stream("hi"))[-1], [piece async for piece in llm.astream("hi")][-1]]
    kind = schema if schema in (River, RiverV1) else dict
    assert [type(answer) for answer in answers] == [kind] * 4
    assert [as_values(answer) for answer in answers] == [VALUES] * 4


@pytest.mark.parametrize("schema", [River, RiverDict, RIVER_SCHEMA])
def test_json_schema_binds_decoding_to_the_schema(schema: Any) -> None:
    """The default method sends the schema, and neither tools nor another prompt."""
    engine = FakeEngine()
    llm = ChatCacheCraft(engine=engine, max_tokens=9)
    answer = llm.with_structured_output(schema).invoke("hi")
    expected = StructuredOutput(json_schema=convert_to_json_schema(schema))
    assert engine.last_call.options == {"max_tokens": 9, "structured": expected}
    assert engine.last_call.prompt == "user: hi"
    assert as_values(answer).keys() == {"name", "length_km"}


def test_strict_closes_the_schema() -> None:
    """No further properties are allowed then."""
    engine = FakeEngine()
    ChatCacheCraft(engine=engine).with_structured_output(River, strict=True).invoke("hi")
    assert engine.last_call.options["structured"].json_schema["additionalProperties"] is False


def test_function_calling_forces_the_schema_as_a_tool() -> None:
    """The schema is the only tool, and it must be called."""
    engine = FakeEngine()
    ChatCacheCraft(engine=engine).with_structured_output(River, method="function_calling").invoke("hi")
    assert engine.last_call.options["tool_choice"] == "required"
    assert engine.last_call.options["tools"] == [convert_to_openai_tool(River)]


def test_json_mode_binds_decoding_to_json() -> None:
    """Which keys there are is left to the prompt."""
    engine = FakeEngine(TEXT)
    ChatCacheCraft(engine=engine).with_structured_output(River, method="json_mode").invoke("hi")
    assert engine.last_call.options == {"structured": StructuredOutput(json_object=True)}


@pytest.mark.parametrize("method", METHODS)
def test_tracing_sees_the_schema(method: str) -> None:
    """Under LangChain's standard key, which is not sent to the engine."""
    runs = Runs()
    engine = FakeEngine(TEXT)
    llm = ChatCacheCraft(engine=engine).with_structured_output(River, method=method)
    llm.invoke("hi", {"callbacks": [runs]})
    [extra] = runs.extras
    shown = extra["options"]["ls_structured_output_format"]
    assert shown == {
        "kwargs": {"method": method, "strict": None},
        "schema": convert_to_json_schema(River),
    }
    assert "ls_structured_output_format" not in engine.last_call.options


@pytest.mark.parametrize("method", METHODS)
def test_the_raw_message_can_be_included(method: str) -> None:
    """With its parsed form, or with what went wrong."""
    llm = ChatCacheCraft(engine=engine_for(River, method))
    answer = llm.with_structured_output(River, method=method, include_raw=True).invoke("hi")
    assert answer.keys() == {"raw", "parsed", "parsing_error"}
    assert answer["parsed"] == River(**VALUES)
    assert answer["parsing_error"] is None
    assert answer["raw"].type == "ai"


@pytest.mark.parametrize(
    ("method", "reply"),
    [("json_mode", '{"name": "Elm"}'), ("function_calling", FakeAnswer("", (("River", {"name": "Elm"}),)))],
)
def test_an_answer_that_does_not_fit_is_an_error(method: str, reply: Any) -> None:
    """It is raised, or returned beside the raw message."""
    llm = ChatCacheCraft(engine=FakeEngine(reply))
    with pytest.raises(ValueError, match="length_km"):
        llm.with_structured_output(River, method=method).invoke("hi")
    answer = llm.with_structured_output(River, method=method, include_raw=True).invoke("hi")
    assert answer["parsed"] is None
    assert "length_km" in str(answer["parsing_error"])
    assert answer["raw"].type == "ai"


@pytest.mark.parametrize("schema", [River, RiverDict])
async def test_a_cut_answer_is_an_error(schema: Any) -> None:
    """LangChain's parser would complete the JSON, and half an answer would pass for a whole one."""
    llm = ChatCacheCraft(engine=FakeEngine(TEXT), max_tokens=3).with_structured_output(schema)
    with pytest.raises(OutputParserException, match="max_tokens"):
        llm.invoke("hi")
    with pytest.raises(OutputParserException, match="max_tokens"):
        await llm.ainvoke("hi")
    with pytest.raises(OutputParserException, match="max_tokens"):
        list(llm.stream("hi"))


def test_streams_of_mappings_grow() -> None:
    """Each piece holds what is known by then."""
    pieces = list(ChatCacheCraft(engine=FakeEngine(TEXT)).with_structured_output(RiverDict).stream("hi"))
    assert {"name": "Elm"} in pieces
    assert functools.reduce(operator.or_, pieces) == VALUES


@pytest.mark.parametrize(
    ("schema", "options", "message"),
    [
        (River, {"method": "regex"}, "method is 'regex': use one of 'json_schema'"),
        ({"type": "object"}, {}, "schema is {'type': 'object'}.*title"),
        (5, {}, "schema is 5"),
    ],
)
def test_forms_that_break_a_rule_fail_when_made(schema: Any, options: Any, message: str) -> None:
    """Errors appear where the schema is written, before any call."""
    with pytest.raises(InvalidRequestError, match=message):
        ChatCacheCraft(engine=FakeEngine()).with_structured_output(schema, **options)


@pytest.mark.parametrize(
    ("form", "sent"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, StructuredOutput(json_object=True)),
        (
            {"type": "json_schema", "json_schema": {"name": "River", "schema": RIVER_SCHEMA, "strict": True}},
            StructuredOutput(json_schema=RIVER_SCHEMA),
        ),
    ],
)
def test_openais_response_format_is_understood(form: Any, sent: StructuredOutput | None) -> None:
    """Given with a call or bound, it binds decoding."""
    engine = FakeEngine()
    llm = ChatCacheCraft(engine=engine)
    for model, options in ((llm, {"response_format": form}), (llm.bind(response_format=form), {})):
        model.invoke("hi", **options)
        assert engine.last_call.options.get("structured") == sent
        assert "response_format" not in engine.last_call.options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"response_format": {}}, "response_format is {}"),
        ({"response_format": "json"}, "response_format is 'json'"),
        ({"response_format": {"type": "json_schema"}}, "response_format is .*json_schema"),
        (
            {"response_format": {"type": "json_object"}, "structured": StructuredOutput(regex="a")},
            "both given",
        ),
    ],
)
def test_a_response_format_that_breaks_a_rule_is_refused(options: Any, message: str) -> None:
    """The engine is not asked."""
    engine = FakeEngine()
    with pytest.raises(InvalidRequestError, match=message):
        ChatCacheCraft(engine=engine).invoke("hi", **options)
    assert not engine.calls


@pytest.mark.parametrize("strategy", ["ProviderStrategy", "ToolStrategy", None])
def test_agents_answer_in_a_form(strategy: str | None) -> None:
    """By both of LangChain's strategies; left the choice, it takes a tool, which leaves others callable."""
    agents = pytest.importorskip("langchain.agents", reason="agents are in the langchain package")
    forms = pytest.importorskip("langchain.agents.structured_output")
    form = River if strategy is None else getattr(forms, strategy)(River)
    engine = FakeEngine()
    agent = agents.create_agent(ChatCacheCraft(engine=engine), response_format=form)
    answer = agent.invoke({"messages": [HumanMessage("hi")]})["structured_response"]
    assert isinstance(answer, River)
    assert ("structured" in engine.last_call.options) == (strategy == "ProviderStrategy")
