"""What the scheduler side orders the workers to do in one engine step, and what they answer.

Both travel by pickle between vLLM's own processes, never to disk. Every rank gets the same orders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cachecraft_rag.chunks import AttentionProfile, RecordMeta, Span
from cachecraft_rag.planner.live import LiveSelection
from cachecraft_rag.planner.plan import Load
from cachecraft_rag.store.cold import ColdVariant
from cachecraft_rag.store.record_format import BlobEntry

LEAD_PREFIX = "lead:"
"""Sinks named `lead:<tenant>:<prefix hash>` hold the keys of the text before a prompt's first chunk."""


@dataclass(frozen=True, slots=True)
class ContextChunk:
    """A chunk standing before a captured one: where, and the record that holds its keys."""

    span: Span
    record_id: int


@dataclass(frozen=True, slots=True)
class NewRecord:
    """A record to be filled.

    Attributes:
        num_tokens: of the chunk; the profile is about them.
        num_separator_tokens: stored behind them.
        start: position of the chunk's first token in the prompt it is captured from.
        context: chunks before it in that prompt whose keys are on the shelf, in prompt order.
        prefix_index: for each context chunk, its place in the record's `prefix_chunks`.
        num_prefix_chunks: length of `prefix_chunks`.
        lead: sink that holds the keys of the text before the first chunk.
        is_scratch: not for the store: later records of the same prompt need its keys.
    """

    record_id: int
    num_tokens: int
    num_separator_tokens: int
    start: int
    context: tuple[ContextChunk, ...]
    prefix_index: tuple[int, ...]
    num_prefix_chunks: int
    lead: str
    is_scratch: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class CaptureTarget:
    """Rows to copy while they are computed.

    Attributes:
        sink: a record id, or the name of a lead buffer.
        offset: row of the sink that takes the first slot's KV.
        slots: int64 (num_tokens,), ascending positions' slots in the paged cache.
        num_sink_tokens: rows the sink has in all.
    """

    sink: int | str
    offset: int
    slots: np.ndarray
    num_sink_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class LoadJob:
    """Fill `[start, end)` of one request's KV while it waits, over as many steps as that takes.

    Attributes:
        engine_request_id: vLLM's name of the request; `request_id` is our own.
        token_ids: int32, the prompt up to the end of the job and of `probe`.
        block_ids: int32, the request's block table up to there.
        loads: records to place; tokens in `recompute` are computed instead.
        recompute: ascending, disjoint; with the loaded tokens they cover the job up to `probe`.
        captures: rows to copy while they are computed.
        live: tokens to choose, and to compute too, once the loads are done.
        probe: the question, right behind the context: computed once to see what it attends to.
        end: behind the last token that was promised; from the start of `probe` on tokens are computed
            last, when their context is repaired.
        lead: sink that holds the keys of the text before the first chunk.
    """

    request_id: str
    engine_request_id: str
    start: int
    token_ids: np.ndarray
    block_ids: np.ndarray
    loads: tuple[Load, ...]
    recompute: tuple[Span, ...]
    probe: Span
    end: int
    captures: tuple[CaptureTarget, ...] = ()
    live: LiveSelection | None = None
    lead: str = ""

    @property
    def tail(self) -> Span:
        """The part of the question that was promised."""
        return Span(self.probe.start, self.end)


@dataclass(frozen=True, slots=True)
class ColdRead:
    """Fill `record_id` from a cold tier, and copy what was read to the tiers `copy_to`, behind.

    If there are any, the copy is answered with a `WrittenPart`, whatever became of it.
    """

    record_id: int
    variant: ColdVariant
    copy_to: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """One rank's blob of a record, new or copied; `tiers` is empty if it was not written."""

    entry: BlobEntry | None
    tiers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadedPart:
    """One rank's read of a record; `profile` as it was stored, None if there was none."""

    is_loaded: bool
    profile: AttentionProfile | None = None


@dataclass(frozen=True, slots=True)
class ColdFacts:
    """What one rank's side threads finished, by record id."""

    written: Mapping[int, WrittenPart] = field(default_factory=dict)
    loaded: Mapping[int, LoadedPart] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.written or self.loaded)


