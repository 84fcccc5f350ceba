"""Which chunks are captured, which of them for the store, and what becomes of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cachecraft_rag.chunks import ChunkKey, Span
from cachecraft_rag.events import ChunkDecision, Reason, ReuseReport
from cachecraft_rag.vllm_connector.messages import PARAMS_KEY, ChunkRef
from cachecraft_rag.vllm_connector.steps import NewRecord, StepFacts

TENANT = "t"
CHUNK_TOKENS = 8


def chunks_of(keys: str, refusal: Reason | None = None) -> tuple[ChunkRef, ...]:
    """One chunk per letter, back to back behind four tokens of text."""
    return tuple(
        ChunkRef(
            Span(4 + CHUNK_TOKENS * i, 4 + CHUNK_TOKENS * (i + 1)),
            ChunkKey(key),
            f"behind-{keys[:i]}",
            refusal=refusal,
        )
        for i, key in enumerate(keys)
    )


def is_found(scheduler: Any, key: str) -> bool:
    assert scheduler.store.check() == []
    return bool(scheduler.store.variants(TENANT, ChunkKey(key)))


def context_ids(record: NewRecord) -> list[int]:
    return [chunk.record_id for chunk in record.context]


def report_of(scheduler: Any, request: Any) -> ReuseReport:
    return ReuseReport.from_dict(scheduler.side.finish(request, [])[PARAMS_KEY])


def scratch_ids(new_records: Sequence[NewRecord]) -> list[int]:
    return [record.record_id for record in new_records if record.is_scratch]


def test_context_only_chunks_get_scratch_records(scheduler: Any) -> None:
    """Neighbours of a warmed chunk are captured for its profile and never reach the store."""
    request = scheduler.request(chunks_of("abc"), store_from=2)
    orders = scheduler.schedule(request)
    assert [record.is_scratch for record in orders.new_records] == [True, True, False]
    assert scheduler.store.stats().num_reserved == 1
    scheduler.fill(orders)
    assert [is_found(scheduler, key) for key in "abc"] == [False, False, True]
    assert report_of(scheduler, request).num_stored_tokens == CHUNK_TOKENS


def test_scratch_keys_are_context_of_the_stored_chunk(scheduler: Any) -> None:
    """Its profile sees all chunks before it, each at its own place in the prefix."""
    orders = scheduler.schedule(scheduler.request(chunks_of("abc"), store_from=2))
    *_, stored = orders.new_records
    assert context_ids(stored) == scratch_ids(orders.new_records)
    assert [chunk.span for chunk in stored.context] == [chunk.span for chunk in chunks_of("ab")]
    assert (stored.prefix_index, stored.num_prefix_chunks) == ((0, 1), 2)
    sinks = {target.sink for target in orders.captures}
    assert sinks >= {record.record_id for record in orders.new_records}


def test_stored_prefix_of_a_warmed_chunk_is_the_whole_prefix(scheduler: Any) -> None:
    """Scratch or not, the chunks before it are what this KV has seen, and it is exact behind them."""
    scheduler.fill(scheduler.schedule(scheduler.request(chunks_of("abc"), store_from=2)))
    (record,) = scheduler.store.variants(TENANT, ChunkKey("c"))
    assert record.prefix_chunks == ("a", "b") and record.prefix_is_exact


def test_stored_neighbours_need_no_scratch(scheduler: Any) -> None:
    """What the plan loads lends its own keys as context."""
    scheduler.fill(scheduler.schedule(scheduler.request(chunks_of("a"))))
    (neighbour,) = scheduler.store.variants(TENANT, ChunkKey("a"))
    orders = scheduler.schedule(scheduler.request(chunks_of("ab"), store_from=1, exact_only=True))
    assert scratch_ids(orders.new_records) == []
    assert context_ids(orders.new_records[-1]) == [neighbour.record_id]


@pytest.mark.parametrize("is_filled", [True, False], ids=["filled", "aborted"])
def test_scratch_records_are_freed_when_their_request_ends(scheduler: Any, is_filled: bool) -> None:
    """Once, in the next step's orders, and not before."""
    request = scheduler.request(chunks_of("abc"), store_from=2)
    orders = scheduler.schedule(request)
    if is_filled:
        scheduler.fill(orders)
    scratch = set(scratch_ids(orders.new_records))
    assert scratch.isdisjoint(scheduler.orders().freed)
    scheduler.side.finish(request, [])
    assert set(scheduler.orders().freed) == scratch
    assert scheduler.orders().freed == ()


