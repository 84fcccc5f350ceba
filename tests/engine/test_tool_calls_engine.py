"""Tools and bound answers on the real default model: what only vLLM and a model can show."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from cachecraft_rag.chunks import Chunk
from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.engine import CacheCraftEngine, Completion
from cachecraft_rag.engine.tools import StructuredOutput
from cachecraft_rag.errors import InvalidRequestError
from cachecraft_rag.events import ChunkDecision, RequestDecision
from cachecraft_rag.models import default_model

pytestmark = pytest.mark.engine

# Long against the list of tools: what stands before the chunks counts as overhead of reuse.
RIVER = Chunk(
    "The river Ambel flows from the hills of Tarn through three towns to the sea at Port Vale. "
    + " ".join(f"In {year} the bridge at mile {year - 1800} was rebuilt." for year in range(1850, 1862)),
    doc_id="river",
)
QUEEN = Chunk(
    "The queen answered the letter of the captain in June. "
    + " ".join(f"In {year} the captain sailed with a crew of {year - 1500}." for year in range(1602, 1614)),
    doc_id="queen",
)
PLACE = {
    "$defs": {"Unit": {"enum": ["celsius", "fahrenheit"]}},
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"$ref": "#/$defs/Unit"}},
    "required": ["city", "unit"],
}
TIME = {
    "$defs": {"Unit": {"enum": ["hours", "minutes"]}},
    "type": "object",
    "properties": {"unit": {"$ref": "#/$defs/Unit"}},
    "required": ["unit"],
}


def tool(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [tool("get_weather", "The weather in a city.", PLACE), tool("get_time", "The time.", TIME)]
SCHEMAS = {"get_weather": PLACE, "get_time": TIME}
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CacheCraftEngine]:
    model = default_model()
    config = CacheCraftConfig(self_test=False, host_store_bytes=256 * 1024**2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CACHECRAFT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        with CacheCraftEngine(model, config=config, dtype="float32", max_model_len=2048) as made:
            yield made


def about(*chunks: Chunk, question: str = "Where does the river end?") -> list[dict[str, str]]:
    return [{"role": "user", "content": "\n\n".join([*(chunk.text for chunk in chunks), question])}]


def assert_fits(completion: Completion) -> None:
    assert completion.finish_reason == "tool_calls"
    assert completion.text == ""
    for call in completion.tool_calls:
        Draft202012Validator(SCHEMAS[call.name]).validate(call.arguments)


def test_a_call_forced_by_name_fits_its_schema(engine: CacheCraftEngine) -> None:
    """A model that knows no tools calls the named one, with arguments of the right form."""
    for name in SCHEMAS:
        completion = engine.chat(WEATHER, tools=TOOLS, tool_choice=name, max_tokens=100)
        assert [call.name for call in completion.tool_calls] == [name]
        assert_fits(completion)


def test_a_required_call_is_one_of_the_tools(engine: CacheCraftEngine) -> None:
    """Which one is the model's choice; the definitions of the two do not mix."""
    completion = engine.chat(
        WEATHER, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=100
    )
    assert len(completion.tool_calls) == 1
    assert_fits(completion)


def test_a_streamed_forced_call_is_the_same(engine: CacheCraftEngine) -> None:
    """It comes with the last piece, and no text before it."""
    options = {"tools": TOOLS, "tool_choice": "get_weather", "max_tokens": 100}
    whole, deltas = engine.chat(WEATHER, **options), list(engine.stream_chat(WEATHER, **options))
    last = deltas[-1].completion
    assert last is not None
    assert last.tool_calls[0].arguments == whole.tool_calls[0].arguments
    assert "".join(delta.text for delta in deltas) == ""


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_a_weak_model_may_answer_what_it_likes(engine: CacheCraftEngine, choice: str) -> None:
    """Nothing it writes is an error; tools cost it no text when none is called."""
    assert engine.has_tool_parser
    completion = engine.chat(WEATHER, tools=TOOLS, tool_choice=choice, max_tokens=40)
    assert completion.text or completion.tool_calls
    assert completion.finish_reason in ("stop", "length", "tool_calls")


def test_json_fits_its_schema_without_white_space(engine: CacheCraftEngine) -> None:
    """Bound to a schema, the model does not fill its answer with blanks."""
    fields = {"sea": {"type": "string", "maxLength": 20}, "towns": {"type": "integer", "maximum": 99}}
    schema = {"type": "object", "properties": fields, "required": ["sea", "towns"]}
    completion = engine.chat(about(RIVER), structured=StructuredOutput(json_schema=schema), max_tokens=100)
    answer = json.loads(completion.text)
    Draft202012Validator(schema).validate(answer)
    assert not re.search(r"\s", completion.text.replace(json.dumps(answer["sea"]), ""))


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (StructuredOutput(regex=r"[A-Z][a-z]{2,8} \d{4}"), r"[A-Z][a-z]{2,8} \d{4}"),
        (StructuredOutput(choice=("Port Vale", "Tarn")), "Port Vale|Tarn"),
    ],
)
def test_text_keeps_its_form(engine: CacheCraftEngine, form: StructuredOutput, pattern: str) -> None:
    """A regular expression and a choice hold for the whole answer."""
    completion = engine.chat(about(RIVER), structured=form, max_tokens=40)
    assert re.fullmatch(pattern, completion.text)
    assert completion.finish_reason == "stop"


def test_a_bound_request_reuses_chunks(engine: CacheCraftEngine) -> None:
    """Chunks cached by a free answer are reused in another order for bound ones."""
    # A tenant of its own: what vLLM's prefix cache has from other tests is not computed, so not stored.
    engine.chat(about(RIVER, QUEEN), chunks=[RIVER, QUEEN], max_tokens=1, tenant="bound")
    form = StructuredOutput(choice=("Port Vale", "Tarn"))
    forced = {"tools": TOOLS, "tool_choice": "get_time"}
    for options in ({"structured": form}, forced):
        report = engine.chat(about(QUEEN, RIVER), max_tokens=40, tenant="bound", **options).report
        assert report.decision is RequestDecision.REUSE, report.why
        assert [chunk.doc_id for chunk in report.chunks] == ["queen", "river"]
        assert ChunkDecision.COMPUTED not in [chunk.decision for chunk in report.chunks], report


def test_a_chunk_in_a_tool_s_result_is_reused(engine: CacheCraftEngine) -> None:
    """What a retrieval tool brings is found by its text and reused, though it was cached elsewhere."""
    engine.chat(about(QUEEN), chunks=[QUEEN], max_tokens=1, tenant="step")
    tools = [tool("search", "Finds passages.", {})]
    call = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "search", "arguments": "{}"}}
    steps = [
        {"role": "user", "content": "When did the queen answer?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": f"Found:\n{QUEEN.text}"},
    ]
    completion = engine.chat(steps, tools=tools, max_tokens=20, tenant="step")
    (chunk,) = completion.report.chunks
    assert chunk.doc_id == "queen"
    assert chunk.num_reused_tokens > 0, completion.report.why


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (StructuredOutput(json_schema={"type": "string", "pattern": "a", "maxLength": 3}), "not supported"),
        (StructuredOutput(json_schema={"$ref": "#/$defs/none"}), "json schema"),
        (StructuredOutput(regex="("), "regex"),
    ],
)
def test_a_form_that_vllm_refuses_is_an_invalid_request(
    engine: CacheCraftEngine, form: StructuredOutput, message: str
) -> None:
    """The engine goes on answering."""
    with pytest.raises(InvalidRequestError, match=message):
        engine.chat(about(RIVER), structured=form)
    assert engine.chat(about(RIVER), max_tokens=2).text