@dataclass(frozen=True, slots=True)
class StepOrders:
    """One step's orders.

    Attributes:
        num_work_tokens: tokens that this step may compute for load jobs, new ones and those under way.
        dropped: vLLM's names of requests whose jobs are no longer wanted; their blocks go back to vLLM
            with the answer to this step.
        failed: vLLM's names of requests for which no job could be made.
        freed: records whose payload is no longer wanted; carried out before anything else.
        reports, replies: answers that the driver will fetch, by request id and control id.
        forget_leads: drop all lead buffers, whoever's: a tenant was purged.
        cold_writes: records to be written to the cold tiers.
        cold_reads: records to be read from them.
    """

    new_records: tuple[NewRecord, ...] = ()
    captures: tuple[CaptureTarget, ...] = ()
    jobs: tuple[LoadJob, ...] = ()
    num_work_tokens: int = 0
    dropped: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    freed: tuple[int, ...] = ()
    reports: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    replies: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    forget_leads: bool = False
    cold_writes: tuple[RecordMeta, ...] = ()
    cold_reads: tuple[ColdRead, ...] = ()


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What one rank did for a job; times are sums over its steps, in shared passes by its share of the
    tokens.

    Attributes:
        failed_records: records that could not be loaded; their tokens were computed.
        num_tokens_repaired: tokens computed because of that.
        select_s: seconds spent on choosing the tokens of a live selection.
        num_probe_tokens: tokens of the question that were computed for it.
        chosen: the tokens it chose; sorted and merged.
    """

    load_s: float
    recompute_s: float
    loaded_bytes: int
    failed_records: tuple[int, ...] = ()
    num_tokens_repaired: int = 0
    select_s: float = 0.0
    num_probe_tokens: int = 0
    chosen: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What one rank reports of a step; `merge` combines ranks.

    Attributes:
        completed: filled records and what their tokens attended to (None if not measured).
        broken: records that cannot be completed.
        cold: what each rank's side threads finished, by rank; ranks finish in different steps.
        num_ranks: ranks merged into this value.
    """

    completed: Mapping[int, AttentionProfile | None] = field(default_factory=dict)
    broken: frozenset[int] = frozenset()
    jobs: Mapping[str, JobFacts] = field(default_factory=dict)
    cold: Mapping[int, ColdFacts] = field(default_factory=dict)
    num_ranks: int = 1

    def merge(self, other: StepFacts) -> StepFacts:
        """A record is complete when every rank completed it; each rank saw its own heads, so the
        profiles are averaged."""
        shared = self.completed.keys() & other.completed.keys()
        weights = (self.num_ranks, other.num_ranks)
        lost = self.completed.keys() ^ other.completed.keys()
        return StepFacts(
            completed={
                record_id: _average(self.completed[record_id], other.completed[record_id], weights)
                for record_id in shared
            },
            broken=self.broken | other.broken | lost,
            jobs=self.jobs or other.jobs,
            cold={**self.cold, **other.cold},
            num_ranks=sum(weights),
        )

    def __bool__(self) -> bool:
        return bool(self.completed or self.broken or self.jobs or self.cold)


def _average(
    left: AttentionProfile | None, right: AttentionProfile | None, weights: tuple[int, int]
) -> AttentionProfile | None:
    if left is None or right is None:
        return None
    share = weights[0] / sum(weights)

    def mix(a: float, b: float) -> float:
        return share * a + (1 - share) * b

    return AttentionProfile(
        inter_mean=mix(left.inter_mean, right.inter_mean),
        intra_mean=mix(left.intra_mean, right.intra_mean),
        inter_by_prefix=tuple(map(mix, left.inter_by_prefix, right.inter_by_prefix)),
        token_scores=share * left.token_scores + (1 - share) * right.token_scores,
    )


def slots_of(block_ids: np.ndarray, block_size: int, span: Span) -> np.ndarray:
    """int64 slots of the paged cache for the positions of `span`."""
    return slots_at(block_ids, block_size, np.arange(span.start, span.end, dtype=np.int64))


def slots_at(block_ids: np.ndarray, block_size: int, positions: np.ndarray) -> np.ndarray:
    """int64 slots of the paged cache for `positions`, int64 of any shape."""
    return block_ids[positions // block_size].astype(np.int64) * block_size + positions % block_size
