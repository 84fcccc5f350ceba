"""What every chunk store promises, run over all of them.

The null store accepts nothing, so the tests that need a stored record run over `RECORD_STORES`
only; what it owes (documents, refusals with the right reason, harmless calls) runs over `STORES`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest

from cachecraft_rag.chunks import AttentionProfile, ChunkKey, DocumentRef, RecordMeta
from cachecraft_rag.errors import StoreError
from cachecraft_rag.store import ChunkStore, HostChunkStore, NullChunkStore, Refusal

RECORD_STORES: dict[str, Callable[[], ChunkStore]] = {"host": lambda: HostChunkStore(100, 2)}
STORES: dict[str, Callable[[], ChunkStore]] = {**RECORD_STORES, "null": NullChunkStore}

KEY, OTHER_KEY = ChunkKey("k"), ChunkKey("other")
V1, V2 = DocumentRef("doc", "v1"), DocumentRef("doc", "v2")
UNVERSIONED = DocumentRef("doc")


@pytest.fixture(params=STORES)
def any_store(request: pytest.FixtureRequest) -> ChunkStore:
    return STORES[request.param]()


@pytest.fixture(params=RECORD_STORES)
def store(request: pytest.FixtureRequest) -> ChunkStore:
    return RECORD_STORES[request.param]()


def planned(
    store: ChunkStore,
    key: ChunkKey = KEY,
    *,
    tenant: str = "a",
    size_bytes: int = 10,
    prefix: str = "p",
    exact: bool = True,
    document: DocumentRef | None = None,
) -> RecordMeta:
    """A record as the scheduler plans it: with a fresh id and the generation of this moment."""
    return RecordMeta(
        record_id=store.next_record_id(),
        key=key,
        tenant=tenant,
        num_tokens=4,
        start=0,
        size_bytes=size_bytes,
        prefix_hash=prefix,
        prefix_is_exact=exact,
        document=document,
        generation=store.generation(tenant, document.doc_id if document else None, key),
    )


def stored(store: ChunkStore, key: ChunkKey = KEY, **fields: object) -> RecordMeta:
    meta = planned(store, key, **fields)  # type: ignore[arg-type]
    assert store.reserve(meta).accepted
    assert store.commit(meta.record_id, None)
    return meta


def assert_found(store: ChunkStore, *expected: RecordMeta, key: ChunkKey = KEY, tenant: str = "a") -> None:
    found = [meta.record_id for meta in store.variants(tenant, key)]
    assert found == [meta.record_id for meta in expected]
    assert_sound(store)


def assert_refused(store: ChunkStore, meta: RecordMeta, reason: Refusal) -> None:
    before = store.stats()
    reservation = store.reserve(meta)
    assert (reservation.accepted, reservation.reason) == (False, reason)
    after = store.stats()
    assert after.num_refusals[reason] == before.num_refusals.get(reason, 0) + 1
    unchanged = dataclasses.replace(after, num_refusals=before.num_refusals)
    assert unchanged == before
    assert_sound(store)


def assert_freed(store: ChunkStore, *expected: RecordMeta) -> None:
    assert sorted(store.drain_freed()) == sorted(meta.record_id for meta in expected)
    assert store.drain_freed() == ()
    assert_sound(store)


def assert_sound(store: ChunkStore) -> None:
    assert store.check() == []


def test_record_ids_are_never_repeated(any_store: ChunkStore) -> None:
    """Each id is new, as workers file payload under it."""
    ids = [any_store.next_record_id(tenant) for tenant in ("a", "b", "a", "b", "")]
    assert len(set(ids)) == 5


def test_record_ids_of_a_tenant_tell_nothing_of_others(any_store: ChunkStore) -> None:
    """They go up by one, whoever else stores in between."""
    first = any_store.next_record_id("a")
    for _ in range(5):
        any_store.next_record_id("b")
    assert any_store.next_record_id("a") == first + 1


def test_an_empty_store_finds_nothing_and_counts_the_miss(any_store: ChunkStore) -> None:
    """A lookup without a variant is a miss, not an error."""
    assert_found(any_store, key=KEY)
    assert (any_store.stats().num_hits, any_store.stats().num_misses) == (0, 1)


def test_late_reports_about_unknown_records_are_ignored(any_store: ChunkStore) -> None:
    """Workers may still speak of records that are gone."""
    assert any_store.commit(99, None) is False
    any_store.abandon(99)
    any_store.discard(99)
    any_store.unpin("nobody")
    assert any_store.tier(99) == ""
    assert_freed(any_store)


def test_pinning_what_is_not_ready_is_an_internal_error(any_store: ChunkStore) -> None:
    """A promise on a record that cannot be found must not be made."""
    with pytest.raises(StoreError, match="99"):
        any_store.pin(99, "request")


def test_stats_are_plain_data(any_store: ChunkStore) -> None:
    """Stats cross processes as JSON-like data."""
    any_store.reserve(planned(any_store))
    data = dataclasses.asdict(any_store.stats())
    assert json.loads(json.dumps(data)) == data


def test_every_version_is_current_until_one_is_registered(any_store: ChunkStore) -> None:
    """Documents that were never replaced supersede nothing."""
    any_store.register("a", KEY, V1)
    assert any_store.is_current("a", V1)
    assert any_store.is_current("a", V2)


def test_replace_supersedes_other_versions_in_its_tenant_only(any_store: ChunkStore) -> None:
    """After replace, only the new version, or no version, is current."""
    any_store.replace("a", "doc", "v2", [KEY])
    current = [any_store.is_current("a", ref) for ref in (V1, V2, UNVERSIONED)]
    assert current == [False, True, True]
    assert any_store.is_current("b", V1)


def test_invalidate_forgets_the_current_version(any_store: ChunkStore) -> None:
    """A document that is added again starts clean."""
    any_store.replace("a", "doc", "v2", [KEY])
    any_store.invalidate("a", "doc")
    assert any_store.is_current("a", V1)


def test_invalidating_one_version_does_not_bring_back_an_older_one(any_store: ChunkStore) -> None:
    """The current version stands when only one version's references are dropped."""
    any_store.replace("a", "doc", "v2", [KEY])
    any_store.invalidate("a", "doc", "v2")
    assert not any_store.is_current("a", V1)


