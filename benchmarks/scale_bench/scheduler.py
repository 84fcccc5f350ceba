"""What a request costs on the scheduler side: look-up, plan, pins, and room for new records."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import count, islice

from benchmarks.common.memory import resident_bytes
from benchmarks.scale_bench.measuring import SizeRow, time_each
from benchmarks.store_bench.made import REQUEST_CHUNKS, SEED, TENANT, made_request, meta_of, profile

from cachecraft_rag.chunks import AttentionProfile, RecordMeta
from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.planner.build import build_plan
from cachecraft_rag.planner.plan import PlanRequest, ReusePlan
from cachecraft_rag.store.host import HostChunkStore

CHUNK_TOKENS = 400
RECORD_BYTES = 1
"""KV is faked by its size alone: the books are full when there are as many records as chunks."""
ASKED = 2
"""What was asked for once is not admitted in place of what was asked for more often."""
STRATEGIES = (CacheCraftConfig().strategy, "cachecraft")


Request = Callable[[], object]


def measure_scheduler(num_chunks: int, num_requests: int) -> list[SizeRow]:
    """Rows of one size; in a process of its own, as it reads the process's memory."""
    before = resident_bytes()
    store = filled(num_chunks)
    each = (resident_bytes() - before) / num_chunks
    return [
        SizeRow(call, num_chunks, each, **asdict(time_each(requests)))
        for call, requests in _calls(store, num_chunks, num_requests)
    ]


def filled(num_chunks: int) -> HostChunkStore:
    """A store without room for another record."""
    store = HostChunkStore(num_chunks * RECORD_BYTES, CacheCraftConfig().max_variants_per_chunk)
    stored_profile = profile(CHUNK_TOKENS)
    for number in range(num_chunks):
        _store(store, [_meta(store, number)], stored_profile)
    return store


def _calls(
    store: HostChunkStore, num_chunks: int, num_requests: int
) -> Iterator[tuple[str, Iterator[Request]]]:
    dice = random.Random(SEED)
    default = STRATEGIES[0]
    many = [made_request(dice, num_chunks, default, CHUNK_TOKENS) for _ in range(num_requests)]
    yield "look-up", (partial(_look_up, store, request) for request in many)
    for strategy in STRATEGIES:
        asked = [made_request(dice, num_chunks, strategy, CHUNK_TOKENS) for _ in range(num_requests)]
        yield f"look-up and plan, {strategy}", (partial(_plan, store, request) for request in asked)
    yield f"with pins, {default}", (partial(_plan_and_pin, store, request) for request in many)
    stored_profile = profile(CHUNK_TOKENS)
    batches = (range(n, n + REQUEST_CHUNKS) for n in count(num_chunks, REQUEST_CHUNKS))
    metas = ([_meta(store, number) for number in numbers] for numbers in batches)
    yield (
        f"store {REQUEST_CHUNKS} new, evicting as many",
        (partial(_store, store, each, stored_profile) for each in islice(metas, num_requests)),
    )


def _look_up(store: HostChunkStore, request: PlanRequest) -> None:
    for chunk in request.chunks:
        assert store.variants(TENANT, chunk.key)


def _plan(store: HostChunkStore, request: PlanRequest) -> ReusePlan:
    plan = build_plan(request, lambda key: store.variants(TENANT, key))
    assert plan.uses_store
    return plan


def _plan_and_pin(store: HostChunkStore, request: PlanRequest) -> None:
    plan = _plan(store, request)
    for chunk in plan.chunks:
        assert chunk.record_id is not None
        store.pin(chunk.record_id, "request", plan.recompute_share(chunk))
    store.unpin("request")


def _meta(store: HostChunkStore, number: int) -> RecordMeta:
    meta = meta_of(number, record_id=store.next_record_id(TENANT), size_bytes=RECORD_BYTES)
    return replace(meta, num_tokens=CHUNK_TOKENS)


def _store(store: HostChunkStore, metas: Sequence[RecordMeta], stored_profile: AttentionProfile) -> None:
    """As for a request that finds its chunks missing: asked for, reserved, filled."""
    for meta in metas:
        for _ in range(ASKED):
            store.variants(TENANT, meta.key)
        assert store.reserve(meta).accepted
    for meta in metas:
        assert store.commit(meta.record_id, stored_profile)
    store.drain_freed()
