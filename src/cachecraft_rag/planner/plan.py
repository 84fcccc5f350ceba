"""The plan of one request: what happens to every token of its prompt. Plain frozen values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from cachecraft_rag.chunks import ChunkKey, DocumentRef, Span, parts_within
from cachecraft_rag.errors import PlanError
from cachecraft_rag.events import ChunkDecision, Reason
from cachecraft_rag.planner.live import LiveSelection


class PromptChunk(Protocol):
    """What the planner must know of a chunk in a prompt; `vllm_connector.messages.ChunkRef` fits."""

    @property
    def span(self) -> Span: ...
    @property
    def key(self) -> ChunkKey: ...
    @property
    def prefix_hash(self) -> str: ...
    @property
    def document(self) -> DocumentRef | None: ...
    @property
    def separator(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a plan is made from, besides the index.

    Attributes:
        num_tokens: length of the prompt, at least 1.
        chunks: in prompt order, disjoint.
        strategy: a name from `strategies.STRATEGIES`.
        alpha: Cache-Craft eq. 12.
        share: share of a reused chunk to recompute, for strategies without a formula.
        recompute_ratio: fixed share in [0, 1] to recompute of each chunk that is not exact.
        granularity: length of the runs in which tokens are selected.
        exact_only: reuse only behind an identical prefix.
        refusals: index in `chunks` → why that chunk may not be looked up.
    """

    num_tokens: int
    chunks: Sequence[PromptChunk]
    strategy: str
    alpha: float
    share: float = 0.0
    recompute_ratio: float | None = None
    granularity: int = 1
    exact_only: bool = False
    refusals: Mapping[int, Reason] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """What happens to one chunk.

    Attributes:
        span: the whole chunk in the prompt.
        record_id: the stored variant that is used, None if none is.
        cached_start: position of the chunk's first token when that KV was computed, else -1.
        recompute: positions in the prompt, below the plan's `context_end`, whose KV is computed
            again; sorted and merged. Empty for a chunk without a record: all of it is computed.
        same_predecessors: the chunks before it are the same, in the same order, as at capture.
        num_separator_tokens: tokens right behind the chunk whose KV comes with it: the same short
            text followed it at capture.
    """

    span: Span
    key: ChunkKey
    decision: ChunkDecision
    reason: Reason
    record_id: int | None = None
    cached_start: int = -1
    recompute: tuple[Span, ...] = ()
    same_predecessors: bool = False
    document: DocumentRef | None = None
    num_separator_tokens: int = 0

    @property
    def loaded_span(self) -> Span:
        """The chunk and the separator that comes with it."""
        return Span(self.span.start, self.span.end + self.num_separator_tokens)

    @property
    def variant(self) -> int | None:
        """The name that reports use for `record_id`."""
        return self.record_id


@dataclass(frozen=True, slots=True)
class Load:
    """KV to bring into the prompt: the record's tokens from `record_offset` on go to `span`."""

    record_id: int
    span: Span
    record_offset: int = 0


