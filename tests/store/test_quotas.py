"""Quotas: each tenant makes room in its own share, and what it does there is nobody else's business."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachecraft_rag.chunks import ChunkKey, RecordMeta
from cachecraft_rag.errors import ConfigurationError
from cachecraft_rag.store import HostChunkStore, Refusal
from cachecraft_rag.store.policies import POLICIES
from cachecraft_rag.store.quotas import Quotas


def quota_store(budget_bytes: int, policy: str = "gdsf", **quotas: int) -> HostChunkStore:
    return HostChunkStore(
        budget_bytes, 2, policy=POLICIES[policy], has_admission=False, quotas=Quotas(quotas)
    )


def meta_of(
    store: HostChunkStore, tenant: str, key: str, size_bytes: int = 10, prefix: str = "p"
) -> RecordMeta:
    return RecordMeta(
        record_id=store.next_record_id(tenant),
        key=ChunkKey(key),
        tenant=tenant,
        num_tokens=4,
        start=0,
        size_bytes=size_bytes,
        prefix_hash=prefix,
        generation=store.generation(tenant, None, ChunkKey(key)),
    )


def put(store: HostChunkStore, tenant: str, key: str, size_bytes: int = 10) -> RecordMeta:
    meta = meta_of(store, tenant, key, size_bytes)
    assert store.reserve(meta).accepted
    assert store.commit(meta.record_id, None)
    return meta


def use(store: HostChunkStore, meta: RecordMeta, times: int = 1) -> None:
    for number in range(times):
        store.pin(meta.record_id, f"use-{number}")
        store.unpin(f"use-{number}")


def assert_holds(store: HostChunkStore, tenant: str, *keys: str) -> None:
    held = [key for key in "abcdefghxyz" if store.holds(tenant, ChunkKey(key))]
    assert held == sorted(keys)
    assert store.check() == []


def assert_refused(store: HostChunkStore, meta: RecordMeta, reason: Refusal) -> None:
    num_evictions = store.stats().num_evictions
    assert store.reserve(meta).reason == reason
    assert store.stats().num_evictions == num_evictions
    assert store.check() == []


def test_a_tenant_at_its_quota_loses_records_of_its_own() -> None:
    """Though others' are older, and the budget has room."""
    store = quota_store(100, "lru", t=20)
    put(store, "other", "a")
    for key in "bcd":
        put(store, "t", key)
    assert_holds(store, "other", "a")
    assert_holds(store, "t", "c", "d")


def test_a_record_that_never_fits_the_quota_is_refused() -> None:
    """And nothing is evicted for it; a quota of 0 keeps a tenant out."""
    store = quota_store(100, t=20, out=0)
    put(store, "t", "a")
    assert_refused(store, meta_of(store, "t", "b", 21), Refusal.OVER_QUOTA)
    assert_refused(store, meta_of(store, "out", "b", 1), Refusal.OVER_QUOTA)
    assert_holds(store, "t", "a")


def test_a_record_for_which_nothing_may_go_is_refused() -> None:
    """What is pinned, reserved or doomed holds its part of the quota, whatever room the budget has."""
    store = quota_store(100, t=30)
    pinned, doomed = put(store, "t", "a"), put(store, "t", "b")
    for meta in (pinned, doomed):
        store.pin(meta.record_id, "request")
    store.discard(doomed.record_id)
    assert store.reserve(meta_of(store, "t", "c")).accepted
    assert_refused(store, meta_of(store, "t", "d", 1), Refusal.OVER_QUOTA)
    store.unpin("request")
    assert store.reserve(meta_of(store, "t", "d")).accepted


def test_budget_pressure_is_as_before() -> None:
    """Within its quota a tenant competes with all others for the budget."""
    store = quota_store(30, "lru", t=20)
    put(store, "other", "a")
    put(store, "t", "b")
    put(store, "other", "c")
    put(store, "t", "d")
    assert_holds(store, "other", "c")
    assert_holds(store, "t", "b", "d")


def test_quota_and_budget_together_take_no_more_than_they_need() -> None:
    """What goes for the quota counts for the budget too."""
    store = quota_store(40, "lru", t=20)
    put(store, "other", "a", 20)
    for key in "bc":
        put(store, "t", key)
    put(store, "t", "d", 15)
    assert_holds(store, "other", "a")
    assert_holds(store, "t", "d")


def test_old_favourites_leave_a_quota() -> None:
    """The policy ages within a quota that is full, though the budget never is."""
    store = quota_store(1000, t=20)
    use(store, put(store, "t", "a"), times=3)
    for number in range(20):
        use(store, put(store, "t", f"new-{number}"), times=2)
    assert not store.holds("t", ChunkKey("a"))


