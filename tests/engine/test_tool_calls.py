"""Tools and bound answers, on a backend without vLLM."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from cachecraft_rag.chunks import Chunk
from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.engine import CacheCraftEngine, Completion
from cachecraft_rag.engine.answer_reader import Reading
from cachecraft_rag.engine.backend import BackendOutput
from cachecraft_rag.engine.tools import StructuredOutput, new_call
from cachecraft_rag.errors import InvalidRequestError

RIVER = Chunk("The river flows from the hills to the sea.", doc_id="river")
QUESTION = [{"role": "user", "content": "When?"}]


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER, CLOCK = tool("weather", CITY), tool("clock")


@pytest.fixture(autouse=True)
def wide_window(backend) -> None:
    """The list of tools is long in the tokens of the test's tokenizer."""
    backend.vllm_config.model_config.max_model_len = 4096


def prompt_of(engine: CacheCraftEngine, request: Any) -> str:
    return engine._running._tokenizer.decode(request.token_ids)  # type: ignore[union-attr]


def test_tools_are_shown_to_the_model_unless_it_may_call_none(engine, backend) -> None:
    """The prompt lists them; with tool_choice="none" it is the one without tools."""
    for options in ({"tools": [WEATHER, CLOCK]}, {"tools": [WEATHER], "tool_choice": "none"}, {}):
        engine.chat(QUESTION, **options)
    shown, none, without = backend.requests
    assert '{"name": "weather", "parameters": {"type": "object"' in prompt_of(engine, shown)
    assert '"name": "clock"' in prompt_of(engine, shown)
    assert none.token_ids == without.token_ids


def test_messages_of_a_tool_step_are_accepted(engine, backend) -> None:
    """An assistant's call may come without content, its result follows."""
    call = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    steps = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "Noon."},
    ]
    engine.chat([*QUESTION, *steps], tools=[CLOCK])
    assert "<tool_response>\nNoon.\n</tool_response>" in prompt_of(engine, backend.requests[0])


def test_complete_takes_no_tools(engine) -> None:
    """A finished prompt has no place for them: the error names chat()."""
    with pytest.raises(InvalidRequestError, match=r"call chat\(\)"):
        engine.complete("When?", tools=[CLOCK])


def ask_for(engine: CacheCraftEngine, **options: Any) -> Completion:
    return engine.chat(QUESTION, **{"tools": [WEATHER, CLOCK], **options})


def streamed(engine: CacheCraftEngine, **options: Any) -> tuple[list[str], Completion]:
    """The pieces of text that are not empty, and the completion that came with the last delta."""
    deltas = list(engine.stream_chat(QUESTION, **{"tools": [WEATHER, CLOCK], **options}))
    assert [delta.completion is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]
    completion = deltas[-1].completion
    assert completion is not None
    assert "".join(delta.text for delta in deltas) == completion.text
    return [delta.text for delta in deltas if delta.text], completion


def calls_of(completion: Completion) -> list[tuple[str, Mapping[str, Any]]]:
    return [(call.name, call.arguments) for call in completion.tool_calls]


# --- forced calls -----------------------------------------------------------------------------

PARIS = '{"name":"weather","arguments":{"city":"Paris"}}'


def test_a_forced_call_binds_decoding_and_is_read(engine, backend) -> None:
    """The schema that is sent admits a call of that tool and nothing else; the text is the call."""
    backend.scripts.append(('{"name":"weather",', '"arguments":{"city":"Paris"}}'))
    completion = ask_for(engine, tool_choice="weather")
    assert calls_of(completion) == [("weather", {"city": "Paris"})]
    assert (completion.text, completion.finish_reason) == ("", "tool_calls")
    assert completion.token_ids == (0, 1)
    schema = Draft202012Validator(backend.requests[0].sampling.structured.json_schema)
    assert schema.is_valid(json.loads(PARIS))
    assert not schema.is_valid({"name": "weather", "arguments": {}})
    assert not schema.is_valid({"name": "clock", "arguments": {}})