def test_generations_only_go_up(any_store: ChunkStore) -> None:
    """Each change raises the generation, also when the document was forgotten in between."""
    changes: list[Callable[[], int]] = [
        lambda: any_store.replace("a", "doc", "v1", [KEY]),
        lambda: any_store.replace("a", "doc", "v1", [KEY]),
        lambda: any_store.invalidate("a", "doc", "v1"),
        lambda: any_store.invalidate_chunks("a", [KEY]),
        lambda: any_store.invalidate("a", "doc"),
        lambda: any_store.purge("a"),
        lambda: any_store.replace("a", "doc", "v2", []),
        lambda: any_store.invalidate_chunks("a", [KEY]),
        lambda: any_store.purge("a"),
    ]
    seen = [any_store.generation("a", "doc", KEY)]
    for change in changes:
        change()
        seen.append(any_store.generation("a", "doc", KEY))
    assert seen == sorted(set(seen))
    assert any_store.generation("b", "doc") == 0


def test_changes_of_one_document_leave_the_generations_of_others(any_store: ChunkStore) -> None:
    """Other documents, and text of no document, can still be stored after a replace."""
    any_store.register("a", KEY, DocumentRef("other"))
    any_store.replace("a", "doc", "v2", [KEY])
    assert [any_store.generation("a", doc_id) for doc_id in ("other", "unseen", None)] == [0, 0, 0]


@pytest.mark.parametrize("change", ["replace", "invalidate", "invalidate version", "chunk", "purge"])
def test_an_insert_planned_before_a_change_of_its_document_is_refused(
    any_store: ChunkStore, change: str
) -> None:
    """A late reserve must not bring back what was dropped."""
    meta = planned(any_store, document=V1)
    _change(any_store, change)
    assert_refused(any_store, meta, Refusal.STALE_DOCUMENT)