@dataclass(frozen=True, slots=True)
class ReusePlan:
    """What happens to the tokens `[0, context_end)`; the model's own forward computes the rest.

    Attributes:
        num_tokens: length of the prompt.
        chunks: in prompt order.
        kept: positions whose loaded KV is used as it is; sorted, each span inside one chunk and its
            separator.
        recompute: all other positions of `[0, context_end)`; sorted and merged.
        live: tokens among `kept` that the workers choose to recompute once the KV is loaded; `resolve`
            gives the plan that came of it.

    Raises:
        PlanError: `context_end` is negative. All other rules are checked by `validate`.
    """

    num_tokens: int
    context_end: int
    chunks: tuple[ChunkPlan, ...]
    strategy: str
    live: LiveSelection | None = field(default=None, compare=False)
    kept: tuple[Span, ...] = field(init=False, repr=False, compare=False)
    recompute: tuple[Span, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        kept = tuple(
            part
            for chunk in self.chunks
            if chunk.record_id is not None
            for part in _without(self._in_context(chunk), chunk.recompute)
        )
        object.__setattr__(self, "kept", kept)
        object.__setattr__(self, "recompute", tuple(_without(Span(0, self.context_end), kept)))

    def resolve(self, chosen: Sequence[Span]) -> ReusePlan:
        """The plan after the workers chose `chosen` (sorted and merged) of its live candidates."""
        if self.live is None:
            return self
        names = {candidate.span.start for candidate in self.live.candidates}
        chunks = tuple(
            _with_chosen(chunk, chosen) if chunk.span.start in names else chunk for chunk in self.chunks
        )
        return replace(self, chunks=chunks, live=None)

    def recompute_share(self, chunk: ChunkPlan) -> float:
        """Share of a loaded chunk's tokens that is computed again (Cache-Craft's CFO); where the workers
        choose tokens over all chunks, the share of all."""
        if self.live is not None:
            return min(1.0, self.live.num_tokens / max(1, self.live.num_candidates))
        return sum(map(len, chunk.recompute)) / len(chunk.span)

    @property
    def uses_store(self) -> bool:
        """Whether any chunk was found and may be used."""
        return any(chunk.decision is not ChunkDecision.COMPUTED for chunk in self.chunks)

    @property
    def loads(self) -> tuple[Load, ...]:
        """One per chunk of which at least one token is kept, clipped to `context_end`."""
        return tuple(
            Load(chunk.record_id, self._in_context(chunk))
            for chunk in self.chunks
            if chunk.record_id is not None and self.count_kept(chunk)
        )

    @property
    def exact_until(self) -> int:
        """KV below this position equals a full prefill's; `num_tokens` if all of it does."""
        approximate = (ChunkDecision.REUSED, ChunkDecision.REPAIRED)
        for chunk in self.chunks:
            if chunk.decision in approximate:
                for part in _without(self._in_context(chunk), chunk.recompute):
                    return part.start
        return self.num_tokens

    @property
    def is_exact(self) -> bool:
        return self.exact_until == self.num_tokens

    @property
    def num_kept(self) -> int:
        """Tokens whose loaded KV is used as it is."""
        return sum(map(len, self.kept))

    @property
    def num_recomputed(self) -> int:
        """Cached tokens computed again, a cached last token of the prompt included."""
        return sum(len(c.loaded_span) for c in self.chunks if c.record_id is not None) - self.num_kept

    @property
    def num_computed(self) -> int:
        """Tokens that had no cached KV, inside and outside of chunks."""
        return self.num_tokens - self.num_kept - self.num_recomputed

    def count_kept(self, chunk: ChunkPlan) -> int:
        """Tokens of one of this plan's chunks, its separator included, whose loaded KV is kept."""
        if chunk.record_id is None:
            return 0
        return len(self._in_context(chunk)) - sum(map(len, chunk.recompute))

    def validate(self) -> None:
        """Check that the plan covers its prompt exactly once.

        Raises:
            PlanError: the context leaves no token to compute; chunks are out of order, overlap or
                leave the prompt; a chunk lacks its record or recomputes what is not its own; or
                `kept` and `recompute` do not tile `[0, context_end)`.
        """
        if not 0 <= self.context_end <= self.num_tokens - 1:
            raise PlanError(
                f"context_end is {self.context_end} in a prompt of {self.num_tokens} tokens: it must "
                "lie in [0, num_tokens - 1], as the last token is always computed"
            )
        _check_order([chunk.loaded_span for chunk in self.chunks], Span(0, self.num_tokens), "chunks")
        for chunk in self.chunks:
            self._check_chunk(chunk)
        _check_tiling((*self.kept, *self.recompute), self.context_end)

    def _check_chunk(self, chunk: ChunkPlan) -> None:
        if (chunk.record_id is None) != (chunk.decision is ChunkDecision.COMPUTED):
            raise PlanError(
                f"chunk {chunk.span} is {chunk.decision} with record {chunk.record_id}: "
                "all chunks but computed ones have a record"
            )
        if chunk.recompute and chunk.record_id is None:
            raise PlanError(f"chunk {chunk.span} has tokens to recompute but no record")
        if chunk.recompute:
            _check_order(chunk.recompute, self._in_context(chunk), "recompute")

    def _in_context(self, chunk: ChunkPlan) -> Span:
        return chunk.loaded_span.clip(0, self.context_end)


def _with_chosen(chunk: ChunkPlan, chosen: Sequence[Span]) -> ChunkPlan:
    recompute = parts_within(chosen, chunk.span)
    decision = ChunkDecision.REPAIRED if recompute else ChunkDecision.REUSED
    return replace(chunk, recompute=recompute, decision=decision)


def _without(span: Span, holes: Sequence[Span]) -> Iterator[Span]:
    """The non-empty parts of `span` between the sorted `holes`."""
    position = span.start
    for hole in holes:
        if position < hole.start:
            yield Span(position, hole.start)
        position = hole.end
    if position < span.end:
        yield Span(position, span.end)


def _check_order(spans: Sequence[Span], limits: Span, name: str) -> None:
    position = limits.start
    for span in spans:
        if span.start < position:
            raise PlanError(f"{name}: {span} starts before {position}: need order and no overlap")
        position = span.end
    if position > limits.end:
        raise PlanError(f"{name}: they end at {position}, outside of {limits}")


def _check_tiling(spans: Sequence[Span], end: int) -> None:
    ends = {span.start: span.end for span in spans}
    position = 0
    while position < end:
        try:
            position = ends.pop(position)
        except KeyError:
            raise PlanError(f"no span starts at {position}, so it is not covered exactly once") from None
    if ends or position > end or sum(map(len, spans)) != end:
        raise PlanError(f"spans overlap or reach past {end}: every token is covered exactly once")
