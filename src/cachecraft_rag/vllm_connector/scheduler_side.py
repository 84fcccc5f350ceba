"""The scheduler half of the connector: it alone plans, inserts, evicts and reports.

Called by vLLM's scheduler in this order, all on one thread:

    on_new_request            control messages are carried out
    look_up                   plan once, promise tokens (polled while the request waits)
    admit                     blocks exist: queue the load job, reserve records for what is computed
    build_orders              end of scheduling: what the workers do in this step
    take_facts                what they did; a request whose job is done is scheduled after that
    finish                    release everything, file the report
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from cachecraft_rag.chunks import ChunkKey, Span
from cachecraft_rag.events import Reason
from cachecraft_rag.planner.build import build_plan
from cachecraft_rag.planner.limits import refuse
from cachecraft_rag.planner.plan import PlanRequest
from cachecraft_rag.store.base import ChunkStore
from cachecraft_rag.store.journal import Action, Entry
from cachecraft_rag.vllm_connector import compat
from cachecraft_rag.vllm_connector.cold_side import ColdSide, Search, joined
from cachecraft_rag.vllm_connector.commands import Commands
from cachecraft_rag.vllm_connector.messages import PARAMS_KEY, ControlMessage, RequestSpec
from cachecraft_rag.vllm_connector.orders import capture_targets, make_job, work_tokens
from cachecraft_rag.vllm_connector.record_keeper import RecordKeeper
from cachecraft_rag.vllm_connector.reports import build_report
from cachecraft_rag.vllm_connector.request_state import RequestState
from cachecraft_rag.vllm_connector.shared_changes import OnApplied, SharedChanges
from cachecraft_rag.vllm_connector.steps import CaptureTarget, LoadJob, StepFacts, StepOrders

logger = logging.getLogger(__name__)

COUNTERS = (
    "num_requests",
    "num_plans",
    "num_jobs",
    "num_moved_chunks",
    "num_readmitted",
    "num_aborted_in_load",
)
"""Counts since the start, in `stats()`. Readmitted: admitted again after a preemption. Aborted in
load: aborted while the load job was under way."""


class SchedulerSide:
    """Plans and books. `block_size` and `max_step_tokens` (`max_num_batched_tokens`) are vLLM's,
    `bytes_per_token` counts all layers and ranks."""

    def __init__(
        self,
        store: ChunkStore,
        *,
        block_size: int,
        max_step_tokens: int,
        bytes_per_token: int,
        min_chunk_tokens: int,
        num_ranks: int,
        cold: ColdSide | None = None,
        make_changes: Callable[[OnApplied], SharedChanges] | None = None,
    ) -> None:
        self._store = store
        self._block_size = block_size
        self._max_step_tokens = max_step_tokens
        self._min_chunk_tokens = min_chunk_tokens
        self._cold = cold
        self._changes = make_changes(self._on_applied) if make_changes else None
        self._keeper = RecordKeeper(store, bytes_per_token, num_ranks, cold.keep if cold else None)
        self._block_pool: Any = None
        self._states: dict[str, RequestState] = {}
        self._by_own_id: dict[str, RequestState] = {}
        self._jobs: list[str] = []
        self._dropped: list[str] = []
        self._finished: list[RequestState] = []
        self._replies: list[tuple[str, Mapping[str, Any]]] = []
        self._forget_leads = False
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._commands = Commands(
            store,
            cold,
            self._changes,
            self._on_applied,
            self._figures,
            lambda num_tokens: self._keeper.size_bytes(num_tokens, num_tokens),
        )

    def bind_block_pool(self, block_pool: Any) -> None:
        self._block_pool = block_pool

    # --- requests -----------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        message = ControlMessage.from_params(request.kv_transfer_params)
        if message is None:
            return
        self._catch_up()
        self._replies.append((message.control_id, self._commands.carry_out(message)))

    def _catch_up(self) -> bool:
        """Apply what other processes changed; whether stored KV may be used."""
        return self._changes is None or self._changes.catch_up()

    def close(self) -> None:
        """End side threads, and give up the place among those who share the store."""
        if self._changes is not None:
            self._changes.close()
        if self._cold is not None:
            self._cold.close()

    def _on_applied(self, entry: Entry, is_news: bool) -> None:
        """A change, of whatever process, went into the books; this is for what lies outside them."""
        if entry.action in (Action.PURGE, Action.RESET, Action.UNKNOWN):
            self._forget_leads = True
        if self._cold is None:
            return
        # In every process: the author may have died before it did so.
        if entry.action is Action.RESET:
            self._cold.drop_all()
        elif entry.action is Action.PURGE and is_news:
            self._cold.drop_tenant(entry.tenant)
        elif entry.action is not Action.REGISTER:
            self._cold.drop_orphaned(is_news=is_news)

    def look_up(self, request: Any, num_local_tokens: int) -> int | None:
        """Tokens beyond vLLM's own prefix hit whose KV this connector will provide; None to be asked
        again, while cold tiers are searched."""
        state = self._states.get(request.request_id)
        if state is None:
            state = self._open(request)
        if not self._end_search(state):
            return None
        state.num_local_tokens = num_local_tokens
        promised = state.num_promised_tokens
        plan = state.plan
        if promised and plan is not None and not plan.is_exact and not state.is_salted:
            first_block = plan.exact_until // self._block_size
            compat.salt_block_hashes(request, first_block, f"cachecraft:{request.request_id}")
            state.is_salted = True
        return promised

    def admit(self, request: Any, num_promised_tokens: int) -> None:
        """The request has its blocks. It runs in this step, or, after a promise, once its job is done."""
        if num_promised_tokens:
            self._jobs.append(request.request_id)
        state = self._states.get(request.request_id)
        if state is None:
            return
        if not num_promised_tokens and state.awaits_run:
            state.awaits_run = False
            return
        if num_promised_tokens:
            state.ran_job = state.is_loading = state.awaits_run = True
            self._count_job(state)
        if state.is_admitted:
            self._counters["num_readmitted"] += 1
            return
        state.is_admitted = True
        state.first_local_tokens = state.num_local_tokens
        if state.spec is not None and state.spec.store:
            self._keeper.reserve(state, state.spec)

    def finish(self, request: Any, block_ids: list[int]) -> Mapping[str, Any] | None:
        """Release what the request held. The report, if all its facts are in already."""
        state = self._states.pop(request.request_id, None)
        if state is None:
            return None
        self._store.unpin(request.request_id)
        self._keeper.release(state)
        if state.is_loading:
            # vLLM takes the blocks back when the workers answer this.
            self._dropped.append(request.request_id)
        if state.spec is None:
            return None
        awaits_facts = state.ran_job and state.facts is None
        if state.is_loading and compat.is_aborted(request):
            self._counters["num_aborted_in_load"] += 1
        if not state.spec.store and self._block_pool is not None:
            self._block_pool.evict_blocks(set(block_ids))
        self._finished.append(state)
        if awaits_facts:
            return None
        state.report = build_report(state).to_dict()
        return {PARAMS_KEY: state.report}

    # --- steps --------------------------------------------------------------------------------

    def build_orders(self, scheduler_output: Any) -> StepOrders:
        """Orders of the step just scheduled. A promise that cannot be turned into a job is passed on as
        failed: the request then ends with an error and is answered again without reuse."""
        self._keeper.tick()
        if self._changes is not None:
            self._changes.register()
        writes, reads = self._cold.take_orders() if self._cold else ((), ())
        jobs, failed = self._make_jobs(scheduler_output)
        orders = StepOrders(
            new_records=self._keeper.take_new(),
            captures=tuple(self._make_captures(scheduler_output)),
            jobs=tuple(jobs),
            num_work_tokens=work_tokens(self._max_step_tokens, scheduler_output.total_num_scheduled_tokens),
            dropped=tuple(self._dropped),
            failed=tuple(failed),
            freed=(*self._store.drain_freed(), *self._keeper.take_scratch()),
            reports=tuple(
                (state.spec.request_id, state.report or build_report(state).to_dict())
                for state in self._finished
                if state.spec
            ),
            replies=tuple(self._replies),
            forget_leads=self._forget_leads,
            cold_writes=writes,
            cold_reads=reads,
        )
        for state in self._finished:
            if state.spec is not None:
                self._by_own_id.pop(state.spec.request_id, None)
        self._jobs, self._dropped, self._finished, self._replies = [], [], [], []
        self._forget_leads = False
        return orders

    def take_facts(self, facts: StepFacts) -> None:
        self._keeper.take_facts(facts)
        if self._cold is not None:
            self._cold.take_facts(facts.cold)
        for own_id, job_facts in facts.jobs.items():
            for record_id in job_facts.failed_records:
                self._store.discard(record_id)
            state = self._by_own_id.get(own_id)
            if state is not None:
                state.facts, state.is_loading = job_facts, False
                state.note_computed(state.promised_end)

    def _make_jobs(self, scheduler_output: Any) -> tuple[list[LoadJob], list[str]]:
        jobs: list[LoadJob] = []
        failed: list[str] = []
        for request_id in self._jobs:
            try:
                block_ids = compat.block_ids_of(scheduler_output, request_id)
                jobs.append(make_job(self._states[request_id], block_ids, self._block_size))
            except Exception:
                # Without an answer the request would wait for ever.
                logger.exception("load job of request %s could not be made", request_id)
                failed.append(request_id)
        return jobs, failed

    def _make_captures(self, scheduler_output: Any) -> list[CaptureTarget]:
        """Targets for what this step's forward computes."""
        captures: list[CaptureTarget] = []
        for request_id, start, count in compat.scheduled_ranges(scheduler_output):
            state = self._states.get(request_id)
            if state is None or not state.pending:
                continue
            block_ids = compat.block_ids_of(scheduler_output, request_id)
            try:
                computed = Span(start, start + count)
                captures += capture_targets(state, computed, block_ids, self._block_size)
                state.note_computed(computed.end)
            except Exception:
                logger.exception("nothing of request %s is captured in this step", request_id)
        return captures

    # --- planning -----------------------------------------------------------------------------

    def _open(self, request: Any) -> RequestState:
        spec = RequestSpec.from_params(request.kv_transfer_params)
        state = RequestState(request, spec)
        self._states[request.request_id] = state
        if spec is None:
            return state
        self._by_own_id[spec.request_id] = state
        self._counters["num_requests"] += 1
        with self._planning(state):
            is_current = self._catch_up()
            self._look_at_documents(state, spec)
            if not is_current:
                state.full_reason = Reason.STORE_NOT_CURRENT
                return state
            state.search = self._seek(state, spec)
            if state.search is None:
                self._plan(state, spec)
        return state

    @contextmanager
    def _planning(self, state: RequestState) -> Iterator[None]:
        """A request that cannot be planned is computed in full."""
        try:
            yield
        except Exception:
            logger.exception("planning request %s failed", state.request.request_id)
            self._store.unpin(state.request.request_id)
            state.search, state.plan, state.full_reason = None, None, Reason.PLAN_FAILED

    def _seek(self, state: RequestState, spec: RequestSpec) -> Search | None:
        """Search the cold tiers for chunks that a plan could use and the host tier does not have."""
        if self._cold is None or spec.full_reason is not None:
            return None
        keys: dict[str, list[ChunkKey]] = {}
        for index, ref in enumerate(spec.chunks):
            if index not in state.refusals:
                keys.setdefault(spec.tenant_of(ref), []).append(ref.key)
        return joined(self._cold.seek(tenant, wanted) for tenant, wanted in keys.items())

    def _end_search(self, state: RequestState) -> bool:
        """Whether the request is planned now; False while it had better wait."""
        if state.search is None or self._cold is None or state.spec is None:
            return True
        if self._cold.is_pending(state.search):
            return False
        sought, state.search = state.search, None
        with self._planning(state):
            if not self._catch_up():
                state.full_reason = Reason.STORE_NOT_CURRENT
                return True
            self._plan(state, state.spec)
        sought_keys = {key for _, key in sought.wanted}
        for chunk in state.plan.chunks if state.plan else ():
            if chunk.record_id is not None and chunk.key in sought_keys:
                state.tiers[chunk.record_id] = self._cold.tier_of(chunk.record_id)
        return True

    def _look_at_documents(self, state: RequestState, spec: RequestSpec) -> None:
        """Note which chunks may not be looked up, and the generations that inserts are held to: what
        is invalidated from here on takes nothing from this request any more."""
        for index, ref in enumerate(spec.chunks):
            tenant, document = spec.tenant_of(ref), ref.document
            doc_id = document.doc_id if document else None
            state.generations.append(self._store.generation(tenant, doc_id, ref.key))
            if document is not None and not self._store.is_current(tenant, document):
                state.refusals[index] = Reason.SUPERSEDED_VERSION
            elif len(ref.span) < self._min_chunk_tokens:
                state.refusals[index] = Reason.TOO_SHORT
            elif ref.refusal is not None:
                state.refusals[index] = ref.refusal
            elif document is not None and spec.may_store(ref):
                self._store.register(tenant, ref.key, document)
                if self._changes is not None:
                    self._changes.note(tenant, ref.key, document)

    def _plan(self, state: RequestState, spec: RequestSpec) -> None:
        request = state.request
        if spec.full_reason is not None:
            state.full_reason, state.full_detail = spec.full_reason, spec.full_detail
        elif request.skip_reading_prefix_cache:
            # vLLM ignores our promise for these: prompt log-probabilities need every token.
            state.full_reason = Reason.UNSUPPORTED_REQUEST
            state.full_detail = "prompt log-probabilities, or reading the prefix cache is off"
        if state.full_reason is not None:
            return
        tenants = {ref.key: spec.tenant_of(ref) for ref in spec.chunks}
        plan = build_plan(
            PlanRequest(
                num_tokens=state.num_prompt_tokens,
                chunks=spec.chunks,
                strategy=spec.strategy,
                alpha=spec.alpha,
                share=spec.share,
                recompute_ratio=spec.recompute_ratio,
                granularity=spec.granularity,
                exact_only=spec.exact_only,
                refusals=state.refusals,
            ),
            lambda key: self._store.variants(tenants[key], key),
        )
        state.full_reason = refuse(plan, spec.limits) if spec.limits else None
        if state.full_reason is not None:
            return
        for chunk in plan.chunks:
            if chunk.record_id is not None:
                self._store.pin(chunk.record_id, request.request_id, plan.recompute_share(chunk))
        state.plan = plan
        self._counters["num_plans"] += plan.uses_store

    def _figures(self) -> Mapping[str, Any]:
        free = {"num_free_blocks": self._block_pool.get_num_free_blocks()} if self._block_pool else {}
        return {**self._counters, "num_running": len(self._states), **free}

    def _count_job(self, state: RequestState) -> None:
        self._counters["num_jobs"] += 1
        for chunk in state.plan.chunks if state.plan else ():
            is_moved = chunk.record_id is not None and chunk.cached_start != chunk.span.start
            self._counters["num_moved_chunks"] += is_moved