@pytest.mark.parametrize("policy", ["gdsf", "lfu"])
def test_churn_within_a_quota_does_not_age_what_others_hold(policy: str) -> None:
    """The records of a tenant that pushes its own out all day are worth no more for that."""
    store = quota_store(40, policy, churning=10)
    use(store, put(store, "quiet", "a"))
    for number in range(50):
        put(store, "churning", f"new-{number}")
    put(store, "quiet", "b", 20)
    put(store, "quiet", "c")
    assert store.holds("quiet", ChunkKey("a"))
    assert store.check() == []


def test_admission_asks_only_for_what_has_to_go() -> None:
    """A newcomer that fits once its tenant's own have gone is not held up by others' hot chunks."""
    store = HostChunkStore(20, 2, policy=POLICIES["lru"], quotas=Quotas({"t": 10}))
    put(store, "other", "a")
    for _ in range(3):
        store.variants("other", ChunkKey("a"))
    put(store, "t", "b")
    store.variants("t", ChunkKey("c"))
    put(store, "t", "c")
    assert_holds(store, "t", "c")
    assert_holds(store, "other", "a")


def test_stats_show_quotas_beside_shares() -> None:
    """Of the tenants that hold something."""
    store = quota_store(100, t=20)
    put(store, "t", "a")
    put(store, "other", "b")
    shares = store.stats().tenants
    assert {t: (s.num_bytes, s.quota_bytes) for t, s in shares.items()} == {
        "t": (10, 20),
        "other": (10, None),
    }


def test_tenants_that_are_not_named_have_the_default() -> None:
    """And one that is named may have more."""
    quotas = Quotas({"big": 50}, default_bytes=10)
    assert [quotas.of(tenant) for tenant in ("big", "any")] == [50, 10]
    assert Quotas({"big": 50}).of("any") is None


@pytest.mark.parametrize("make", [lambda: Quotas({"t": -1}), lambda: Quotas(default_bytes=-1)])
def test_a_quota_below_nothing_is_refused(make) -> None:
    with pytest.raises(ConfigurationError, match="-1 bytes"):
        make()


# --- what one tenant can see of another ---------------------------------------------------------

keys = st.sampled_from([ChunkKey(key) for key in "abcde"])
steps = st.lists(
    st.tuples(
        st.sampled_from(["mine", "theirs"]),
        st.sampled_from(["ask", "ask", "store", "store", "use", "pin", "unpin", "drop"]),
        keys,
        st.integers(1, 9),
        st.sampled_from(["p1", "p2", "p3"]),
    ),
    max_size=60,
)


@dataclass
class Tenant:
    """One tenant's requests over a store that it may share, and all that it gets to see."""

    store: HostChunkStore
    name: str

    def do(self, action: str, key: ChunkKey, size_bytes: int, prefix: str) -> object:
        store, name = self.store, self.name
        match action:
            case "ask":
                return [self.seen(meta) for meta in store.variants(name, key)]
            case "store":
                meta = meta_of(store, name, key, size_bytes, prefix)
                reservation = store.reserve(meta)
                return self.seen(meta), reservation, store.commit(meta.record_id, None)
            case "use" | "pin":
                for meta in store.variants(name, key)[:1]:
                    store.pin(meta.record_id, f"{name} {action}")
                if action == "use":
                    store.unpin(f"{name} use")
                return None
            case "unpin":
                return store.unpin(f"{name} pin")
        return store.invalidate_chunks(name, [key])

    @staticmethod
    def seen(meta: RecordMeta) -> tuple[int, str]:
        """What reports show of a record; the first id of a tenant tells how many tenants came before it."""
        return meta.record_id % 2**40, meta.prefix_hash


def everything_seen(policy: str, steps: list[tuple], tenants: tuple[str, ...]) -> list[object]:
    store = HostChunkStore(32, 2, policy=POLICIES[policy], quotas=Quotas(default_bytes=16))
    seen: list[object] = []
    for name, action, key, size_bytes, prefix in steps:
        if name in tenants:
            shown = Tenant(store, name).do(action, key, size_bytes, prefix)
            seen += [shown] if name == "mine" else []
    assert store.check() == []
    return seen


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=60)
@given(steps=steps)
def test_with_quotas_for_all_nothing_shows_that_another_tenant_is_there(
    policy: str, steps: list[tuple]
) -> None:
    """Quotas that the budget can meet: answers, refusals and ids are those of a store of one's own."""
    assert everything_seen(policy, steps, ("mine", "theirs")) == everything_seen(policy, steps, ("mine",))
