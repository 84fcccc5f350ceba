"""What the host store adds to the contract: the exact budget, eviction order, variant limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cachecraft_rag.chunks import ChunkKey, DocumentRef, RecordMeta
from cachecraft_rag.errors import ConfigurationError
from cachecraft_rag.store import HostChunkStore, Refusal
from cachecraft_rag.store.policies import POLICIES, with_ttl


def meta_of(
    store: HostChunkStore,
    key: str,
    prefix: str = "p",
    *,
    size_bytes: int = 10,
    exact: bool = True,
    tenant: str = "a",
) -> RecordMeta:
    return RecordMeta(
        record_id=store.next_record_id(),
        key=ChunkKey(key),
        tenant=tenant,
        num_tokens=4,
        start=0,
        size_bytes=size_bytes,
        prefix_hash=prefix,
        prefix_is_exact=exact,
    )


def put(store: HostChunkStore, key: str, prefix: str = "p", **fields: int | bool) -> RecordMeta:
    meta = meta_of(store, key, prefix, **fields)  # type: ignore[arg-type]
    assert store.reserve(meta).accepted
    assert store.commit(meta.record_id, None)
    return meta


def assert_holds(store: HostChunkStore, *expected: RecordMeta) -> None:
    for meta in expected:
        assert meta in store.variants("a", meta.key)
    assert store.stats().num_records == len(expected)
    assert store.check() == []


def assert_refused(store: HostChunkStore, meta: RecordMeta, reason: Refusal) -> None:
    assert store.reserve(meta).reason == reason
    assert store.check() == []


def assert_evicted(store: HostChunkStore, *expected: RecordMeta) -> None:
    assert store.drain_freed() == tuple(meta.record_id for meta in expected)
    assert store.stats().num_evictions == len(expected)


def lru_store(budget_bytes: int, max_variants: int) -> HostChunkStore:
    """The least recently used goes first, and everything is admitted: the plainest order to reason about."""
    return HostChunkStore(budget_bytes, max_variants, policy=POLICIES["lru"], has_admission=False)


@pytest.mark.parametrize(("budget_bytes", "max_variants"), [(-1, 2), (10, 0)])
def test_senseless_limits_are_refused(budget_bytes: int, max_variants: int) -> None:
    """A store that could hold nothing by mistake is a configuration error."""
    with pytest.raises(ConfigurationError):
        HostChunkStore(budget_bytes, max_variants)


def test_the_budget_is_used_to_the_last_byte() -> None:
    """Records that add up to the budget all fit, one byte more evicts."""
    store = lru_store(30, 2)
    first, second, third = (put(store, key) for key in "xyz")
    assert_holds(store, first, second, third)
    small = put(store, "w", size_bytes=1)
    assert_holds(store, second, third, small)
    assert_evicted(store, first)


def test_a_record_as_large_as_the_budget_takes_all_of_it() -> None:
    """Every other record gives way, but nothing gives way to a record that can never fit."""
    store = lru_store(30, 2)
    old = [put(store, key) for key in "xyz"]
    assert_refused(store, meta_of(store, "big", size_bytes=31), Refusal.TOO_LARGE)
    assert_holds(store, *old)
    big = put(store, "big", size_bytes=30)
    assert_holds(store, big)
    assert_evicted(store, *old)


def test_reservations_count_against_the_budget() -> None:
    """Payload on its way is memory already: it is neither given twice nor evicted."""
    store = lru_store(30, 2)
    assert store.reserve(meta_of(store, "x", size_bytes=25)).accepted
    assert_refused(store, meta_of(store, "y"), Refusal.NO_ROOM)


def test_doomed_records_count_against_the_budget() -> None:
    """An invalidated record that a request still reads holds its bytes until the unpin."""
    store = lru_store(10, 2)
    old = put(store, "x")
    store.register("a", old.key, DocumentRef("doc"))
    store.pin(old.record_id, "request")
    store.invalidate("a", "doc")
    assert_refused(store, meta_of(store, "y"), Refusal.NO_ROOM)
    store.unpin("request")
    assert_holds(store, put(store, "y"))


def test_use_decides_who_is_evicted_and_lookups_do_not() -> None:
    """Only a use is a use: being looked at keeps nobody alive."""
    store = lru_store(20, 2)
    first, second = put(store, "x"), put(store, "y")
    store.pin(first.record_id, "request")
    store.unpin("request")
    store.variants("a", second.key)
    third = put(store, "z")
    assert_holds(store, first, third)
    assert_evicted(store, second)


def test_what_is_used_often_outlives_what_was_used_last() -> None:
    """The default policy weighs uses: which chunk was used last says less about what is asked for next."""
    store = HostChunkStore(20, 2, has_admission=False)
    often, once = put(store, "x"), put(store, "y")
    for owner in ("r1", "r2"):
        store.pin(often.record_id, owner)
        store.unpin(owner)
    store.pin(once.record_id, "r3")
    store.unpin("r3")
    third = put(store, "z")
    assert_holds(store, often, third)
    assert_evicted(store, once)


def test_text_asked_for_once_does_not_push_out_what_is_asked_for_often() -> None:
    """The second request gets it in."""
    store = HostChunkStore(10, 2)
    hot, new = put(store, "x"), ChunkKey("y")
    for _ in range(2):
        store.variants("a", hot.key)
    store.variants("a", new)
    assert_refused(store, meta_of(store, "y"), Refusal.NOT_ADMITTED)
    assert_holds(store, hot)
    store.variants("a", new)
    assert_holds(store, put(store, "y"))


def test_purge_forgets_how_often_a_tenant_asked() -> None:
    """What is known of one tenant's requests is gone with it; another's chunk is then new again."""
    store = HostChunkStore(10, 2)
    hot = put(store, "x")
    for key in (hot.key, hot.key):
        store.variants("a", key)
    for _ in range(2):
        store.variants("b", ChunkKey("y"))
    store.purge("b")
    store.variants("b", ChunkKey("y"))
    meta = replace(meta_of(store, "y", tenant="b"), generation=store.generation("b", None))
    assert_refused(store, meta, Refusal.NOT_ADMITTED)


def test_records_expire() -> None:
    """After its time a record serves nobody, pinned or not, and is gone when nobody reads it any more."""
    now_s = 0.0
    policy = with_ttl(POLICIES["lru"], 10.0)
    store = HostChunkStore(100, 2, policy=policy, clock=lambda: now_s)
    read, idle = put(store, "x"), put(store, "y")
    store.pin(read.record_id, "request")
    now_s = 9.9
    assert store.holds("a", read.key) and store.holds("a", idle.key)
    now_s = 10.0
    assert store.variants("a", read.key) == store.variants("a", idle.key) == ()
    assert store.drain_freed() == (idle.record_id,)
    store.unpin("request")
    assert store.variants("a", read.key) == ()
    assert store.drain_freed() == (read.record_id,)
    assert store.check() == []


def test_pinned_records_are_passed_over() -> None:
    """The oldest record stays while it is pinned, and a refusal evicts nothing."""
    store = lru_store(20, 2)
    first, second = put(store, "x"), put(store, "y")
    store.pin(first.record_id, "request")
    assert_refused(store, meta_of(store, "w", size_bytes=11), Refusal.NO_ROOM)
    assert_holds(store, first, second)
    third = put(store, "z")
    assert_holds(store, first, third)
    assert_evicted(store, second)


def test_a_pin_counts_as_a_use_until_it_ends() -> None:
    """A record that was just read is the last to be evicted."""
    store = lru_store(20, 2)
    first, second = put(store, "x"), put(store, "y")
    store.pin(first.record_id, "request")
    store.unpin("request")
    third = put(store, "z")
    assert_holds(store, first, third)
    assert_evicted(store, second)


@pytest.mark.parametrize(("old_exact", "new_exact"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("committed", [True, False])
def test_a_second_variant_behind_the_same_prefix_is_refused(
    old_exact: bool, new_exact: bool, committed: bool
) -> None:
    """It would hold the same KV, or worse KV, whether the first is ready or on its way."""
    store = lru_store(100, 2)
    old = meta_of(store, "x", exact=old_exact)
    store.reserve(old)
    if committed:
        store.commit(old.record_id, None)
    assert_refused(store, meta_of(store, "x", exact=new_exact), Refusal.DUPLICATE)


def test_an_exact_variant_replaces_an_inexact_one_when_it_is_committed() -> None:
    """The old one serves until the new one is complete; no third one joins meanwhile."""
    store = lru_store(100, 1)
    old, new = put(store, "x", exact=False), meta_of(store, "x")
    assert store.reserve(new).accepted
    assert_holds(store, old)
    assert_refused(store, meta_of(store, "x"), Refusal.DUPLICATE)
    assert store.commit(new.record_id, None)
    assert_holds(store, new)
    assert store.drain_freed() == (old.record_id,)


def test_an_abandoned_replacement_leaves_the_old_variant() -> None:
    """Nothing is lost when the better variant does not come."""
    store = lru_store(100, 1)
    old, new = put(store, "x", exact=False), meta_of(store, "x")
    store.reserve(new)
    store.abandon(new.record_id)
    assert_holds(store, old)


def test_a_replaced_reservation_is_not_committed() -> None:
    """An inexact payload that arrives after its better is dropped."""
    store = lru_store(100, 2)
    old, new = meta_of(store, "x", exact=False), meta_of(store, "x")
    assert store.reserve(old).accepted
    assert store.reserve(new).accepted
    assert store.commit(new.record_id, None)
    assert store.commit(old.record_id, None) is False
    assert_holds(store, new)
    assert store.drain_freed() == (old.record_id,)


def test_a_pinned_variant_that_is_replaced_stays_until_it_is_unpinned() -> None:
    """A request may finish on the inexact payload that it planned with."""
    store = lru_store(100, 1)
    old = put(store, "x", exact=False)
    store.pin(old.record_id, "request")
    new = put(store, "x")
    assert_holds(store, new)
    assert store.drain_freed() == ()
    store.unpin("request")
    assert store.drain_freed() == (old.record_id,)


def test_variants_beyond_the_limit_are_refused() -> None:
    """Reserved variants count; other chunks do not."""
    store = lru_store(100, 2)
    first = put(store, "x", "p1")
    assert store.reserve(meta_of(store, "x", "p2")).accepted
    assert_refused(store, meta_of(store, "x", "p3"), Refusal.VARIANT_LIMIT)
    assert_holds(store, first, put(store, "y", "p3"))


def test_at_the_limit_an_exact_variant_evicts_the_oldest_inexact_one() -> None:
    """Exact KV is worth more; an inexact newcomer gets nothing."""
    store = lru_store(100, 2)
    first, second = put(store, "x", "p1", exact=False), put(store, "x", "p2", exact=False)
    assert_refused(store, meta_of(store, "x", "p3", exact=False), Refusal.VARIANT_LIMIT)
    third = put(store, "x", "p3")
    assert_holds(store, second, third)
    assert_evicted(store, first)


def test_at_the_limit_a_pinned_inexact_variant_does_not_give_way() -> None:
    """Nor does one whose replacement is on its way: its prefix would stay occupied."""
    store = lru_store(100, 1)
    old = put(store, "x", "p1", exact=False)
    store.pin(old.record_id, "request")
    assert_refused(store, meta_of(store, "x", "p2"), Refusal.VARIANT_LIMIT)
    store.unpin("request")
    assert store.reserve(meta_of(store, "x", "p1")).accepted
    assert_refused(store, meta_of(store, "x", "p2"), Refusal.VARIANT_LIMIT)
    assert_holds(store, old)


def test_repair_says_what_was_wrong_and_what_was_done() -> None:
    """A record whose place is in doubt is dropped, the others are found as before."""
    store = lru_store(100, 2)
    lost, kept = put(store, "x"), put(store, "y")
    store._books.used_bytes = 7
    del store._books.index["a"][lost.key]
    faults = store.check()
    told = store.check(repair=True)
    assert told[: len(faults)] == faults
    assert [sentence.split(":")[0] for sentence in told[len(faults) :]] == ["repaired"] * 2
    assert_holds(store, kept)
    assert store.drain_freed() == (lost.record_id,)
    assert store.stats().num_bytes == 10


def test_what_repair_cannot_put_right_is_said() -> None:
    """Pinned records are not taken from who reads them, not even for the budget."""
    store = lru_store(20, 2)
    for key in "xy":
        store.pin(put(store, key).record_id, "request")
    store._budget_bytes = 15
    assert store.check(repair=True)[-1].startswith("not repaired: records hold 20 bytes, over the budget")
    store.unpin("request")
    store.check(repair=True)
    assert store.check() == []


def test_repaired_references_take_their_kv_with_them() -> None:
    """KV that may have outlived its last document goes, also from the tiers below."""
    orphans: list[tuple[str, list[ChunkKey]]] = []
    store = HostChunkStore(100, 2, lambda tenant, keys: orphans.append((tenant, list(keys))))
    meta = put(store, "x")
    store.register("a", meta.key, DocumentRef("doc"))
    del store._documents._tenants["a"].doc_ids_by_key[meta.key]
    told = store.check(repair=True)
    assert "1 records" in told[1]
    assert orphans == [("a", [meta.key])]
    assert_holds(store)


def test_stats_add_up() -> None:
    """Each figure speaks of its own state, and bytes of all states together."""
    store = lru_store(100, 2)
    ready, doomed = put(store, "x"), put(store, "y", size_bytes=20)
    store.reserve(meta_of(store, "z", size_bytes=30))
    store.pin(ready.record_id, "request")
    store.pin(doomed.record_id, "request")
    store.discard(doomed.record_id)
    store.variants("a", ready.key)
    store.variants("a", doomed.key)
    stats = store.stats()
    assert (stats.num_records, stats.num_reserved, stats.num_doomed, stats.num_pinned) == (1, 1, 1, 2)
    assert (stats.num_bytes, stats.budget_bytes) == (60, 100)
    assert (stats.num_hits, stats.num_misses) == (1, 1)
    assert (stats.tenants["a"].num_records, stats.tenants["a"].num_bytes) == (1, 60)