def test_a_superseded_version_is_refused_even_when_planned_late(any_store: ChunkStore) -> None:
    """A request that still brings the old version gets the new generation, and is refused."""
    any_store.replace("a", "doc", "v2", [KEY])
    assert_refused(any_store, planned(any_store, document=V1), Refusal.STALE_DOCUMENT)


def test_a_purge_refuses_late_inserts_of_text_without_document(any_store: ChunkStore) -> None:
    """Purge concerns everything of the tenant, named or not."""
    meta = planned(any_store)
    any_store.purge("a")
    assert_refused(any_store, meta, Refusal.STALE_DOCUMENT)


def test_the_null_store_refuses_with_its_own_reason() -> None:
    """A record that is fresh is refused because the store is off, not for its document."""
    store = NullChunkStore()
    assert_refused(store, planned(store, document=V1), Refusal.STORE_OFF)


def test_a_record_is_found_once_it_is_committed(store: ChunkStore) -> None:
    """Reserved records are invisible, ready ones carry the profile of the commit."""
    meta = planned(store)
    assert store.reserve(meta).accepted
    assert_found(store)
    profile = AttentionProfile(0.1, 0.2, (), token_scores=None)  # type: ignore[arg-type]
    assert store.commit(meta.record_id, profile)
    assert_found(store, meta)
    assert store.variants("a", KEY)[0].profile is profile
    assert store.tier(meta.record_id) != ""


def test_committing_twice_changes_nothing(store: ChunkStore) -> None:
    """A repeated report of the same record is answered with its state."""
    meta = stored(store)
    assert store.commit(meta.record_id, None)
    assert_found(store, meta)


def test_variants_come_last_committed_first(store: ChunkStore) -> None:
    """The order of commits counts, not that of reservations."""
    first, second = planned(store, prefix="p1"), planned(store, prefix="p2")
    assert store.reserve(first).accepted
    assert store.reserve(second).accepted
    store.commit(second.record_id, None)
    store.commit(first.record_id, None)
    assert_found(store, first, second)


def test_an_id_in_use_is_an_internal_error(store: ChunkStore) -> None:
    """Two payloads under one id could not be told apart, nor freed exactly once."""
    meta = stored(store)
    with pytest.raises(StoreError, match="in use"):
        store.reserve(meta)
    store.discard(meta.record_id)
    with pytest.raises(StoreError, match="in use"):
        store.reserve(meta)


def test_a_record_without_bytes_is_an_internal_error(store: ChunkStore) -> None:
    """The budget cannot account for an empty payload."""
    with pytest.raises(StoreError, match="size_bytes=0"):
        store.reserve(planned(store, size_bytes=0))


def test_an_abandoned_reservation_gives_its_bytes_back_once(store: ChunkStore) -> None:
    """Abandon is idempotent and frees what the workers may hold of it."""
    meta = planned(store)
    store.reserve(meta)
    store.abandon(meta.record_id)
    store.abandon(meta.record_id)
    assert store.stats().num_bytes == 0
    assert store.commit(meta.record_id, None) is False
    assert_freed(store, meta)


def test_abandon_leaves_ready_records_alone(store: ChunkStore) -> None:
    """Only reserved records can be abandoned."""
    meta = stored(store)
    store.abandon(meta.record_id)
    assert_found(store, meta)


def test_a_discarded_record_is_gone_at_once(store: ChunkStore) -> None:
    """A damaged record must not be planned again."""
    meta = stored(store)
    store.discard(meta.record_id)
    store.discard(meta.record_id)
    assert_found(store)
    assert_freed(store, meta)


