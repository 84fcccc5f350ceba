"""Public chunks: stored once, read by every tenant, written by the shared tenant alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cachecraft_rag.chunks import SHARED_TENANT, ChunkKey, DocumentRef, Span
from cachecraft_rag.events import ChunkDecision, Reason
from cachecraft_rag.vllm_connector.messages import ChunkRef

CHUNK_TOKENS = 8
V1 = DocumentRef("law", "v1")
MINE, TENANTS = "t", ("t", "other")


def refs(*keys: str, document: DocumentRef | None = V1) -> tuple[ChunkRef, ...]:
    """Chunks back to back behind four tokens of text; keys in capitals are those of shared chunks."""
    return tuple(
        ChunkRef(
            Span(4 + CHUNK_TOKENS * i, 4 + CHUNK_TOKENS * (i + 1)),
            ChunkKey(key),
            f"behind-{keys[:i]}",
            document,
            is_shared=key.isupper(),
        )
        for i, key in enumerate(keys)
    )


def warm(scheduler: Any, *keys: str, document: DocumentRef | None = V1) -> None:
    scheduler.answer(refs(*keys, document=document), tenant=SHARED_TENANT, exact_only=True)


def stored(scheduler: Any) -> set[tuple[str, str]]:
    """Tenant and chunk of everything in the store."""
    assert scheduler.store.check() == []
    everybody = (*TENANTS, SHARED_TENANT)
    return {(t, k) for t in everybody for k in "ABab" if scheduler.store.holds(t, ChunkKey(k))}


@pytest.mark.parametrize("tenant", TENANTS)
def test_what_was_warmed_serves_every_tenant(scheduler: Any, tenant: str) -> None:
    """Exactly behind the same tokens, repaired or moved behind others."""
    warm(scheduler, "A")
    report = scheduler.answer(refs("A"), tenant=tenant)
    assert [chunk.decision for chunk in report.chunks] == [ChunkDecision.EXACT]
    moved = scheduler.answer(refs("a", "A"), tenant=tenant)
    assert [chunk.reason for chunk in moved.chunks] == [Reason.NOT_CACHED, Reason.OTHER_PREFIX]


def test_no_request_of_a_tenant_writes_to_the_shared_namespace(scheduler: Any) -> None:
    """Not even where nothing private stands before the chunk; the report says why it stays missing."""
    report = scheduler.answer(refs("A", "a", "B"))
    assert stored(scheduler) == {(MINE, "a")}
    reasons = [chunk.reason for chunk in report.chunks]
    assert reasons == [Reason.NOT_WARMED, Reason.NOT_CACHED, Reason.NOT_WARMED]
    assert report.num_stored_tokens == CHUNK_TOKENS


def test_keys_of_a_missing_shared_chunk_are_context_of_private_ones(scheduler: Any) -> None:
    """The profile of a private chunk behind it sees it, as a scratch record that nobody keeps."""
    orders = scheduler.schedule(scheduler.request(refs("A", "a")))
    assert [record.is_scratch for record in orders.new_records] == [True, False]
    assert [each.record_id for each in orders.new_records[1].context] == [orders.new_records[0].record_id]


def test_private_chunk_stays_private(scheduler: Any) -> None:
    """Equal text under a tenant's own key is stored for the tenant alone, also where it is public as well."""
    warm(scheduler, "A")
    scheduler.answer(refs("a"))
    assert stored(scheduler) == {(SHARED_TENANT, "A"), (MINE, "a")}
    report = scheduler.answer(refs("a"), tenant="other")
    assert [chunk.reason for chunk in report.chunks] == [Reason.NOT_CACHED]


def test_reader_that_lags_a_version_gets_full_compute(scheduler: Any) -> None:
    """The versions that count are those of the shared tenant."""
    warm(scheduler, "A")
    scheduler.control("replace", tenant=SHARED_TENANT, doc_id="law", version="v2", keys=["B"])
    report = scheduler.answer(refs("A"))
    assert [chunk.reason for chunk in report.chunks] == [Reason.SUPERSEDED_VERSION]
    assert stored(scheduler) == set()


def test_readers_cannot_hold_on_to_public_text(scheduler: Any) -> None:
    """Only the shared tenant says which documents a shared text belongs to."""
    warm(scheduler, "A")
    scheduler.answer(refs("A", document=DocumentRef("mine")))
    assert scheduler.control("invalidate", tenant=SHARED_TENANT, doc_id="law") == {"result": 1}
    assert stored(scheduler) == set()


def test_changes_of_the_shared_tenant_and_of_others_are_apart(scheduler: Any) -> None:
    """Purging a tenant leaves what is shared, and purging what is shared leaves the tenants."""
    warm(scheduler, "A")
    scheduler.answer(refs("a"))
    scheduler.control("purge", tenant=MINE)
    assert stored(scheduler) == {(SHARED_TENANT, "A")}
    scheduler.answer(refs("a"))
    scheduler.control("purge", tenant=SHARED_TENANT)
    assert stored(scheduler) == {(MINE, "a")}


def test_request_may_finish_on_what_was_purged(scheduler: Any) -> None:
    """A reader's pin holds the shared KV until the reader is done, and it is found by nobody else."""
    warm(scheduler, "A")
    request = scheduler.request(refs("A"))
    scheduler.schedule(request)
    scheduler.control("purge", tenant=SHARED_TENANT)
    assert scheduler.store.stats().num_doomed == 1
    scheduler.side.finish(request, [])
    assert scheduler.store.stats().num_doomed == 0


def test_a_mark_on_chunks_of_the_shared_tenant_itself_is_not_needed(scheduler: Any) -> None:
    """Its own part of the store is the shared one."""
    unmarked = tuple(replace(ref, is_shared=False) for ref in refs("A"))
    scheduler.answer(unmarked, tenant=SHARED_TENANT)
    assert stored(scheduler) == {(SHARED_TENANT, "A")}
