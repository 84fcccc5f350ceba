"""The scheduler half of the connector: it alone plans, inserts, evicts and reports.

Called by vLLM's scheduler in this order, all on one thread:

    on_new_request            control messages are carried out
    look_up                   plan once, promise tokens (polled while the request waits)
    admit                     blocks exist: queue the load job, reserve records for what is computed
    build_orders              end of scheduling: what the workers do in this step
    take_facts                what they did
    finish                    release everything, file the report
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from cachecraft_rag.chunks import ChunkKey, RecordMeta, Span
from cachecraft_rag.errors import InternalError
from cachecraft_rag.events import Reason
from cachecraft_rag.planner.build import build_plan
from cachecraft_rag.planner.plan import Load, PlanRequest, ReusePlan
from cachecraft_rag.store.base import ChunkStore
from cachecraft_rag.vllm_connector import compat
from cachecraft_rag.vllm_connector.messages import (
    PARAMS_KEY,
    ChunkRef,
    ControlMessage,
    RequestSpec,
)
from cachecraft_rag.vllm_connector.recompute import merge_spans
from cachecraft_rag.vllm_connector.reports import build_report
from cachecraft_rag.vllm_connector.request_state import PendingCapture, RequestState
from cachecraft_rag.vllm_connector.steps import (
    LEAD_PREFIX,
    CaptureTarget,
    ContextChunk,
    LoadJob,
    NewRecord,
    StepFacts,
    StepOrders,
    slots_of,
)

logger = logging.getLogger(__name__)

CAPTURABLE = frozenset({Reason.NOT_CACHED, Reason.NO_EXACT_VARIANT})
"""Computed for these reasons, a chunk is worth storing."""
PROFILE_BYTES_PER_TOKEN = 4
COUNTERS = (
    "num_requests",
    "num_plans",
    "num_jobs",
    "num_moved_chunks",
    "num_readmitted",
    "num_aborted_in_load",
    "num_unready_blocks",
)
"""Counts since the start, in `stats()`. Readmitted: admitted again after a preemption. Aborted in
load: aborted in the very step whose load job was under way. Unready: see `_unready_blocks`."""
ABANDON_AFTER_STEPS = 16
"""A finished request's record whose last token was scheduled this many steps ago, and which no
worker completed, never will be."""


class SchedulerSide:
    """Plans and books. `block_size` is vLLM's, `bytes_per_token` counts all layers and ranks."""

    def __init__(
        self,
        store: ChunkStore,
        *,
        block_size: int,
        bytes_per_token: int,
        min_chunk_tokens: int,
        num_ranks: int,
    ) -> None:
        self._store = store
        self._block_size = block_size
        self._bytes_per_token = bytes_per_token
        self._min_chunk_tokens = min_chunk_tokens
        self._num_ranks = num_ranks
        self._block_pool: Any = None
        self._states: dict[str, RequestState] = {}
        self._by_own_id: dict[str, RequestState] = {}
        self._new_records: list[NewRecord] = []
        self._jobs: list[str] = []
        self._finished: list[RequestState] = []
        self._replies: list[tuple[str, Mapping[str, Any]]] = []
        self._orphans: dict[int, int] = {}
        self._forget_leads = False
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))

    def bind_block_pool(self, block_pool: Any) -> None:
        self._block_pool = block_pool

    # --- requests -----------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        message = ControlMessage.from_params(request.kv_transfer_params)
        if message is None:
            return
        try:
            result: Mapping[str, Any] = {"result": self._control(message)}
        except Exception as error:
            logger.exception("control message %s failed", message.action)
            result = {"error": f"{message.action} failed: {error}"}
        self._replies.append((message.control_id, result))

    def look_up(self, request: Any, num_local_tokens: int) -> int:
        """Tokens beyond vLLM's own prefix hit whose KV this connector will provide."""
        state = self._states.get(request.request_id)
        if state is None:
            state = self._open(request)
        state.num_local_tokens = num_local_tokens
        promised = state.num_promised_tokens
        plan = state.plan
        if promised and plan is not None and not plan.is_exact and not state.is_salted:
            first_block = plan.exact_until // self._block_size
            compat.salt_block_hashes(request, first_block, f"cachecraft:{request.request_id}")
            state.is_salted = True
        return promised

    def admit(self, request: Any, num_promised_tokens: int) -> None:
        """The request has its blocks and runs in this step."""
        state = self._states.get(request.request_id)
        if state is None:
            return
        if num_promised_tokens:
            state.ran_job = True
            self._jobs.append(request.request_id)
            self._count_job(state)
        if state.is_admitted:
            self._counters["num_readmitted"] += 1
            return
        state.is_admitted = True
        state.first_local_tokens = state.num_local_tokens
        if state.spec is not None and state.spec.store:
            self._reserve_records(state, state.spec)

    def finish(self, request: Any, block_ids: list[int]) -> Mapping[str, Any] | None:
        """Release what the request held. The report, if all its facts are in already."""
        state = self._states.pop(request.request_id, None)
        if state is None:
            return None
        self._store.unpin(request.request_id)
        unfinished = {capture.sink for capture in state.pending}
        for record_id in state.reserved:
            if record_id in unfinished:
                self._store.abandon(record_id)
            else:
                self._orphans[record_id] = ABANDON_AFTER_STEPS
        if state.spec is None:
            return None
        if state.ran_job and state.facts is None and compat.is_aborted(request):
            self._counters["num_aborted_in_load"] += 1
        if not state.spec.store and self._block_pool is not None:
            self._block_pool.evict_blocks(set(block_ids))
        self._finished.append(state)
        if state.ran_job and state.facts is None:
            return None
        return {PARAMS_KEY: self._report(state)}

    # --- steps --------------------------------------------------------------------------------

    def build_orders(self, scheduler_output: Any) -> StepOrders:
        """Orders of the step just scheduled. A promise that cannot be turned into a job is passed
        on as blocks to fail: the request then fails cleanly and is answered again without reuse."""
        self._expire_orphans()
        jobs: list[LoadJob] = []
        failed_blocks: list[int] = []
        captures: list[CaptureTarget] = []
        ranges = list(compat.scheduled_ranges(scheduler_output))
        for request_id in self._jobs:
            block_ids = compat.block_ids_of(scheduler_output, request_id)
            try:
                jobs.append(self._job(request_id, block_ids, ranges, scheduler_output))
            except Exception:
                logger.exception("load job of request %s could not be made", request_id)
                failed_blocks.extend(block_ids)
        for request_id, start, count in ranges:
            captures.extend(self._captures(request_id, start, count, scheduler_output))
        orders = StepOrders(
            new_records=tuple(self._new_records),
            captures=tuple(captures),
            jobs=tuple(jobs),
            freed=self._store.drain_freed(),
            reports=tuple((s.spec.request_id, self._report(s)) for s in self._finished if s.spec),
            replies=tuple(self._replies),
            failed_blocks=tuple(failed_blocks),
            forget_leads=self._forget_leads,
        )
        self._forget_leads = False
        for state in self._finished:
            if state.spec is not None:
                self._by_own_id.pop(state.spec.request_id, None)
        self._new_records, self._jobs, self._finished, self._replies = [], [], [], []
        return orders

    def take_facts(self, facts: StepFacts) -> None:
        for record_id, profile in facts.completed.items():
            self._orphans.pop(record_id, None)
            if facts.num_ranks == self._num_ranks:
                self._store.commit(record_id, profile)
            else:
                self._store.abandon(record_id)
        for record_id in facts.broken:
            self._orphans.pop(record_id, None)
            self._store.abandon(record_id)
        for own_id, job_facts in facts.jobs.items():
            for record_id in job_facts.failed_records:
                self._store.discard(record_id)
            state = self._by_own_id.get(own_id)
            if state is not None:
                state.facts = job_facts

    # --- planning -----------------------------------------------------------------------------

    def _open(self, request: Any) -> RequestState:
        spec = RequestSpec.from_params(request.kv_transfer_params)
        state = RequestState(request, spec)
        self._states[request.request_id] = state
        if spec is None:
            return state
        self._by_own_id[spec.request_id] = state
        self._counters["num_requests"] += 1
        try:
            self._plan(state, spec)
        except Exception:
            logger.exception("planning request %s failed", spec.request_id)
            self._store.unpin(request.request_id)
            state.plan, state.full_reason = None, Reason.PLAN_FAILED
        return state

    def _plan(self, state: RequestState, spec: RequestSpec) -> None:
        request = state.request
        refusals = self._refusals(spec)
        if spec.full_reason is not None:
            state.full_reason, state.full_detail = spec.full_reason, spec.full_detail
        elif request.skip_reading_prefix_cache:
            # vLLM ignores our promise for these: prompt log-probabilities need every token.
            state.full_reason = Reason.UNSUPPORTED_REQUEST
            state.full_detail = "prompt log-probabilities, or reading the prefix cache is off"
        if state.full_reason is not None:
            return
        plan = build_plan(
            PlanRequest(
                num_tokens=state.num_prompt_tokens,
                chunks=spec.chunks,
                strategy=spec.strategy,
                alpha=spec.alpha,
                recompute_ratio=spec.recompute_ratio,
                granularity=spec.granularity,
                exact_only=spec.exact_only,
                refusals=refusals,
            ),
            lambda key: self._store.variants(spec.tenant, key),
        )
        for chunk in plan.chunks:
            if chunk.record_id is not None:
                self._store.pin(chunk.record_id, request.request_id)
                self._store.touch(chunk.record_id)
        state.plan = plan
        self._counters["num_plans"] += plan.uses_store

    def _refusals(self, spec: RequestSpec) -> dict[int, Reason]:
        refusals: dict[int, Reason] = {}
        for index, chunk in enumerate(spec.chunks):
            if chunk.document is not None and not self._store.is_current(spec.tenant, chunk.document):
                refusals[index] = Reason.SUPERSEDED_VERSION
            elif len(chunk.span) < self._min_chunk_tokens:
                refusals[index] = Reason.TOO_SHORT
        return refusals

    # --- captures -----------------------------------------------------------------------------

    def _reserve_records(self, state: RequestState, spec: RequestSpec) -> None:
        """Reserve a record for every chunk that this request computes and that may be stored."""
        plan = state.plan if state.ran_job else None
        exact_until = plan.exact_until if plan else state.num_prompt_tokens
        refusals = self._refusals(spec)
        keys: list[ChunkKey] = []
        context: list[tuple[int, ContextChunk]] = []
        lead = LEAD_PREFIX + spec.chunks[0].prefix_hash if spec.chunks else ""
        for index, ref in enumerate(spec.chunks):
            planned = plan.chunks[index].record_id if plan else None
            record_id = planned
            if planned is None and self._is_capturable(state, index, ref, keys, refusals):
                meta = self._record_meta(spec, ref, keys, ref.span.start <= exact_until)
                if self._store.reserve(meta).accepted:
                    record_id = meta.record_id
                    self._open_record(state, meta, context, lead)
            if record_id is not None:
                context.append((len(keys), ContextChunk(ref.span, record_id)))
            keys.append(ref.key)
        if state.reserved and spec.chunks[0].span.start:
            state.pending.append(PendingCapture(lead, Span(0, spec.chunks[0].span.start)))

    def _is_capturable(
        self,
        state: RequestState,
        index: int,
        ref: ChunkRef,
        before: list[ChunkKey],
        refusals: Mapping[int, Reason],
    ) -> bool:
        if index in refusals or ref.key in before or ref.span.start < state.num_local_tokens:
            return False
        return state.plan is None or state.plan.chunks[index].reason in CAPTURABLE

    def _record_meta(
        self, spec: RequestSpec, ref: ChunkRef, before: list[ChunkKey], is_exact: bool
    ) -> RecordMeta:
        doc_id = ref.document.doc_id if ref.document else None
        num_tokens = len(ref.span)
        num_rows = num_tokens + len(ref.separator)
        return RecordMeta(
            record_id=self._store.next_record_id(),
            key=ref.key,
            tenant=spec.tenant,
            num_tokens=num_tokens,
            start=ref.span.start,
            size_bytes=num_rows * self._bytes_per_token + num_tokens * PROFILE_BYTES_PER_TOKEN,
            prefix_hash=ref.prefix_hash,
            prefix_chunks=tuple(before),
            prefix_is_exact=is_exact,
            separator=ref.separator,
            document=ref.document,
            generation=self._store.generation(spec.tenant, doc_id),
        )

    def _open_record(
        self,
        state: RequestState,
        meta: RecordMeta,
        context: list[tuple[int, ContextChunk]],
        lead: str,
    ) -> None:
        state.reserved.append(meta.record_id)
        state.num_stored_tokens += meta.num_tokens
        end = meta.start + meta.num_tokens + len(meta.separator)
        state.pending.append(PendingCapture(meta.record_id, Span(meta.start, end)))
        self._new_records.append(
            NewRecord(
                record_id=meta.record_id,
                num_tokens=meta.num_tokens,
                num_separator_tokens=len(meta.separator),
                start=meta.start,
                context=tuple(chunk for _, chunk in context),
                prefix_index=tuple(index for index, _ in context),
                num_prefix_chunks=len(meta.prefix_chunks),
                lead=lead,
            )
        )

    def _captures(
        self, request_id: str, start: int, count: int, scheduler_output: Any
    ) -> list[CaptureTarget]:
        """Targets for what this step computes of a request, in its forward and in its job."""
        state = self._states.get(request_id)
        if state is None or not state.pending:
            return []
        first = state.num_local_tokens if request_id in self._jobs else start
        block_ids = np.array(compat.block_ids_of(scheduler_output, request_id), dtype=np.int32)
        targets = []
        for capture in state.pending:
            part = capture.span.clip(first, start + count)
            if len(part):
                slots = slots_of(block_ids, self._block_size, part)
                offset = part.start - capture.span.start
                targets.append(CaptureTarget(capture.sink, offset, slots, len(capture.span)))
        state.pending = [c for c in state.pending if c.span.end > start + count]
        return targets

    # --- jobs ---------------------------------------------------------------------------------

    def _job(
        self,
        request_id: str,
        block_ids: list[int],
        ranges: list[tuple[str, int, int]],
        scheduler_output: Any,
    ) -> LoadJob:
        state = self._states[request_id]
        plan, spec, local = state.plan, state.spec, state.num_local_tokens
        if plan is None or spec is None:
            raise InternalError(f"request {request_id} was promised KV without a plan")
        unready = self._unready_blocks(request_id, block_ids, ranges, scheduler_output, local)
        missing = [run.clip(local, run.end) for run in plan.recompute if run.end > local]
        return LoadJob(
            request_id=spec.request_id,
            start=local,
            token_ids=np.array(state.request.prompt_token_ids[: plan.context_end], dtype=np.int32),
            block_ids=np.array(block_ids[: -(-plan.context_end // self._block_size)], dtype=np.int32),
            loads=_loads_beyond(plan, local),
            recompute=merge_spans([*unready, *missing]),
        )

    def _unready_blocks(
        self,
        request_id: str,
        block_ids: list[int],
        ranges: list[tuple[str, int, int]],
        scheduler_output: Any,
        local: int,
    ) -> list[Span]:
        """Stretches of vLLM's own hit that another request computes in this very step.

        vLLM files blocks as cached when they are scheduled, which is right for one forward over all
        requests, but our pass runs before it. Those tokens are exact, so computing them here as
        well, into the shared blocks, writes what the forward will write again.
        """
        size = self._block_size
        if not local:
            return []
        written: set[int] = set()
        for other, start, count in ranges:
            if other != request_id:
                others = compat.block_ids_of(scheduler_output, other)
                written.update(others[start // size : -(-(start + count) // size)])
        hit = block_ids[: -(-local // size)]
        unready = [
            Span(index * size, min((index + 1) * size, local))
            for index, block_id in enumerate(hit)
            if block_id in written
        ]
        self._counters["num_unready_blocks"] += len(unready)
        return unready

    # --- the end of a request -----------------------------------------------------------------

    def _report(self, state: RequestState) -> Mapping[str, Any]:
        return build_report(state).to_dict()

    def _count_job(self, state: RequestState) -> None:
        self._counters["num_jobs"] += 1
        for chunk in state.plan.chunks if state.plan else ():
            is_moved = chunk.record_id is not None and chunk.cached_start != chunk.span.start
            self._counters["num_moved_chunks"] += is_moved

    def _expire_orphans(self) -> None:
        for record_id, steps in list(self._orphans.items()):
            if steps:
                self._orphans[record_id] = steps - 1
            else:
                del self._orphans[record_id]
                self._store.abandon(record_id)

    # --- control ------------------------------------------------------------------------------

    def _control(self, message: ControlMessage) -> Any:
        args = message.arguments
        store = self._store
        match message.action:
            case "invalidate":
                return store.invalidate(args["tenant"], args["doc_id"], args.get("version"))
            case "replace":
                keys = [ChunkKey(key) for key in args["keys"]]
                return store.replace(args["tenant"], args["doc_id"], args["version"], keys)
            case "purge":
                self._forget_leads = True
                return store.purge(args["tenant"])
            case "stats":
                return {**asdict(store.stats()), **self._counters, "num_running": len(self._states)}
            case "check":
                return store.check()
        raise InternalError(f"unknown control action {message.action!r}")


def _loads_beyond(plan: ReusePlan, local: int) -> tuple[Load, ...]:
    """The plan's loads without what vLLM's own prefix hit covers."""
    clipped = []
    for load in plan.loads:
        part = load.span.clip(local, load.span.end)
        if len(part):
            offset = load.record_offset + part.start - load.span.start
            clipped.append(Load(load.record_id, part, offset))
    return tuple(clipped)