def test_tenants_do_not_see_each_other(store: ChunkStore) -> None:
    """The same key in two tenants is two records, and dropping one leaves the other."""
    ours, theirs = stored(store, document=V1), stored(store, tenant="b", document=V1)
    assert_found(store, ours)
    assert_found(store, theirs, tenant="b")
    assert store.purge("a") == 1
    assert store.invalidate("a", "doc") == 0
    assert_found(store)
    assert_found(store, theirs, tenant="b")
    shares = store.stats().tenants
    assert {t: (s.num_records, s.num_bytes) for t, s in shares.items()} == {"b": (1, 10)}


def test_a_pinned_record_survives_invalidation_until_the_last_unpin(store: ChunkStore) -> None:
    """It leaves the index at once, but its payload and bytes stay while requests read it."""
    meta = stored(store, document=V1)
    store.pin(meta.record_id, "r1")
    store.pin(meta.record_id, "r1")
    store.pin(meta.record_id, "r2")
    assert store.invalidate("a", "doc") == 1
    assert_found(store)
    store.unpin("r1")
    store.unpin("r1")
    assert_freed(store)
    assert (store.stats().num_bytes, store.stats().num_doomed) == (10, 1)
    store.unpin("r2")
    assert store.stats().num_bytes == 0
    assert_freed(store, meta)


@pytest.mark.parametrize("change", ["replace", "invalidate", "invalidate version", "chunk", "purge"])
def test_a_record_reserved_before_a_change_of_its_document_is_not_committed(
    store: ChunkStore, change: str
) -> None:
    """The late commit is refused and its payload freed."""
    meta = planned(store, document=V1)
    assert store.reserve(meta).accepted
    assert _change(store, change) == 0
    assert store.commit(meta.record_id, None) is False
    assert_found(store)
    assert_freed(store, meta)


def test_a_stale_commit_is_refused_even_when_the_text_is_shared(store: ChunkStore) -> None:
    """The record's own document decides, though another one still refers to the text."""
    meta = planned(store, document=V1)
    store.reserve(meta)
    store.register("a", KEY, DocumentRef("other"))
    store.invalidate("a", "doc")
    assert store.commit(meta.record_id, None) is False
    assert_freed(store, meta)


def test_a_reservation_without_document_goes_with_the_text_it_holds(store: ChunkStore) -> None:
    """Text that a document named meanwhile is dropped with that document, ready or not."""
    meta = planned(store)
    store.reserve(meta)
    store.register("a", KEY, V1)
    store.invalidate("a", "doc")
    assert store.commit(meta.record_id, None) is False
    assert_freed(store, meta)


def test_shared_text_goes_with_its_last_document(store: ChunkStore) -> None:
    """A record stays while any document of the tenant refers to its text."""
    meta = stored(store, document=V1)
    store.register("a", KEY, DocumentRef("other"))
    assert store.invalidate("a", "doc") == 0
    assert_found(store, meta)
    assert store.invalidate("a", "other") == 1
    assert_found(store)


def test_text_of_no_document_is_never_dropped_for_documents(store: ChunkStore) -> None:
    """Only a purge drops text that no document was named for."""
    meta = stored(store)
    store.replace("a", "doc", "v1", [OTHER_KEY])
    store.invalidate("a", "doc")
    assert_found(store, meta)
    assert store.purge("a") == 1


def test_replace_keeps_unchanged_text_and_drops_the_rest(store: ChunkStore) -> None:
    """Only what the new version lost is recomputed later."""
    kept, lost = stored(store, document=V1), stored(store, OTHER_KEY, document=V1)
    assert store.replace("a", "doc", "v2", [KEY]) == 1
    assert_found(store, kept)
    assert_found(store, key=OTHER_KEY)
    assert_freed(store, lost)
    assert store.replace("a", "doc", "v2", [KEY]) == 0
    assert_found(store, kept)


def test_replace_drops_all_variants_of_lost_text(store: ChunkStore) -> None:
    """The count speaks of records, not of keys."""
    stored(store, prefix="p1", document=V1)
    stored(store, prefix="p2", document=V1)
    assert store.replace("a", "doc", "v2", []) == 2


