"""Whether a tier stays within its budget while three times as much is put into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.store_bench.made import KvMaker, closing_store, meta_of
from benchmarks.store_bench.places import Places

from cachecraft_rag.store.cold import ColdStore
from cachecraft_rag.store.host import HostChunkStore
from cachecraft_rag.store.tiers import BlobTier
from cachecraft_rag.store.tiers.disk import DiskTier

BUDGET_BYTES = 16 << 20
FILLED_TIMES = 3
KV_MAKERS = (KvMaker(1), KvMaker(2), KvMaker(3))
"""Records of 128 to 384 KiB in turn."""


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """The most that was seen after any put.

    Attributes:
        peak_share: of the budget, by the tier's own books: values, names and index.
        peak_measured_share: of the budget, as the medium counts: sizes of all files in the folder,
            Redis's `used_memory` over that of the empty server; the books again where nothing else counts.
        num_kept: blobs (in the host tier, records) at the end.
    """

    tier: str
    budget_bytes: int
    put_bytes: int
    peak_bytes: int
    peak_share: float
    peak_measured_share: float
    num_kept: int
    num_evictions: int


def measure_budgets(places: Places) -> list[BudgetRow]:
    return [_host(), *(_tier(places, kind) for kind in places.kinds)]


def _host() -> BudgetRow:
    """Records of the host tier lie in the workers; what is bounded is what its books promise them."""
    store = HostChunkStore(BUDGET_BYTES, 2)
    put_bytes = peak_bytes = number = 0
    while put_bytes < FILLED_TIMES * BUDGET_BYTES:
        size_bytes = KV_MAKERS[number % len(KV_MAKERS)].form.num_bytes
        meta = meta_of(number, record_id=store.next_record_id(), size_bytes=size_bytes)
        assert store.reserve(meta).accepted
        assert store.commit(meta.record_id, None)
        put_bytes += size_bytes
        number += 1
        peak_bytes = max(peak_bytes, store.stats().num_bytes)
    stats = store.stats()
    share = peak_bytes / BUDGET_BYTES
    return BudgetRow(
        "host", BUDGET_BYTES, put_bytes, peak_bytes, share, share, stats.num_records, stats.num_evictions
    )


def _tier(places: Places, kind: str) -> BudgetRow:
    tier = places.open(kind, BUDGET_BYTES)
    measured_bytes = _counter(places, tier)
    put_bytes = peak_bytes = peak_measured_bytes = number = 0
    with closing_store(ColdStore({kind: tier}, "model", 1)) as cold:
        while put_bytes < FILLED_TIMES * BUDGET_BYTES:
            put_bytes += KV_MAKERS[number % len(KV_MAKERS)].put(cold, number, [kind]).size_bytes
            number += 1
            peak_bytes = max(peak_bytes, tier.stats().num_bytes)
            peak_measured_bytes = max(peak_measured_bytes, measured_bytes())
        stats, faults = tier.stats(), cold.check()
    assert not faults, faults
    return BudgetRow(
        kind,
        BUDGET_BYTES,
        put_bytes,
        peak_bytes,
        peak_bytes / BUDGET_BYTES,
        peak_measured_bytes / BUDGET_BYTES,
        stats.num_blobs,
        stats.num_evictions,
    )


def _counter(places: Places, tier: BlobTier) -> Callable[[], int]:
    """Counts what the medium holds, without the tier's books where it can."""
    if isinstance(tier, DiskTier):
        return lambda: sum(path.stat().st_size for path in tier.folder.iterdir())
    if "redis" in type(tier).__module__:
        import redis

        client = redis.Redis.from_url(places.redis_url)
        empty_bytes: int = client.info("memory")["used_memory"]
        return lambda: client.info("memory")["used_memory"] - empty_bytes
    return lambda: tier.stats().num_bytes
