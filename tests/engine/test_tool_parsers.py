"""vLLM's own tool parsers behind our seam."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cachecraft_rag.engine import CacheCraftEngine
from cachecraft_rag.errors import ConfigurationError, InvalidRequestError

pytestmark = pytest.mark.engine  # they import vLLM

TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
TOOLS_SHOWN = "{% for t in tools %}{{ t.function.name }}{% endfor %}{% for m in messages %}{{ m.content }}"
TOOLS_SHOWN += "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"


@pytest.fixture
def make_parser() -> Any:
    from cachecraft_rag.engine.tool_parsers import make_tool_parser

    return make_tool_parser


def read(parser: Any, written: str) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    reading = parser.reader([TOOL]).read(written)
    return reading.text, [(call.name, call.arguments) for call in reading.tool_calls]


@pytest.mark.parametrize("name", ["hermes", None])
def test_calls_in_hermes_form_are_read(make_parser, tokenizer, name: str | None) -> None:
    """Named, or chosen because we ask for this form where a chat template shows no tools."""
    parser = make_parser(name, tokenizer)
    call = '<tool_call>\n{"name": "clock", "arguments": {"zone": "é"}}\n</tool_call>'
    assert read(parser, f"I look.\n{call}\n{call}") == ("I look.\n", [("clock", {"zone": "é"})] * 2)
    assert read(parser, "No call.") == ("No call.", [])
    assert parser.reader([TOOL]).held_from == "<tool_call>"
    assert parser.reader([TOOL]).keeps_special_tokens


@pytest.mark.parametrize(
    "body", ['{"name": "clock", ', '{"name": "clock"}', '{"name": "clock", "arguments": [1]}']
)
def test_a_call_that_cannot_be_read_is_text(make_parser, tokenizer, body: str) -> None:
    """A weak model's slip is no error."""
    written = f"I look. <tool_call>{body}</tool_call>"
    assert read(make_parser("hermes", tokenizer), written) == (written, [])


def test_a_parser_that_names_no_start_holds_everything(make_parser, tokenizer) -> None:
    """A call of this form begins with a bracket, as other text may."""
    parser = make_parser("pythonic", tokenizer)
    assert parser.reader([TOOL]).held_from == ""
    assert read(parser, "[clock(zone='x')]") == ("", [("clock", {"zone": "x"})])


def test_no_parser_is_guessed_for_a_template_that_shows_tools(make_parser, make_tools_template) -> None:
    """Its model has a form of its own, which the user has to name."""
    assert make_parser(None, make_tools_template(TOOLS_SHOWN)) is None
    assert make_parser(None, make_tools_template(None)) is None


@pytest.fixture
def make_tools_template(tokenizer) -> Any:
    import copy

    def make(template: str | None) -> Any:
        other = copy.copy(tokenizer)
        other.chat_template = template
        return other

    return make


@pytest.mark.parametrize("name", ["mistral", "openai"])
def test_a_parser_that_does_not_fit_is_refused(make_parser, tokenizer, name: str) -> None:
    """One that misses its marks in the tokenizer, one that is a mere name for vLLM's server."""
    with pytest.raises(ConfigurationError, match=f"'{name}', which cannot be used with this model"):
        make_parser(name, tokenizer)


def test_tools_that_vllm_refuses_are_a_request_error(make_parser, tokenizer) -> None:
    """What only vLLM checks names the tools."""
    unnamed = {"type": "function", "function": {"name": "clock", "description": 3}}
    with pytest.raises(InvalidRequestError, match="refused the tools"):
        make_parser("hermes", tokenizer).reader([unnamed])


def test_an_unknown_parser_is_named_with_the_known_ones(model_folder: Path) -> None:
    """Found at the start, before vLLM loads the model."""
    with (
        CacheCraftEngine(model_folder, tool_parser="hermès") as engine,
        pytest.raises(ConfigurationError, match=r"tool_parser is 'hermès': vLLM knows .*hermes.*mistral"),
    ):
        engine.start()