def test_a_superseded_version_does_not_hold_on_to_text(store: ChunkStore) -> None:
    """A request with an old version does not add a reference that would keep its KV alive."""
    stored(store, document=DocumentRef("other"))
    store.replace("a", "doc", "v2", [])
    store.register("a", KEY, V1)
    assert store.invalidate("a", "other") == 1


def test_invalidating_a_version_spares_text_of_other_versions(store: ChunkStore) -> None:
    """References are counted by version while no version was registered as current."""
    shared, only_v1 = stored(store, document=V1), stored(store, OTHER_KEY, document=V1)
    store.register("a", KEY, V2)
    assert store.invalidate("a", "doc", "v1") == 1
    assert_found(store, shared)
    assert_freed(store, only_v1)


def test_an_unversioned_mention_belongs_to_the_current_version(store: ChunkStore) -> None:
    """It goes when that version is invalidated, though it did not name it."""
    store.replace("a", "doc", "v2", [])
    stored(store, document=UNVERSIONED)
    assert store.invalidate("a", "doc", "v2") == 1


def test_references_outlive_an_eviction(store: ChunkStore) -> None:
    """Text stored again still belongs to the documents that named it before."""
    first = stored(store, document=V1)
    store.discard(first.record_id)
    stored(store)
    assert store.invalidate("a", "doc") == 1


def test_a_refused_insert_can_be_stored_when_planned_again(store: ChunkStore) -> None:
    """Invalidation is no ban: the document can be cached again from the next request on."""
    store.invalidate("a", "doc")
    store.purge("a")
    meta = stored(store, document=V1)
    assert_found(store, meta)


def test_a_chunk_goes_whatever_documents_name_it(store: ChunkStore) -> None:
    """All its variants, in its tenant only; other chunks of its documents stay."""
    stored(store, prefix="p1", document=V1)
    stored(store, prefix="p2")
    store.register("a", KEY, DocumentRef("other"))
    neighbour, theirs = stored(store, OTHER_KEY, document=V1), stored(store, tenant="b", document=V1)
    assert store.invalidate_chunks("a", [KEY]) == 2
    assert_found(store)
    assert_found(store, neighbour, key=OTHER_KEY)
    assert_found(store, theirs, tenant="b")


def test_an_invalidated_chunk_may_come_back_and_still_has_its_documents(store: ChunkStore) -> None:
    """The next request that computes it stores it, and it goes with its last document."""
    stored(store, document=V1)
    store.invalidate_chunks("a", [KEY, KEY])
    assert_found(store, stored(store))
    assert store.invalidate("a", "doc") == 1


def test_an_invalidated_chunk_is_read_on_by_those_who_pinned_it(store: ChunkStore) -> None:
    """It leaves the index at once, and its payload at the last unpin."""
    meta = stored(store)
    store.pin(meta.record_id, "request")
    assert store.invalidate_chunks("a", [KEY]) == 1
    assert_found(store)
    assert_freed(store)
    store.unpin("request")
    assert_freed(store, meta)


def test_dropping_a_chunk_refuses_no_other_chunk_of_its_document(any_store: ChunkStore) -> None:
    """What is planned of the rest of the document may still be stored."""
    any_store.register("a", KEY, V1)
    any_store.invalidate_chunks("a", [KEY])
    assert any_store.generation("a", "doc", OTHER_KEY) == any_store.generation("a", "doc") == 0
    assert any_store.generation("a", None, KEY) > 0


@pytest.mark.parametrize("repair", [False, True])
def test_sound_books_have_nothing_to_repair(any_store: ChunkStore, repair: bool) -> None:
    """`check` is silent, and repairing changes nothing."""
    any_store.register("a", KEY, V1)
    before = any_store.stats()
    assert any_store.check(repair) == []
    assert any_store.stats() == before


def _change(store: ChunkStore, change: str) -> int:
    if change == "replace":
        return store.replace("a", "doc", "v2", [])
    if change == "purge":
        return store.purge("a")
    if change == "chunk":
        return store.invalidate_chunks("a", [KEY])
    return store.invalidate("a", "doc", "v1" if change == "invalidate version" else None)