@pytest.mark.parametrize(
    ("parallel", "expected"), [(True, [False, True, False]), (False, [True, False, False])]
)
def test_required_admits_calls_of_any_tool(engine, backend, parallel: bool, expected: list[bool]) -> None:
    """An array of at least one call where several are allowed, else one call."""
    ask_for(engine, tool_choice="required", parallel_tool_calls=parallel)
    schema = Draft202012Validator(backend.requests[0].sampling.structured.json_schema)
    one, other = json.loads(PARIS), {"name": "clock", "arguments": {}}
    assert [schema.is_valid(answer) for answer in (other, [one, other], [])] == expected


def test_several_required_calls_are_read(engine, backend) -> None:
    """Each has an id of its own, in the form that the strictest chat templates want."""
    backend.scripts.append((f'[{PARIS},{{"name":"clock","arguments":{{}}}}]',))
    completion = ask_for(engine, tool_choice="required")
    assert calls_of(completion) == [("weather", {"city": "Paris"}), ("clock", {})]
    ids = {call.id for call in completion.tool_calls}
    assert len(ids) == 2
    assert all(len(each) == 9 and each.isalnum() for each in ids)


def test_definitions_of_tools_do_not_mix(engine, backend) -> None:
    """References inside a tool's schema stay its own, under the same names, recursive ones too."""

    def nested(kind: str) -> dict[str, Any]:
        return {
            "properties": {"x": {"$ref": "#/$defs/X"}, "more": {"$ref": "#"}},
            "$defs": {"X": {"type": kind}},
            "required": ["x"],
        }

    tools = [tool("a", nested("string")), tool("b", nested("integer"))]
    ask_for(engine, tools=tools, tool_choice="required", parallel_tool_calls=False)
    schema = Draft202012Validator(backend.requests[0].sampling.structured.json_schema)
    assert schema.is_valid({"name": "a", "arguments": {"x": "1", "more": {"x": "2"}}})
    assert schema.is_valid({"name": "b", "arguments": {"x": 1}})
    assert not schema.is_valid({"name": "b", "arguments": {"x": "1"}})
    assert not schema.is_valid({"name": "a", "arguments": {"x": "1", "more": {"x": 2}}})


def test_a_cut_call_is_text(engine, backend) -> None:
    """Where max_tokens cut the JSON there is no call, and the caller sees why."""
    backend.scripts += [BackendOutput(PARIS[:20], (1,), "length")] * 2
    completion = ask_for(engine, tool_choice="weather")
    assert (completion.text, completion.tool_calls, completion.finish_reason) == (PARIS[:20], (), "length")
    assert streamed(engine, tool_choice="weather")[0] == [PARIS[:20]]


def test_a_streamed_forced_call_comes_with_the_last_piece(engine, backend) -> None:
    """No piece holds text of it; the tokens come as they are made."""
    backend.scripts.append(tuple(PARIS))
    pieces, completion = streamed(engine, tool_choice="weather")
    assert pieces == []
    assert calls_of(completion) == [("weather", {"city": "Paris"})]


def test_a_bound_answer_is_no_sample(make_engine, backend) -> None:
    """Feedback compares free answers only: a form makes any two answers alike."""
    engine = make_engine(CacheCraftConfig(self_test=False, feedback_share=1.0))
    prompt = {"chunks": [RIVER], "tools": [CLOCK]}
    for options in ({"tool_choice": "clock"}, {"structured": StructuredOutput(choice=("yes", "no"))}, {}):
        engine.chat([{"role": "user", "content": f"{RIVER.text}\n\nWhen?"}], **prompt, **options)
    assert engine.stats()["feedback"]["num_eligible"] == 1


# --- calls that nobody forced -----------------------------------------------------------------


@dataclass(frozen=True)
class TagReader:
    """Reads `<call>name</call>`."""

    held_from: str = "<call>"
    keeps_special_tokens: bool = True

    def read(self, written: str) -> Reading:
        names = re.findall("<call>(.*?)</call>", written)
        text = written.partition("<call>")[0] if names else written
        return Reading(text, tuple(new_call(name, {}) for name in names))


class TagParser:
    def __init__(self, held_from: str = "<call>") -> None:
        self._held_from = held_from

    def reader(self, tools: Any) -> TagReader:
        return TagReader(self._held_from)


