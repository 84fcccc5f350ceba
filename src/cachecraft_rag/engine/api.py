"""What an engine offers to the adapters: one protocol, its results, and the sampling options."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from html import escape
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from cachecraft_rag.chunks import Chunk
from cachecraft_rag.engine.tools import StructuredOutput, ToolCall
from cachecraft_rag.errors import InvalidRequestError
from cachecraft_rag.events import ReuseReport

if TYPE_CHECKING:
    from rich.console import RenderableType

KV_TRANSFER_PARAMS = "kv_transfer_params"
"""Key of vLLM's `extra_args` under which a request speaks to its KV connector."""
Message = Mapping[str, Any]
"""A chat message: `{"role": str, "content": str | list of {"type": "text", "text": str}}`; in OpenAI's form
an assistant's may also have `tool_calls`, and a tool's `tool_call_id` and `name`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen. Greedy by default: retrieval wants the same answer twice.

    Attributes:
        max_tokens: most tokens to generate.
        stop: texts that end the answer; they are not part of it.
        logprobs: also return the log-probabilities of this many tokens at each step.
        seed: makes `temperature > 0` repeatable.
        structured: a form that the answer must have.
        extra_args: what a logits processor of your own reads (vLLM's `SamplingParams.extra_args`).

    Raises:
        InvalidRequestError: a value breaks its rule.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_tokens: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    structured: StructuredOutput | None = None
    extra_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, kinds in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kinds) or isinstance(value, bool) or value != value:
                names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
                raise InvalidRequestError(f"{name} is {value!r}: it must be {names}")
        if not all(isinstance(text, str) for text in self.stop):
            raise InvalidRequestError(f"stop is {self.stop!r}: it must be a text, or a sequence of texts")
        if self.max_tokens < 1:
            raise InvalidRequestError(f"max_tokens is {self.max_tokens!r}: it must be at least 1")
        if self.temperature < 0:
            raise InvalidRequestError(f"temperature is {self.temperature!r}: it must not be negative")
        if not 0 < self.top_p <= 1:
            raise InvalidRequestError(f"top_p is {self.top_p!r}: it must lie in (0, 1]")
        if self.structured is not None and not isinstance(self.structured, StructuredOutput):
            raise InvalidRequestError(
                f"structured is a {type(self.structured).__name__}: pass a StructuredOutput"
            )
        if KV_TRANSFER_PARAMS in self.extra_args:
            raise InvalidRequestError(f"extra_args holds {KV_TRANSFER_PARAMS!r}, which is the engine's own")
        if self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens!r}, more than max_tokens={self.max_tokens!r}"
            )

    @classmethod
    def from_kwargs(cls, options: Mapping[str, Any]) -> SamplingOptions:
        """Build from keyword arguments; `stop` may be one string or a sequence of them.

        Raises:
            InvalidRequestError: an unknown name, or a value that breaks its rule.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise InvalidRequestError(
                f"unknown sampling option {', '.join(map(repr, unknown))}: "
                f"known are {', '.join(sorted(known))}"
            )
        values = dict(options)
        stop = values.get("stop") or ()
        if not isinstance(stop, (str, Sequence)):
            raise InvalidRequestError(f"stop is {stop!r}: it must be a text, or a sequence of texts")
        values["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        return cls(**values)


_KINDS: Mapping[str, tuple[type, ...]] = {
    "max_tokens": (int,),
    "min_tokens": (int,),
    "top_k": (int,),
    "seed": (int, type(None)),
    "logprobs": (int, type(None)),
    "temperature": (float, int),
    "top_p": (float, int),
}


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer and what reuse did for it.

    Attributes:
        logprobs: one mapping token id → log-probability per generated token, if asked for.
        text: what stands before the tool calls, if there are any.
        finish_reason: "stop", "length", "abort" or, if tools are to be called, "tool_calls".
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    report: ReuseReport
    prompt_token_ids: tuple[int, ...] = ()
    logprobs: tuple[Mapping[int, float], ...] | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_cache_read_tokens(self) -> int:
        """Prompt tokens whose KV was taken over; recomputed ones are not among them."""
        return min(self.report.num_reused_tokens, self.num_prompt_tokens)

    @property
    def num_cache_creation_tokens(self) -> int:
        """Prompt tokens whose KV was stored for later requests, none of them counted as read too."""
        return min(self.report.num_stored_tokens, self.num_prompt_tokens - self.num_cache_read_tokens)

    def _repr_html_(self) -> str:
        """What a notebook shows: the answer above its report."""
        answer = f'<div style="white-space:pre-wrap;margin-bottom:8px">{escape(self.text)}</div>'
        return answer + self.report._repr_html_()

    def __rich__(self) -> RenderableType:
        """What `rich.print` shows: the answer above its report."""
        from rich.console import Group
        from rich.text import Text

        return Group(Text(self.text), Text(), self.report)


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """A piece of a streamed answer; the last one carries the whole `Completion`. Tool calls come with it
    only: no piece holds the text they were written in."""

    text: str
    token_ids: tuple[int, ...] = ()
    completion: Completion | None = None


@runtime_checkable
class ChatEngine(Protocol):
    """The part of `CacheCraftEngine` that adapters use; `testing.FakeEngine` has it too.

    Keyword arguments of all calls: `chunks`, `reuse` ("auto", "off", "exact" or a strategy name),
    `recompute_ratio`, `granularity`, `tenant`, `store`, and the fields of `SamplingOptions`; of chats also
    `tools`, `tool_choice` and `parallel_tool_calls` (see `ToolOptions`).
    """

    @property
    def model_name(self) -> str: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def is_started(self) -> bool: ...
    @property
    def has_tool_parser(self) -> bool: ...

    def encode(self, text: str) -> list[int]: ...

    def chat(
        self, messages: Sequence[Message], *, chunks: Sequence[Chunk] = (), **options: Any
    ) -> Completion: ...
    async def achat(
        self, messages: Sequence[Message], *, chunks: Sequence[Chunk] = (), **options: Any
    ) -> Completion: ...
    def stream_chat(
        self, messages: Sequence[Message], *, chunks: Sequence[Chunk] = (), **options: Any
    ) -> Iterator[CompletionDelta]: ...
    def astream_chat(
        self, messages: Sequence[Message], *, chunks: Sequence[Chunk] = (), **options: Any
    ) -> AsyncIterator[CompletionDelta]: ...

    def complete(self, prompt: str, *, chunks: Sequence[Chunk] = (), **options: Any) -> Completion: ...
    async def acomplete(self, prompt: str, *, chunks: Sequence[Chunk] = (), **options: Any) -> Completion: ...
    def stream_complete(
        self, prompt: str, *, chunks: Sequence[Chunk] = (), **options: Any
    ) -> Iterator[CompletionDelta]: ...
    def astream_complete(
        self, prompt: str, *, chunks: Sequence[Chunk] = (), **options: Any
    ) -> AsyncIterator[CompletionDelta]: ...

    def prefetch(self, chunks: Sequence[Chunk], *, tenant: str | None = None) -> None: ...
    def warm(
        self, chunks: Sequence[Chunk], *, system: str | None = None, tenant: str | None = None
    ) -> int: ...
    def replace(
        self, doc_id: str, version: str | None, chunks: Sequence[Chunk], *, tenant: str | None = None
    ) -> int: ...
    def invalidate(self, doc_id: str, version: str | None = None, *, tenant: str | None = None) -> int: ...
    def invalidate_chunk(self, chunk: Chunk | str, *, tenant: str | None = None) -> int: ...
    def close(self) -> None: ...
