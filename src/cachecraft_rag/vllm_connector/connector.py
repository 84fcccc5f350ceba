"""The class that vLLM loads: it splits into a scheduler half and a worker half, and guards both.

An exception in any of these hooks would kill the engine, so each is caught here, logged, and turned
into the answer that means "no reuse". The hooks that carry a promise do not lose it: see
`SchedulerSide.build_orders` and `JobQueue.run`.

All loads are asynchronous: a request that is promised KV keeps its blocks and waits, outside of the
batch, until `get_transfer_results` names it. In steps without a synchronous load vLLM calls
`start_load_kv` behind the forward, or without one if nothing else is scheduled. So blocks that vLLM
counts as its own hit, but computes in this very step, are ready when a job attends to them.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)

from cachecraft_rag.store.base import ChunkStore
from cachecraft_rag.store.cold_settings import ColdSettings
from cachecraft_rag.store.host import HostChunkStore
from cachecraft_rag.store.null import NullChunkStore
from cachecraft_rag.store.policies import policy_named, with_ttl
from cachecraft_rag.store.quotas import Quotas
from cachecraft_rag.vllm_connector import compat
from cachecraft_rag.vllm_connector.cold_side import Orphans
from cachecraft_rag.vllm_connector.scheduler_side import SchedulerSide
from cachecraft_rag.vllm_connector.shared_tiers import open_cold_io, open_shared
from cachecraft_rag.vllm_connector.steps import StepFacts, StepOrders
from cachecraft_rag.vllm_connector.worker_side import WorkerSide

logger = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class OrdersMetadata(KVConnectorMetadata):
    """vLLM's envelope for `StepOrders`."""

    orders: StepOrders


@dataclass
class FactsMetadata(KVConnectorWorkerMetadata):
    """vLLM's envelope for `StepFacts`."""

    facts: StepFacts

    def aggregate(self, other: KVConnectorWorkerMetadata) -> FactsMetadata:
        assert isinstance(other, FactsMetadata)
        return FactsMetadata(self.facts.merge(other.facts))


def guarded(fallback: object) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Log an exception of a hook and return `fallback`, a value of the hook's own type."""

    def decorate(hook: Callable[P, R]) -> Callable[P, R]:
        @wraps(hook)
        def guard(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return hook(*args, **kwargs)
            except Exception:
                logger.exception("cachecraft: %s failed; going on without reuse", hook.__name__)
                return cast("R", fallback)

        return guard

    return decorate


class CacheCraftConnector(KVConnectorBase_V1):
    """KV connector of cachecraft-rag; loaded by name, see `compat.connector_engine_args`."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        block_size = vllm_config.cache_config.block_size
        num_ranks = vllm_config.parallel_config.tensor_parallel_size
        settings = ColdSettings.from_dict(extra["cold"])
        self.is_in_process: bool = extra["in_process"]
        self.scheduler_side: SchedulerSide | None = None
        self.worker_side: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            orphaned = Orphans()
            store = _make_store(extra, orphaned)
            shared = open_shared(settings, store, num_ranks, orphaned)
            self.scheduler_side = SchedulerSide(
                store,
                block_size=block_size,
                max_step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
                bytes_per_token=compat.kv_bytes_per_token(vllm_config, kv_cache_config),
                min_chunk_tokens=extra["min_chunk_tokens"],
                num_ranks=num_ranks,
                cold=shared.cold if shared else None,
                make_changes=shared.make_changes if shared else None,
            )
        else:
            cold_io = open_cold_io(settings, compat.tensor_parallel_rank(), num_ranks)
            self.worker_side = WorkerSide(extra["num_profile_layers"], block_size, num_ranks, cold_io)

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    @guarded(None)
    def shutdown(self) -> None:
        if self.scheduler_side is not None:
            self.scheduler_side.close()
        if self.worker_side is not None:
            self.worker_side.close()
        if not self.is_in_process:
            # This process ends. Its last search for garbage, in all of torch, takes seconds on a slow CPU,
            # and vLLM kills a worker 5 s after it was told to end. On ROCm vLLM's engine core does this too.
            gc.freeze()

    # --- scheduler side -----------------------------------------------------------------------

    @property
    def _scheduler(self) -> SchedulerSide:
        assert self.scheduler_side is not None
        return self.scheduler_side

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduler.bind_block_pool(gpu_block_pool)

    @guarded(None)
    def on_new_request(self, request: Any) -> None:
        self._scheduler.on_new_request(request)

    @guarded((0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        promised = self._scheduler.look_up(request, num_computed_tokens)
        return promised, bool(promised)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        try:
            self._scheduler.admit(request, num_external_tokens)
        except Exception:
            logger.exception("cachecraft: nothing of request %s is stored", request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return OrdersMetadata(self._scheduler.build_orders(scheduler_output))

    @guarded(None)
    def update_connector_output(self, connector_output: Any) -> None:
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, FactsMetadata):
            self._scheduler.take_facts(metadata.facts)

    @guarded((False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        report = self._scheduler.finish(request, block_ids)
        return False, dict(report) if report is not None else None

    # --- worker side --------------------------------------------------------------------------

    @property
    def _worker(self) -> WorkerSide:
        assert self.worker_side is not None
        return self.worker_side

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, OrdersMetadata)
        self._worker.bind(connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.run_jobs()

    def wait_for_layer_load(self, layer_name: str) -> None:
        return None

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return None

    def wait_for_save(self) -> None:
        return None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        answered, failed = self._worker.take_answered()
        return KVConnectorTransferResults(
            finished_sending=set(), finished_recving=answered, failed_recving=failed
        )

    @guarded(None)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        facts = self._worker.collect()
        return FactsMetadata(facts) if facts is not None else None


def _make_store(extra: dict[str, Any], orphans: Orphans) -> ChunkStore:
    budget_bytes = extra["host_store_bytes"]
    if not budget_bytes:
        return NullChunkStore()
    policy, ttl_s = policy_named(extra["eviction_policy"]), extra["record_ttl_s"]
    return HostChunkStore(
        budget_bytes,
        extra["max_variants_per_chunk"],
        orphans.add,
        policy if ttl_s is None else with_ttl(policy, ttl_s),
        extra["has_admission"],
        quotas=Quotas(extra["tenant_quotas"], extra["default_tenant_quota_bytes"]),
    )