def test_calls_are_read_where_there_is_a_parser(make_engine, backend) -> None:
    """The text before the calls is the answer's text; the parser gets its special tokens."""
    engine = make_engine(tool_parser=TagParser())
    backend.scripts.append(("I look. ", "<call>clock</call><call>weather</call>"))
    completion = ask_for(engine)
    assert (completion.text, completion.finish_reason) == ("I look. ", "tool_calls")
    assert calls_of(completion) == [("clock", {}), ("weather", {})]
    assert backend.requests[0].keeps_special_tokens
    assert backend.requests[0].sampling.structured is None


def test_one_call_at_most_where_the_caller_says_so(make_engine, backend) -> None:
    """`parallel_tool_calls=False` leaves the first."""
    engine = make_engine(tool_parser=TagParser())
    backend.scripts.append(("<call>clock</call><call>weather</call>",))
    assert calls_of(ask_for(engine, parallel_tool_calls=False)) == [("clock", {})]


@pytest.mark.parametrize(
    "options",
    [{"tool_choice": "none"}, {"tools": []}, {"structured": StructuredOutput(regex="<call>clock</call>")}],
)
def test_where_no_call_may_come_none_is_read(make_engine, backend, options: dict[str, Any]) -> None:
    """What looks like a call is text then."""
    engine = make_engine(tool_parser=TagParser())
    backend.scripts.append(("<call>clock</call>",))
    completion = ask_for(engine, **options)
    assert (completion.text, completion.tool_calls) == ("<call>clock</call>", ())
    assert not backend.requests[0].keeps_special_tokens


def test_without_a_parser_the_answer_stays_text(engine, backend) -> None:
    """`tool_choice="auto"` is no error, and the engine says that it reads no calls."""
    backend.scripts.append(("<call>clock</call>",))
    assert ask_for(engine).text == "<call>clock</call>"
    assert not engine.has_tool_parser


@pytest.mark.parametrize(
    ("pieces", "shown", "names"),
    [
        (("I look. ", "<ca", "ll>clock", "</call>"), ["I look. "], ["clock"]),
        (("1 <", " 2 <ca", "ve>"), ["1 ", "< 2 ", "<cave>"], []),
        (("Look: <call>clo", "ck"), ["Look: ", "<call>clock"], []),
        (("Look: <",), ["Look: ", "<"], []),
        (("<call>clock</call>", " That was it."), [], ["clock"]),
    ],
)
def test_a_stream_holds_back_what_may_be_a_call(make_engine, backend, pieces, shown, names) -> None:
    """Text flows up to the first sign of a call; what was held is released if none came of it."""
    engine = make_engine(tool_parser=TagParser())
    backend.scripts.append(pieces)
    texts, completion = streamed(engine)
    assert texts == shown
    assert [call.name for call in completion.tool_calls] == names


def test_a_parser_without_a_sign_holds_back_all(make_engine, backend) -> None:
    """Nothing flows before the whole answer was read."""
    engine = make_engine(tool_parser=TagParser(held_from=""))
    backend.scripts += [("one", " two"), ("<call>clock", "</call>")]
    assert streamed(engine)[0] == ["one two"]
    assert streamed(engine)[0] == []


def test_a_streamed_chat_without_tools_is_not_held_back(make_engine, backend) -> None:
    """A parser costs chats without tools nothing."""
    engine = make_engine(tool_parser=TagParser(held_from=""))
    assert streamed(engine, tools=[])[0] == ["one", " two"]


def test_a_sample_compares_what_the_model_wrote(make_engine, backend) -> None:
    """Two answers that call different tools do not agree, though neither has text."""
    config = CacheCraftConfig(self_test=False, feedback_share=1.0, max_first_token_kl=1e9)
    engine = make_engine(config, tool_parser=TagParser())
    backend.scripts += [(f"<call>{name}</call>",) for name in ("clock", "weather", "clock")]
    question = [{"role": "user", "content": f"{RIVER.text}\n\nWhen?"}]
    engine.chat(question, chunks=[RIVER], tools=[WEATHER, CLOCK])
    engine.drain_feedback()
    stats = engine.stats()["feedback"]
    assert (stats["num_examined"], stats["num_agreeing"]) == (1, 0)
    assert len({request.token_ids for request in backend.requests}) == 1


def test_a_named_parser_is_known_before_the_start(model_folder) -> None:
    """Asking for it does not start vLLM."""
    with CacheCraftEngine(model_folder, tool_parser="hermes") as engine:
        assert engine.has_tool_parser
        assert not engine.is_started
