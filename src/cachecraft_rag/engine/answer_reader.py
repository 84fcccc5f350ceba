"""From what the model wrote to what the caller gets: text, and calls of tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from cachecraft_rag.engine.api import SamplingOptions
from cachecraft_rag.engine.forced_call import call_schema, read_calls
from cachecraft_rag.engine.options import CallOptions
from cachecraft_rag.engine.tools import StructuredOutput, ToolCall

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a whole answer says."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()


class AnswerReader(Protocol):
    """Reads the answers to one call.

    Attributes:
        held_from: a stream hands nothing out from this text on, for it may be a call that begins; ""
            holds everything back, None nothing.
        keeps_special_tokens: special tokens are part of what is read.
    """

    @property
    def held_from(self) -> str | None: ...
    @property
    def keeps_special_tokens(self) -> bool: ...

    def read(self, written: str) -> Reading: ...


class ToolParser(Protocol):
    """Knows how a model writes calls of tools; `tool_parsers` makes one of vLLM's."""

    def reader(self, tools: Tools) -> AnswerReader: ...


@dataclass(frozen=True, slots=True)
class AsWritten:
    """The answer is the text that the model wrote."""

    held_from: str | None = None
    keeps_special_tokens: bool = False

    def read(self, written: str) -> Reading:
        return Reading(written)


@dataclass(frozen=True, slots=True)
class ForcedCalls:
    """The answer is bound to be calls; one that was cut is the text so far."""

    held_from: str | None = ""
    keeps_special_tokens: bool = False

    def read(self, written: str) -> Reading:
        calls = read_calls(written)
        return Reading("" if calls else written, calls)


@dataclass(frozen=True, slots=True)
class FirstCall:
    """As another reader, with no more than one call."""

    reader: AnswerReader

    @property
    def held_from(self) -> str | None:
        return self.reader.held_from

    @property
    def keeps_special_tokens(self) -> bool:
        return self.reader.keeps_special_tokens

    def read(self, written: str) -> Reading:
        reading = self.reader.read(written)
        return replace(reading, tool_calls=reading.tool_calls[:1])


class TextGate:
    """What of a streamed answer may be handed out already."""

    def __init__(self, held_from: str | None) -> None:
        self._held_from = held_from
        self._written = ""
        self._num_shown = 0

    def add(self, text: str) -> str:
        """The text that may follow now that `text` was written."""
        self._written += text
        start, end = self._num_shown, self._safe_end()
        self._num_shown = end
        return self._written[start:end]

    def rest(self, text: str) -> str:
        """What was held back of an answer that turned out to be `text`."""
        return text[self._num_shown :]

    def _safe_end(self) -> int:
        mark, written = self._held_from, self._written
        if mark is None:
            return len(written)
        found = written.find(mark, self._num_shown)
        if found >= 0:
            return found
        begun = (size for size in range(len(mark) - 1, 0, -1) if written.endswith(mark[:size]))
        return len(written) - next(begun, 0)


def make_reader(options: CallOptions, parser: ToolParser | None) -> AnswerReader:
    """How the answer to a call is to be read; `parser` reads calls that nobody forced."""
    tools = options.tools
    if tools.is_forced:
        return ForcedCalls()
    # An answer bound to another form cannot be a call.
    if parser is None or not tools.shown or options.sampling.structured is not None:
        return AsWritten()
    reader = parser.reader(tools.shown)
    return reader if tools.parallel else FirstCall(reader)


def bound_sampling(options: CallOptions) -> SamplingOptions:
    """The sampling options of a call, bound to the calls that it forces."""
    if not options.tools.is_forced:
        return options.sampling
    return replace(options.sampling, structured=StructuredOutput(json_schema=call_schema(options.tools)))
