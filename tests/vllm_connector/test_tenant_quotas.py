"""A tenant learns that its quota has no room, and nothing of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cachecraft_rag.chunks import ChunkKey, Span
from cachecraft_rag.events import Reason
from cachecraft_rag.store.quotas import Quotas
from cachecraft_rag.vllm_connector.messages import ChunkRef
from cachecraft_rag.vllm_connector.record_keeper import BOOKS_BYTES

CHUNK_BYTES = 8 * (8 + 4) + BOOKS_BYTES
"""Eight tokens of eight bytes and a score, and what is noted of them."""


def chunk(key: str, start: int = 4) -> ChunkRef:
    return ChunkRef(Span(start, start + 8), ChunkKey(key), f"behind-{start}")


def test_report_says_that_the_quota_has_no_room(make_scheduler: Callable[..., Any]) -> None:
    """One chunk fits; the next one in the same prompt finds the quota reserved."""
    scheduler = make_scheduler(quotas=Quotas({"t": CHUNK_BYTES}))
    report = scheduler.answer([chunk("a"), chunk("b", 12)])
    assert [each.reason for each in report.chunks] == [Reason.NOT_CACHED, Reason.OVER_QUOTA]
    assert report.num_stored_tokens == 8
    assert "quota" in Reason.OVER_QUOTA.sentence
    assert scheduler.store.check() == []


def test_request_of_a_tenant_without_room_is_told_as_a_whole(make_scheduler: Callable[..., Any]) -> None:
    """The reason of its chunks is that of the request; other tenants are stored as ever."""
    scheduler = make_scheduler(quotas=Quotas({"t": CHUNK_BYTES - 1}))
    assert scheduler.answer([chunk("a")]).reason is Reason.OVER_QUOTA
    assert scheduler.answer([chunk("a")], tenant="other").reason is Reason.NOT_CACHED


def test_reports_of_a_tenant_do_not_count_what_others_store(make_scheduler: Callable[..., Any]) -> None:
    """The names of variants in its reports go on by one."""
    scheduler = make_scheduler()

    def variant(key: str) -> int:
        scheduler.answer([chunk(key)])
        found: int = scheduler.answer([chunk(key)]).chunks[0].variant
        return found

    first = variant("a")
    for key in "xyz":
        scheduler.answer([chunk(key)], tenant="other")
    assert variant("b") == first + 1
