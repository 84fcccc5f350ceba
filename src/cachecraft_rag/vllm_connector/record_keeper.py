"""Records on their way into the store: reserved when a request is admitted, committed when the
workers have filled them, given up when they never will."""

from __future__ import annotations

from collections.abc import Callable

from cachecraft_rag.chunks import AttentionProfile, ChunkKey, RecordMeta, Span
from cachecraft_rag.events import Reason
from cachecraft_rag.store.base import ChunkStore, Refusal
from cachecraft_rag.vllm_connector.messages import ChunkRef, RequestSpec
from cachecraft_rag.vllm_connector.orders import lead_name
from cachecraft_rag.vllm_connector.request_state import PendingCapture, RequestState
from cachecraft_rag.vllm_connector.steps import ContextChunk, NewRecord, StepFacts

CAPTURABLE = frozenset({Reason.NOT_CACHED, Reason.NO_EXACT_VARIANT, Reason.QUARANTINED})
"""Computed for these reasons, a chunk is worth storing."""
PROFILE_BYTES_PER_TOKEN = 4
BOOKS_BYTES = 2600
"""What the books of a record take of the scheduler's memory (measured: docs/store-benchmark.md)."""
ABANDON_AFTER_STEPS = 16
"""A finished request's record whose last token was scheduled this many steps ago, and which no
worker completed, never will be."""


class RecordKeeper:
    """Opens records for what requests compute, and sees each of them to its end."""

    def __init__(
        self,
        store: ChunkStore,
        bytes_per_token: int,
        num_ranks: int,
        on_commit: Callable[[RecordMeta], None] | None = None,
    ) -> None:
        self._store = store
        self._on_commit = on_commit
        self._bytes_per_token = bytes_per_token
        self._num_ranks = num_ranks
        self._new: list[NewRecord] = []
        self._orphans: dict[int, int] = {}
        self._scratch: list[int] = []

    def reserve(self, state: RequestState, spec: RequestSpec) -> None:
        """Reserve a record for every chunk that this request computes and that may be stored."""
        plan = state.plan if state.ran_job else None
        exact_until = plan.exact_until if plan else state.num_prompt_tokens
        lead = lead_name(spec)
        before: list[ChunkKey] = []
        context: list[tuple[int, ContextChunk]] = []
        for index, ref in enumerate(spec.chunks):
            record_id = plan.chunks[index].record_id if plan else None
            if record_id is None and self._is_capturable(state, index, ref, before):
                meta = self._meta(state, spec, index, before, ref.span.start <= exact_until)
                is_context = index < spec.store_from or not spec.may_store(ref)
                if is_context or self._is_reserved(state, index, meta):
                    record_id = meta.record_id
                    self._open(state, meta, context, lead, is_scratch=is_context)
            if not spec.may_store(ref):
                state.unstored[index] = Reason.NOT_WARMED
            if record_id is not None:
                context.append((len(before), ContextChunk(ref.span, record_id)))
            before.append(ref.key)
        if state.reserved and spec.chunks[0].span.start:
            state.pending.append(PendingCapture(lead, Span(0, spec.chunks[0].span.start)))

    def _is_reserved(self, state: RequestState, index: int, meta: RecordMeta) -> bool:
        reservation = self._store.reserve(meta)
        if reservation.reason == Refusal.OVER_QUOTA:
            state.unstored[index] = Reason.OVER_QUOTA
        return reservation.accepted

    def take_new(self) -> tuple[NewRecord, ...]:
        """Records opened since the last call."""
        new, self._new = tuple(self._new), []
        return new

    def take_scratch(self) -> tuple[int, ...]:
        """Scratch records of requests that have ended since the last call."""
        scratch, self._scratch = tuple(self._scratch), []
        return scratch

    def release(self, state: RequestState) -> None:
        """The request has ended: records it can no longer fill are given up."""
        self._scratch += state.scratch
        unfinished = {capture.sink for capture in state.pending}
        for record_id in state.reserved:
            if record_id in unfinished:
                self._store.abandon(record_id)
            else:  # filled in the last step, perhaps: the facts of that step are still to come
                self._orphans[record_id] = ABANDON_AFTER_STEPS

    def take_facts(self, facts: StepFacts) -> None:
        for record_id, profile in facts.completed.items():
            self._orphans.pop(record_id, None)
            if facts.num_ranks == self._num_ranks:
                self._commit(record_id, profile)
            else:
                self._store.abandon(record_id)
        for record_id in facts.broken:
            self._orphans.pop(record_id, None)
            self._store.abandon(record_id)

    def _commit(self, record_id: int, profile: AttentionProfile | None) -> None:
        is_ready = self._store.commit(record_id, profile)
        meta = self._store.meta(record_id) if is_ready else None
        if meta is not None and self._on_commit is not None:
            self._on_commit(meta)

    def tick(self) -> None:
        """One engine step has passed."""
        for record_id, steps in list(self._orphans.items()):
            if steps:
                self._orphans[record_id] = steps - 1
            else:
                del self._orphans[record_id]
                self._store.abandon(record_id)

    @staticmethod
    def _is_capturable(state: RequestState, index: int, ref: ChunkRef, before: list[ChunkKey]) -> bool:
        if ref.key in before or ref.span.start < state.num_local_tokens:
            return False
        if index in state.refusals:
            return state.refusals[index] in CAPTURABLE
        return state.plan is None or state.plan.chunks[index].reason in CAPTURABLE

    def _meta(
        self, state: RequestState, spec: RequestSpec, index: int, before: list[ChunkKey], is_exact: bool
    ) -> RecordMeta:
        ref = spec.chunks[index]
        num_tokens = len(ref.span)
        num_rows = num_tokens + len(ref.separator)
        return RecordMeta(
            record_id=self._store.next_record_id(spec.tenant),
            key=ref.key,
            tenant=spec.tenant,
            num_tokens=num_tokens,
            start=ref.span.start,
            size_bytes=self.size_bytes(num_tokens, num_rows),
            prefix_hash=ref.prefix_hash,
            prefix_chunks=tuple(before),
            prefix_is_exact=is_exact,
            separator=ref.separator,
            document=ref.document,
            generation=state.generations[index],
        )

    def size_bytes(self, num_tokens: int, num_rows: int) -> int:
        """Bytes of a record of a chunk, whose KV has a row for each token and each of its separator."""
        return num_rows * self._bytes_per_token + num_tokens * PROFILE_BYTES_PER_TOKEN + BOOKS_BYTES

    def _open(
        self,
        state: RequestState,
        meta: RecordMeta,
        context: list[tuple[int, ContextChunk]],
        lead: str,
        *,
        is_scratch: bool,
    ) -> None:
        if is_scratch:
            state.scratch.append(meta.record_id)
        else:
            state.reserved.append(meta.record_id)
            state.num_stored_tokens += meta.num_tokens
        end = meta.start + meta.num_tokens + len(meta.separator)
        state.pending.append(PendingCapture(meta.record_id, Span(meta.start, end)))
        self._new.append(
            NewRecord(
                record_id=meta.record_id,
                num_tokens=meta.num_tokens,
                num_separator_tokens=len(meta.separator),
                start=meta.start,
                context=tuple(chunk for _, chunk in context),
                prefix_index=tuple(index for index, _ in context),
                num_prefix_chunks=len(meta.prefix_chunks),
                lead=lead,
                is_scratch=is_scratch,
            )
        )
