"""How long the scheduler's thread takes to look up and plan, and side threads to find cold records."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.store_bench.made import (
    SEED,
    TENANT,
    chunk_key,
    closing_store,
    made_request,
    meta_of,
    percentile,
    profile,
    seconds,
)
from benchmarks.store_bench.places import Places

from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.planner.build import build_plan
from cachecraft_rag.planner.plan import PlanRequest
from cachecraft_rag.store.cold import ColdStore
from cachecraft_rag.store.host import HostChunkStore
from cachecraft_rag.store.record_format import BlobEntry

NUM_VARIANTS = 2
"""As many as the store keeps of a chunk unless told otherwise."""
NUM_WARM_UP = 50
STRATEGIES = (CacheCraftConfig().strategy, "cachecraft")
US = 1e-6
MS = 1e-3
COLD_BUDGET_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class LookupRow:
    """Times of one request of ten chunks, all of them stored behind other texts.

    `plan` is the look-ups and the plan. `plan_p99_cpu_us` is processor time: without what other processes of
    the machine take.
    """

    num_chunks: int
    num_records: int
    strategy: str
    lookup_p50_us: float
    lookup_p99_us: float
    plan_p50_us: float
    plan_p99_us: float
    plan_p99_cpu_us: float
    with_pins_p50_us: float
    with_pins_p99_us: float


@dataclass(frozen=True, slots=True)
class FindRow:
    """Times of `ColdStore.find` of one chunk."""

    tier: str
    num_records: int
    find_p50_ms: float
    find_p99_ms: float


def measure_lookups(sizes: Sequence[int], num_requests: int) -> list[LookupRow]:
    return [row for size in sizes for row in _measure_size(size, num_requests)]


def filled_store(num_chunks: int) -> HostChunkStore:
    store = HostChunkStore(num_chunks * NUM_VARIANTS, NUM_VARIANTS)
    stored_profile = profile()
    for number in range(num_chunks):
        for variant in range(NUM_VARIANTS):
            record_id = store.next_record_id()
            assert store.reserve(meta_of(number, variant, record_id=record_id)).accepted
            assert store.commit(record_id, stored_profile)
    return store


def _measure_size(num_chunks: int, num_requests: int) -> Iterator[LookupRow]:
    store = filled_store(num_chunks)
    dice = random.Random(SEED)
    for strategy in STRATEGIES:
        times = [_time_request(store, made_request(dice, num_chunks, strategy)) for _ in range(num_requests)]
        lookups, plans, plans_cpu, with_pins = zip(*times[NUM_WARM_UP:], strict=True)
        figures = [
            percentile(of_step, percent, US)
            for of_step, percents in (
                (lookups, (50, 99)),
                (plans, (50, 99)),
                (plans_cpu, (99,)),
                (with_pins, (50, 99)),
            )
            for percent in percents
        ]
        yield LookupRow(num_chunks, store.stats().num_records, strategy, *figures)


def _time_request(store: HostChunkStore, request: PlanRequest) -> tuple[float, float, float, float]:
    """Seconds of the look-ups alone; of look-ups and plan, by the clock and of the processor; and of these
    with pins set and taken away."""
    lookup_s = seconds(lambda: [store.variants(TENANT, chunk.key) for chunk in request.chunks])
    start_s, start_cpu_s = time.perf_counter(), time.thread_time()
    plan = build_plan(request, lambda key: store.variants(TENANT, key))
    plan_s, plan_cpu_s = time.perf_counter() - start_s, time.thread_time() - start_cpu_s
    for chunk in plan.chunks:
        assert chunk.record_id is not None
        store.pin(chunk.record_id, "request", plan.recompute_share(chunk))
    store.unpin("request")
    return lookup_s, plan_s, plan_cpu_s, time.perf_counter() - start_s


def measure_finds(places: Places, sizes: Sequence[int], num_finds: int) -> list[FindRow]:
    return [row for kind in places.kinds for row in _measure_tier(places, kind, sizes, num_finds)]


def _measure_tier(places: Places, kind: str, sizes: Sequence[int], num_finds: int) -> Iterator[FindRow]:
    """Records without KV: `find` reads their manifests, and of the rest only the names."""
    dice = random.Random(SEED)
    tier = places.open(kind, COLD_BUDGET_BYTES)
    with closing_store(ColdStore({kind: tier}, "model", 1)) as cold:
        num_stored = 0
        for size in sizes:
            for number in range(num_stored, size):
                meta = meta_of(number)
                tier.put(cold.name_of(meta).rank_blob(0, 1), b"")
                cold.publish(meta, [BlobEntry(1, "0" * 32)], [kind])
            num_stored = size
            times = []
            for _ in range(num_finds):
                key = chunk_key(dice.randrange(size))
                start_s = time.perf_counter()
                found = cold.find(TENANT, key)
                times.append(time.perf_counter() - start_s)
                assert len(found) == 1
            yield FindRow(kind, size, percentile(times, 50, MS), percentile(times, 99, MS))
