"""The arguments of one call, checked before any work is done and before the engine starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cachecraft_rag.chunks import SHARED_TENANT, Chunk
from cachecraft_rag.config import REUSE_MODES, check_ratio
from cachecraft_rag.engine.api import Message, SamplingOptions
from cachecraft_rag.engine.tools import ToolOptions, check_tools
from cachecraft_rag.errors import InvalidRequestError

_FLAGS = ("store", "precision_critical", "read_prefix_cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """What one call asks for, besides its prompt and its chunks.

    Attributes:
        reuse: "auto", "off" (full compute), "exact", or the name of a strategy, which is obeyed.
        recompute_ratio: share of each reused chunk to recompute, in [0, 1]; None leaves it to the
            configuration.
        granularity: tokens are recomputed in runs of this many; None leaves it to the configuration.
        tenant: no KV crosses it; None is the configuration's default tenant.
        store: False leaves nothing behind, neither in the store nor in vLLM's prefix cache; what is
            stored already may still be reused.
        precision_critical: compute in full, whatever `reuse` says.
        read_prefix_cache: False keeps the request apart from vLLM's own prefix cache, for measuring:
            it finds nothing there and leaves nothing that a later request finds.
        tools: `tools`, `tool_choice` and `parallel_tool_calls` of a chat.

    Raises:
        InvalidRequestError: a value breaks its rule.
    """

    reuse: str = "auto"
    recompute_ratio: float | None = None
    granularity: int | None = None
    tenant: str | None = None
    store: bool = True
    precision_critical: bool = False
    read_prefix_cache: bool = True
    tools: ToolOptions = field(default_factory=ToolOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)

    def __post_init__(self) -> None:
        _check_reuse(self.reuse)
        if self.recompute_ratio is not None:
            check_ratio(self.recompute_ratio, InvalidRequestError)
        if self.granularity is not None and (not isinstance(self.granularity, int) or self.granularity < 1):
            raise InvalidRequestError(f"granularity is {self.granularity!r}: it must be at least 1")
        check_tenant(self.tenant)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} is {getattr(self, name)!r}: it must be True or False")
        if self.tools.is_forced and self.sampling.structured is not None:
            raise InvalidRequestError(
                f"tool_choice is {self.tools.choice!r} and structured is given: an answer cannot be a tool "
                "call and keep another form, so leave one of them out"
            )

    @classmethod
    def from_kwargs(cls, options: Mapping[str, Any]) -> CallOptions:
        """Split a call's keyword arguments into reuse options and sampling options.

        Raises:
            InvalidRequestError: an unknown name, or a value that breaks its rule; or the tenant is the
                shared one, into which a question would carry what only its author may see.
        """
        if options.get("tenant") == SHARED_TENANT:
            raise InvalidRequestError(
                f"tenant is {SHARED_TENANT!r}, which answers nothing: fill it with warm(), and mark "
                "chunks with is_shared=True to read it from any tenant"
            )
        left = dict(options)
        tools = ToolOptions(
            check_tools(left.pop("tools", None)),
            left.pop("tool_choice", "auto"),
            left.pop("parallel_tool_calls", True),
        )
        ours = {name: left.pop(name) for name in _OWN_NAMES & left.keys()}
        return cls(**ours, tools=tools, sampling=SamplingOptions.from_kwargs(left))


_OWN_NAMES = frozenset({"reuse", "recompute_ratio", "granularity", "tenant", *_FLAGS})


def _check_reuse(reuse: object) -> None:
    if isinstance(reuse, str) and reuse in REUSE_MODES:
        return
    from cachecraft_rag.planner.strategies import STRATEGIES

    if not isinstance(reuse, str) or reuse not in STRATEGIES:
        raise InvalidRequestError(
            f"reuse is {reuse!r}: use {', '.join(map(repr, REUSE_MODES))} or the name of a strategy "
            f"({', '.join(STRATEGIES)})"
        )


def check_tenant(tenant: object) -> None:
    """Raise InvalidRequestError unless `tenant` is None or a non-empty string."""
    if tenant is not None and (not isinstance(tenant, str) or not tenant):
        raise InvalidRequestError(f"tenant is {tenant!r}: it must be a non-empty string, or None")


def check_chunks(chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
    """The chunks as a tuple.

    Raises:
        InvalidRequestError: an element is not a `Chunk`.
    """
    if isinstance(chunks, (str, Mapping, Chunk)) or not isinstance(chunks, Iterable):
        raise InvalidRequestError(f"chunks is a {type(chunks).__name__}: pass a sequence of Chunk")
    for index, chunk in enumerate(chunks):
        if not isinstance(chunk, Chunk):
            raise InvalidRequestError(
                f"chunks[{index}] is a {type(chunk).__name__}: wrap its text as Chunk(text=...)"
            )
    return tuple(chunks)


def check_messages(messages: Sequence[Message]) -> Sequence[Message]:
    """Raise InvalidRequestError unless `messages` is a non-empty sequence of mappings."""
    if isinstance(messages, (str, Mapping)) or not messages:
        raise InvalidRequestError(
            f"messages is {messages!r}: pass a non-empty sequence of "
            '{"role": ..., "content": ...}, or use complete() for plain text'
        )
    for index, message in enumerate(messages):
        # A message that only calls tools may come without content.
        is_call = isinstance(message, Mapping) and bool(message.get("tool_calls"))
        needed = {"role"} if is_call else {"role", "content"}
        if not isinstance(message, Mapping) or not needed <= message.keys():
            raise InvalidRequestError(f"messages[{index}] is {message!r}: it needs 'role' and 'content'")
    return messages


def check_no_tools(options: CallOptions) -> CallOptions:
    """Raise InvalidRequestError if there are tools: a finished prompt has no place to show them."""
    if options.tools.tools:
        raise InvalidRequestError("tools are given to complete(): call chat(), which shows them to the model")
    return options


def check_prompt(prompt: str) -> str:
    """Raise InvalidRequestError unless `prompt` is a non-empty string."""
    if not isinstance(prompt, str) or not prompt:
        raise InvalidRequestError(f"prompt is {prompt!r}: pass a non-empty string")
    return prompt
