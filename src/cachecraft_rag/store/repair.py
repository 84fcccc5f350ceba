"""Books put right: built anew from the records that are sound."""

from __future__ import annotations

from collections.abc import Iterator

from cachecraft_rag.store.books import Record, RecordBooks, State


def rebuilt(books: RecordBooks, budget_bytes: int, max_variants: int) -> tuple[RecordBooks, list[str]]:
    """New books over the sound records of damaged ones, and what was done, one sentence each.

    What is in doubt is dropped: computing a chunk again is cheap, serving a wrong one is not. Sums,
    index and queues come out of the ordinary calls and so are right by construction. The order of
    eviction starts afresh, for its scores may be what is damaged.
    """
    new = RecordBooks(books.policy, books.clock, books.quotas)
    new.freed = dict(books.freed)
    sound = _sound_ids(books, max_variants)
    doomed = [
        record for record in _in_order(books) if _bring(books, new, record, record.meta.record_id in sound)
    ]
    for owner, owned in books.pinned_by.items():
        for record_id, cfo in owned.items():
            if (record := new.find(record_id, State.READY)) is not None:
                new.pin(record, owner, cfo)
    for record in doomed:
        new.leave_index(new.records[record.meta.record_id])
    done = [
        f"repaired: record {i} of tenant {books.records[i].meta.tenant!r} was dropped: its place was in doubt"
        for i in sorted(_live_ids(books) - sound)
    ]
    num_evicted = _shrink(new, budget_bytes)
    if num_evicted:
        done.append(f"repaired: {num_evicted} records were evicted: there were more than the limits allow")
    return new, [*done, "repaired: sums, index, pins and queues were made anew from the records"]


def _live_ids(books: RecordBooks) -> set[int]:
    return {i for i, r in books.records.items() if r.state in (State.RESERVED, State.READY)}


def _sound_ids(books: RecordBooks, max_variants: int) -> set[int]:
    """Reserved and ready records that stay in the index: filed under their own name, not freed, and of the
    variants of a chunk the last ones."""
    sound: set[int] = set()
    for tenant, by_key in books.index.items():
        for key, siblings in by_key.items():
            filed = [
                record
                for record_id, record in siblings.items()
                if books.find(record_id, State.RESERVED, State.READY) is record
                and (record.meta.tenant, record.meta.key, record.meta.record_id) == (tenant, key, record_id)
                and record_id not in books.freed
            ]
            sound.update(_last_variants(filed, max_variants))
    return sound


def _last_variants(filed: list[Record], max_variants: int) -> Iterator[int]:
    """At most one ready and one reserved record behind each of the last `max_variants` prefixes."""
    taken: set[tuple[str, State]] = set()
    prefixes: dict[str, None] = {}
    for record in reversed(filed):
        place = record.meta.prefix_hash, record.state
        if place in taken or len(prefixes | {place[0]: None}) > max_variants:
            continue
        taken.add(place)
        prefixes[place[0]] = None
        yield record.meta.record_id


def _in_order(books: RecordBooks) -> list[Record]:
    """All records, those of the index in its order: variants are found in the order of their commit."""
    indexed = [
        record
        for by_key in books.index.values()
        for siblings in by_key.values()
        for record in siblings.values()
        if books.records.get(record.meta.record_id) is record
    ]
    return list({record.meta.record_id: record for record in (*indexed, *books.records.values())}.values())


def _bring(books: RecordBooks, new: RecordBooks, record: Record, is_sound: bool) -> bool:
    """Enter one record of the old books; whether it still has to leave the index, as requests read it."""
    record_id, state = record.meta.record_id, record.state
    is_pinned = any(record_id in owned for owned in books.pinned_by.values())
    if record_id in new.freed:
        return False
    if state in (State.READY, State.DOOMED) and not is_sound and not is_pinned:
        new.freed[record_id] = None
        return False
    new.insert(record.meta)
    if state in (State.RESERVED, State.CANCELLED):
        if not is_sound:
            new.leave_index(new.records[record_id])
        return False
    new.make_ready(new.records[record_id], None)
    return not is_sound


def _shrink(books: RecordBooks, budget_bytes: int) -> int:
    """Evict until budget and quotas hold, as far as pins allow; returns how many records went."""
    num_before = len(books.records)
    for tenant in list(books.usage):
        quota_bytes = books.quotas.of(tenant)
        while quota_bytes is not None and books.usage_of(tenant).num_bytes > quota_bytes:
            victim = books.evictable.own_victim(tenant)
            if victim is None:
                break
            books.evict(books.records[victim], for_quota=True)
    while books.used_bytes > budget_bytes and (victim := books.evictable.victim()) is not None:
        books.evict(books.records[victim], for_quota=False)
    return num_before - len(books.records)
