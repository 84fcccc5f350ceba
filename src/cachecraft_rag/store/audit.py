"""Recompute every sum of the books from the records, and say where they differ. O(records)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from cachecraft_rag.store.books import Record, RecordBooks, State, Usage


def audit(books: RecordBooks, budget_bytes: int, max_variants: int) -> list[str]:
    """One sentence for each fault; empty when the books are sound."""
    return [
        *_sums(books, budget_bytes),
        *_tenants(books),
        *_index(books),
        *_variants(books, max_variants),
        *_pins(books),
        *_queue(books),
    ]


def _sums(books: RecordBooks, budget_bytes: int) -> Iterator[str]:
    records = books.records.values()
    used_bytes = sum(r.meta.size_bytes for r in records)
    if used_bytes != books.used_bytes:
        yield f"records hold {used_bytes} bytes, the books say {books.used_bytes}"
    if used_bytes > budget_bytes:
        yield f"records hold {used_bytes} bytes, over the budget of {budget_bytes}"
    if Counter(r.state for r in records) != books.num_in_state:
        yield f"states are counted as {books.num_in_state}"
    alive = books.records.keys() & books.freed.keys()
    if alive:
        yield f"freed records are alive: {sorted(alive)}"


def _tenants(books: RecordBooks) -> Iterator[str]:
    usage: dict[str, Usage] = {}
    for record_id, record in books.records.items():
        share = usage.setdefault(record.meta.tenant, Usage())
        share.num_bytes += record.meta.size_bytes
        share.num_ready += record.state is State.READY
        if record.state is State.READY and record_id not in books.num_pins:
            share.num_evictable_bytes += record.meta.size_bytes
    if usage != books.usage:
        yield f"tenants use {usage}, the books say {books.usage}"
    for tenant, share in usage.items():
        quota_bytes = books.quotas.of(tenant)
        if quota_bytes is not None and share.num_bytes > quota_bytes:
            yield f"tenant {tenant!r} holds {share.num_bytes} bytes, over its quota of {quota_bytes}"


def _index(books: RecordBooks) -> Iterator[str]:
    indexed: dict[int, Record] = {}
    for tenant, by_key in books.index.items():
        for key, siblings in by_key.items():
            for record_id, record in siblings.items():
                indexed[record_id] = record
                meta = record.meta
                if (meta.tenant, meta.key, meta.record_id) != (tenant, key, record_id):
                    yield f"{meta} is filed under {tenant!r}, {key!r}, {record_id}"
    live = (State.RESERVED, State.READY)
    expected = {i: r for i, r in books.records.items() if r.state in live}
    if indexed != expected:
        yield f"index and records differ by ids {sorted(indexed.keys() ^ expected.keys())}"


def _variants(books: RecordBooks, max_variants: int) -> Iterator[str]:
    for tenant, by_key in books.index.items():
        for key, siblings in by_key.items():
            ready = [r.meta.prefix_hash for r in siblings.values() if r.state is State.READY]
            if len(ready) != len(set(ready)):
                yield f"{key!r} of {tenant!r} has two variants behind one prefix"
            if len({r.meta.prefix_hash for r in siblings.values()}) > max_variants:
                yield f"{key!r} of {tenant!r} has more than {max_variants} variants"


def _pins(books: RecordBooks) -> Iterator[str]:
    num_pins = Counter(record_id for owned in books.pinned_by.values() for record_id in owned)
    if num_pins != books.num_pins:
        yield f"owners hold pins {num_pins}, the books say {books.num_pins}"
    holders = (State.READY, State.DOOMED)
    dangling = [i for i in num_pins if books.find(i, *holders) is None]
    if dangling:
        yield f"pins refer to ids that hold no payload: {sorted(dangling)}"
    for record_id, record in books.records.items():
        if record.state is State.DOOMED and record_id not in num_pins:
            yield f"record {record_id} is doomed but nobody pins it"


def _queue(books: RecordBooks) -> Iterator[str]:
    records = books.records.items()
    free = {i for i, r in records if r.state is State.READY and i not in books.num_pins}
    if free != set(books.evictable):
        yield f"eviction queue and records differ by ids {sorted(free ^ set(books.evictable))}"
    yield from _own_queues(books, free)
    held = {i for i, r in records if r.state is State.READY and i in books.num_pins}
    if not held <= books.scores.keys() <= books.num_pins.keys():
        yield f"pinned records {sorted(held)} and kept scores {sorted(books.scores)} differ"
    free_bytes = sum(books.records[i].meta.size_bytes for i in free)
    if free_bytes != books.evictable_bytes:
        yield f"{free_bytes} bytes can be evicted, the books say {books.evictable_bytes}"


def _own_queues(books: RecordBooks, free: set[int]) -> Iterator[str]:
    """A tenant with a quota has all its evictable records in a queue of its own, the others have none."""
    own = books.evictable.own_ids()
    expected: dict[str, set[int]] = {}
    for record_id in free:
        tenant = books.records[record_id].meta.tenant
        if books.quotas.of(tenant) is not None:
            expected.setdefault(tenant, set()).add(record_id)
    for tenant in own.keys() | expected.keys():
        ids = own.get(tenant, set()) ^ expected.get(tenant, set())
        if ids:
            yield f"the eviction queue of tenant {tenant!r} and its records differ by ids {sorted(ids)}"
