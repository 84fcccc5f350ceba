"""How resident memory grows over an empty store, each time in a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import Any

from benchmarks.common.memory import resident_bytes
from benchmarks.store_bench.made import (
    TENANT,
    KvMaker,
    chunk_key,
    closing_store,
    meta_of,
    profile,
)
from benchmarks.store_bench.places import Places

from cachecraft_rag.chunks import ChunkKey
from cachecraft_rag.store.cold import ColdStore, with_scores
from cachecraft_rag.store.host import HostChunkStore
from cachecraft_rag.vllm_connector.cold_side import ColdSide, Orphans
from cachecraft_rag.vllm_connector.steps import ColdFacts, LoadedPart

KV_MAKER = KvMaker(num_layers=1)
NUM_COLD_CHUNKS = 64
NUM_WARM_UP = 500
REQUEST_CHUNKS = 10
HOST_RECORDS = 16
"""Room for a quarter of the chunks, so that the rest is read again and again."""
BUDGET_BYTES = 64 << 20
PATIENT_S = 10.0
POLL_S = 0.0002
MB = 1e6


@dataclass(frozen=True, slots=True)
class GrowthRow:
    """`first_half_mb` and `second_half_mb` add up to the growth: what leaks grows in both alike."""

    what: str
    num_done: int
    first_half_mb: float
    second_half_mb: float
    bytes_each: float


Steps = Generator[None, None, None]
"""Does one thing at a time; what it yields is not looked at."""


def measure_growth(places: Places, num_records: int, num_loads: int) -> list[GrowthRow]:
    rows = [
        _apart("books of a record, no profile", num_records, 0, _host_books, False),
        _apart("books of a record, profile of 128 tokens", num_records, 0, _host_books, True),
    ]
    for kind in places.shared_kinds:
        rows.append(_apart(f"ColdStore.find and load, {kind}", num_loads, NUM_WARM_UP, _loads, places, kind))
    rows.append(_apart("ColdSide, seek to commit, disk", num_loads, NUM_WARM_UP, _seeks, places, "disk"))
    return rows


def _apart(what: str, num_steps: int, num_warm_up: int, make: Callable[..., Steps], *args: Any) -> GrowthRow:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_grow, what, num_steps, num_warm_up, make, *args).result()


def _grow(what: str, num_steps: int, num_warm_up: int, make: Callable[..., Steps], *args: Any) -> GrowthRow:
    steps = make(*args)
    # The first step makes the empty store, which is not counted, and then does nothing.
    for _ in range(1 + num_warm_up):
        next(steps)
    sizes_bytes = [resident_bytes()]
    for num_half in (num_steps // 2, num_steps - num_steps // 2):
        for _ in range(num_half):
            next(steps)
        sizes_bytes.append(resident_bytes())
    steps.close()
    start, middle, end = sizes_bytes
    return GrowthRow(what, num_steps, (middle - start) / MB, (end - middle) / MB, (end - start) / num_steps)


def _host_books(has_profile: bool) -> Steps:
    store = HostChunkStore(1 << 40, 2)
    yield
    number = 0
    while True:
        meta = meta_of(number, record_id=store.next_record_id())
        assert store.reserve(meta).accepted
        assert store.commit(meta.record_id, profile() if has_profile else None)
        number += 1
        yield


def _filled(places: Places, kind: str) -> ColdStore:
    cold = ColdStore({kind: places.open(kind, BUDGET_BYTES)}, "model", 1)
    for number in range(NUM_COLD_CHUNKS):
        KV_MAKER.put(cold, number, [kind])
    return cold


def _loads(places: Places, kind: str) -> Steps:
    with closing_store(_filled(places, kind)) as cold:
        yield
        number = 0
        while True:
            (variant,) = cold.find(TENANT, chunk_key(number % NUM_COLD_CHUNKS))
            assert cold.load(variant, 0, KV_MAKER.arrays) is not None
            number += 1
            yield


def _seeks(places: Places, kind: str) -> Steps:
    """Requests of ten chunks through a `ColdSide`, as the scheduler side does it; a step is a record."""
    cold = _filled(places, kind)
    orphans = Orphans()
    host = HostChunkStore(HOST_RECORDS * KV_MAKER.form.num_bytes, 2, orphans.add)
    side = ColdSide(cold, host, 1, PATIENT_S, orphans)
    try:
        yield
        number = 0
        while True:
            keys = [chunk_key((number + place) % NUM_COLD_CHUNKS) for place in range(REQUEST_CHUNKS)]
            for _ in range(_seek(side, cold, host, keys)):
                yield
            number += REQUEST_CHUNKS
    finally:
        side.close()


def _seek(side: ColdSide, cold: ColdStore, host: HostChunkStore, keys: list[ChunkKey]) -> int:
    """Have chunks read into the host tier; how many were."""
    search = side.seek(TENANT, keys)
    num_loaded = 0
    while search is not None and side.is_pending(search):
        _, reads = side.take_orders()
        loaded = {}
        for read in reads:
            record = cold.load(read.variant, 0, KV_MAKER.arrays)
            assert record is not None
            loaded[read.record_id] = LoadedPart(True, with_scores(read.variant.meta, record.token_scores))
        side.take_facts({0: ColdFacts(loaded=loaded)})
        num_loaded += len(loaded)
        if not reads:
            Event().wait(POLL_S)
    host.drain_freed()
    return num_loaded
