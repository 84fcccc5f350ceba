"""Tools and bound answers, on a backend without vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from cachecraft_rag.engine import CacheCraftEngine
from cachecraft_rag.errors import InvalidRequestError

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