def test_broken_scratch_records_do_not_trouble_the_store(scheduler: Any) -> None:
    """The books never knew them; the chunk behind them is stored all the same."""
    orders = scheduler.schedule(scheduler.request(chunks_of("ab"), store_from=1))
    scratch, stored = orders.new_records
    facts = StepFacts({stored.record_id: None}, frozenset({scratch.record_id}))
    scheduler.side.take_facts(facts)
    assert [is_found(scheduler, key) for key in "ab"] == [False, True]


def test_request_that_stores_nothing_opens_no_scratch_records(scheduler: Any) -> None:
    """There is no profile that would need their keys."""
    request = scheduler.request(chunks_of("abc"), store_from=2, store=False)
    assert scheduler.schedule(request).new_records == ()


def test_quarantined_chunk_is_computed_and_stored_anew(scheduler: Any) -> None:
    """Its KV went wrong: the old is dropped on command, the new is captured in the same breath."""
    scheduler.fill(scheduler.schedule(scheduler.request(chunks_of("a"))))
    assert scheduler.control("drop_chunks", keys=["a"]) == {"result": 1}
    assert not is_found(scheduler, "a")
    request = scheduler.request(chunks_of("a", Reason.QUARANTINED))
    orders = scheduler.schedule(request)
    assert orders.jobs == () and len(orders.new_records) == 1
    scheduler.fill(orders)
    assert is_found(scheduler, "a")
    (chunk,) = report_of(scheduler, request).chunks
    assert (chunk.decision, chunk.reason) == (ChunkDecision.COMPUTED, Reason.QUARANTINED)


def test_quarantined_chunk_is_not_looked_up(scheduler: Any) -> None:
    """Not even where a variant of it is still in the store."""
    scheduler.fill(scheduler.schedule(scheduler.request(chunks_of("a"))))
    assert scheduler.side.look_up(scheduler.request(chunks_of("a", Reason.QUARANTINED)), 0) == 0
    assert scheduler.side.look_up(scheduler.request(chunks_of("a")), 0) == 12


@pytest.mark.parametrize("reason", [Reason.TOO_SHORT, Reason.SUPERSEDED_VERSION, Reason.REUSE_OFF])
def test_chunk_refused_for_other_reasons_is_not_stored(scheduler: Any, reason: Reason) -> None:
    """Only what is worth storing is captured."""
    assert scheduler.schedule(scheduler.request(chunks_of("a", reason))).new_records == ()


def test_drop_chunks_discards_all_variants_of_the_named_texts(scheduler: Any) -> None:
    """And no others; the answer is the number of records."""
    for keys in ("ab", "ba"):
        request = scheduler.request(chunks_of(keys), exact_only=True)
        scheduler.fill(scheduler.schedule(request))
        scheduler.side.finish(request, [])
    assert len(scheduler.store.variants(TENANT, ChunkKey("a"))) == 2
    assert scheduler.control("drop_chunks", keys=["a", "never seen"]) == {"result": 2}
    assert [is_found(scheduler, key) for key in "ab"] == [False, True]


def test_chunks_of_other_tenants_are_not_dropped(scheduler: Any) -> None:
    """A key is looked up in the tenant that complained."""
    scheduler.fill(scheduler.schedule(scheduler.request(chunks_of("a"))))
    assert scheduler.control("drop_chunks", keys=["a"], tenant="other") == {"result": 0}
    assert is_found(scheduler, "a")
