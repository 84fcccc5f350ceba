"""How fast each tier gives records to a worker, beside the plain operation on the same bytes."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from unittest.mock import patch

import numpy as np
from benchmarks.store_bench.made import SEED, TENANT, KvMaker, chunk_key, closing_store, seconds
from benchmarks.store_bench.places import PATIENT_S, Places

from cachecraft_rag.store.cold import ColdStore, ColdVariant
from cachecraft_rag.store.record_format import StoredRecord
from cachecraft_rag.store.tiers.disk import DiskTier

KV_MAKER = KvMaker(num_layers=16)
"""2 MiB of KV."""
NUM_RECORDS = 32
"""64 MiB, more than what a processor keeps in its cache."""
BUDGET_BYTES = 128 << 20
MS = 1e-3
GB = 1e9

Plain = Callable[[], object]


@dataclass(frozen=True, slots=True)
class BandwidthRow:
    """Medians over records in random order, tier and plain operation in turn.

    Attributes:
        load_ms: `ColdStore.load` without the comparison of checksums; in memory with the worker's copy.
        share_of_plain: bandwidth of `load_ms` in parts of the plain operation's.
        checksum_ms: what the comparison adds.
        copy_ms: the worker's copy of the record, which every load is followed by.
    """

    tier: str
    plain: str
    plain_ms: float
    load_ms: float
    load_gb_per_s: float
    share_of_plain: float
    checksum_ms: float
    copy_ms: float


@dataclass(frozen=True, slots=True)
class Stored:
    """A record and its plain operation; `prepare` runs untimed before each of the two."""

    variant: ColdVariant
    plain: Plain
    prepare: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Times:
    plain_s: float
    load_s: float
    checksum_s: float
    copy_s: float


def measure_bandwidth(places: Places, num_rounds: int) -> list[BandwidthRow]:
    rows = _memory(places, num_rounds) + _disk(places, num_rounds)
    return rows + (_redis(places, num_rounds) if places.redis_url else [])


def _memory(places: Places, num_rounds: int) -> list[BandwidthRow]:
    tier = places.open("memory", BUDGET_BYTES)
    with closing_store(ColdStore({"memory": tier}, "model", 1)) as cold:
        stored = []
        for number in range(NUM_RECORDS):
            variant = _put(cold, number, "memory")
            blob = np.frombuffer(tier.get(variant.name.rank_blob(0, 1)) or b"", np.uint8)
            stored.append(Stored(variant, blob.copy, _nothing))
        times = [_time(cold, each, is_first) for each, is_first in _order(stored, num_rounds)]
    # A reference costs nothing; only with its copy does the worker have what the plain operation gives.
    copied = [Times(t.plain_s, t.load_s + t.copy_s, t.checksum_s, t.copy_s) for t in times]
    return [_row("memory", "copy", copied)]


def _disk(places: Places, num_rounds: int) -> list[BandwidthRow]:
    tier = places.open("disk", BUDGET_BYTES)
    assert isinstance(tier, DiskTier)
    with closing_store(ColdStore({"disk": tier}, "model", 1)) as cold:
        cached, uncached = [], []
        for number in range(NUM_RECORDS):
            before = set(tier.folder.glob("*.val"))
            variant = _put(cold, number, "disk")
            (path,) = set(tier.folder.glob("*.val")) - before
            cached.append(Stored(variant, path.read_bytes, _nothing))
            uncached.append(Stored(variant, path.read_bytes, lambda path=path: _drop_pages(path)))
        rows = []
        for name, stored in (("disk", uncached), ("disk, in the page cache", cached)):
            times = [_time(cold, each, is_first) for each, is_first in _order(stored, num_rounds)]
            rows.append(_row(name, "file read", times))
        return rows


def _redis(places: Places, num_rounds: int) -> list[BandwidthRow]:
    import redis

    tier = places.open("redis", BUDGET_BYTES)
    client = redis.Redis.from_url(places.redis_url, socket_timeout=PATIENT_S)
    with closing_store(ColdStore({"redis": tier}, "model", 1)) as cold:
        stored = []
        for number in range(NUM_RECORDS):
            variant = _put(cold, number, "redis")
            client.set(f"plain-{number}", tier.get(variant.name.rank_blob(0, 1)) or b"")
            stored.append(Stored(variant, lambda number=number: client.get(f"plain-{number}"), _nothing))
        times = [_time(cold, each, is_first) for each, is_first in _order(stored, num_rounds)]
    client.delete(*(f"plain-{number}" for number in range(NUM_RECORDS)))
    client.close()
    return [_row("redis", "GET", times)]


def _put(cold: ColdStore, number: int, tier_name: str) -> ColdVariant:
    KV_MAKER.put(cold, number, [tier_name])
    (variant,) = cold.find(TENANT, chunk_key(number))
    return variant


def _order(stored: list[Stored], num_rounds: int) -> Iterator[tuple[Stored, bool]]:
    """Each record once in a round, at random, and whether the plain operation goes first."""
    dice = random.Random(SEED)
    for number in range(num_rounds):
        for each in dice.sample(stored, len(stored)):
            yield each, number % 2 == 0


def _time(cold: ColdStore, stored: Stored, is_plain_first: bool) -> Times:
    plain_s = _time_plain(stored) if is_plain_first else 0.0
    stored.prepare()
    with _timed_checksums() as checksum_s:
        start_s = time.perf_counter()
        record = cold.load(stored.variant, 0, KV_MAKER.arrays)
        load_s = time.perf_counter() - start_s
    assert record is not None
    copy_s = seconds(lambda: np.array(record.kv))
    return Times(plain_s or _time_plain(stored), load_s - sum(checksum_s), sum(checksum_s), copy_s)


def _time_plain(stored: Stored) -> float:
    stored.prepare()
    return seconds(stored.plain)


@contextmanager
def _timed_checksums() -> Iterator[list[float]]:
    """Times the comparison where it happens, within `load`."""
    times: list[float] = []
    verify = StoredRecord.verify

    def timed(record: StoredRecord) -> None:
        times.append(seconds(lambda: verify(record)))

    with patch.object(StoredRecord, "verify", timed):
        yield times


def _drop_pages(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _nothing() -> None:
    """The bytes may lie where they lie."""


def _row(tier: str, plain: str, times: list[Times]) -> BandwidthRow:
    plain_s, load_s = median(t.plain_s for t in times), median(t.load_s for t in times)
    return BandwidthRow(
        tier=tier,
        plain=plain,
        plain_ms=plain_s / MS,
        load_ms=load_s / MS,
        load_gb_per_s=KV_MAKER.form.num_bytes / load_s / GB,
        share_of_plain=plain_s / load_s,
        checksum_ms=median(t.checksum_s for t in times) / MS,
        copy_ms=median(t.copy_s for t in times) / MS,
    )
