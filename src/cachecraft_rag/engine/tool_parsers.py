"""vLLM's parsers of tool calls: which text of a model means a call."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

from cachecraft_rag.engine.answer_reader import AnswerReader, Reading, Tools
from cachecraft_rag.engine.tools import ToolCall, new_call
from cachecraft_rag.errors import ConfigurationError, InvalidRequestError
from cachecraft_rag.segments.render import shows_tools

logger = logging.getLogger(__name__)

_OUR_TEXT = "hermes"
"""Reads what `segments.tool_text` asks the model for."""
_START_TEXTS = ("tool_calls_start_token", "tool_call_start_token")
"""Where vLLM's parsers say what every call begins with. Their `bot_token` was left out: the parser of
Llama also takes calls without it."""


def check_tool_parser(name: str | None) -> None:
    """Raise ConfigurationError unless vLLM has a tool parser of this name; None is none to check."""
    known = {*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers}
    if name is not None and name not in known:
        raise ConfigurationError(f"tool_parser is {name!r}: vLLM knows {', '.join(sorted(known))}")


def make_tool_parser(name: str | None, tokenizer: Any) -> VllmToolParser | None:
    """The parser of this name; for None the one that reads what we ask for, where the chat template does
    not show tools and we do it.

    Raises:
        ConfigurationError: it does not fit the tokenizer, or cannot read text.
    """
    if name is None and (not tokenizer.chat_template or shows_tools(tokenizer)):
        return None
    return VllmToolParser(name or _OUR_TEXT, tokenizer)


class VllmToolParser:
    """A tool parser of vLLM on the model's tokenizer."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        self._type = ToolParserManager.get_tool_parser(name)
        self._tokenizer = tokenizer
        request = ChatCompletionRequest(messages=[])
        try:
            self._type(tokenizer, None).extract_tool_calls("", request)
        # They raise what they like where the tokenizer lacks their marks, or where they are mere names
        # for parsers of vLLM's server.
        except Exception as error:
            raise ConfigurationError(
                f"tool_parser is {name!r}, which cannot be used with this model: {error}"
            ) from error

    def reader(self, tools: Tools) -> AnswerReader:
        try:
            request = ChatCompletionRequest(messages=[], tools=list(tools), tool_choice="auto")
            parser = self._type(self._tokenizer, request.tools)
            request = parser.adjust_request(request)
        except ValueError as error:
            raise InvalidRequestError(f"vLLM's tool parser refused the tools: {error}") from error
        starts = (getattr(parser, name, None) for name in _START_TEXTS)
        start = next((text for text in starts if isinstance(text, str)), "")
        return _ParsedCalls(parser, request, start, not request.skip_special_tokens)


@dataclass(frozen=True, slots=True)
class _ParsedCalls:
    parser: Any
    request: Any
    held_from: str
    keeps_special_tokens: bool

    def read(self, written: str) -> Reading:
        content, calls = self._extract(written)
        if not self.held_from:
            return Reading(content, calls)
        # A stream has handed out exactly this text by now, so it is the text of any other answer too.
        return Reading(written.partition(self.held_from)[0] if calls else written, calls)

    def _extract(self, written: str) -> tuple[str, tuple[ToolCall, ...]]:
        """Content and calls; no calls where one of them cannot be read."""
        try:
            found = self.parser.extract_tool_calls(written, self.request)
            calls = tuple(_call(each.function) for each in found.tool_calls) if found.tools_called else ()
        # A call that is not well written is no fault of the caller's: it stays text.
        except Exception as error:
            logger.warning("an answer's tool calls could not be read: %r", error)
            return written, ()
        content = found.content or ""
        return (content if calls else content or written), calls


def _call(function: Any) -> ToolCall:
    arguments = json.loads(function.arguments or "{}")
    if not isinstance(arguments, Mapping):
        raise ValueError(f"arguments are no object: {function.arguments!r}")
    return new_call(function.name, arguments)
