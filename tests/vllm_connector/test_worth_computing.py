"""What the scheduler side calls worth warming: missing, current, and with room for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cachecraft_rag.chunks import ChunkKey, Span
from cachecraft_rag.store.quotas import Quotas
from cachecraft_rag.vllm_connector.messages import ChunkRef
from cachecraft_rag.vllm_connector.record_keeper import BOOKS_BYTES

CHUNK_BYTES = 8 * (8 + 4) + BOOKS_BYTES
"""Eight tokens of eight bytes and a score, and what is noted of them."""


def stored(scheduler: Any, *keys: str) -> None:
    for key in keys:
        scheduler.store_chunk(ChunkRef(Span(4, 12), ChunkKey(key), "behind"))


def worth(scheduler: Any, *keys: str, document: list[Any] | None = None, **arguments: Any) -> Any:
    chunks = [[key, 8, document] for key in keys]
    return scheduler.control("worth_computing", chunks=chunks, **arguments)["result"]


def test_stored_chunks_are_not_worth_it(make_scheduler: Callable[..., Any]) -> None:
    """Those of another tenant count as missing; asking is no request for a chunk."""
    scheduler = make_scheduler()
    stored(scheduler, "a")
    before = scheduler.store.stats().num_misses
    assert worth(scheduler, "a", "b") == ["b"]
    assert worth(scheduler, "a", "b", tenant="other") == ["a", "b"]
    assert scheduler.store.stats().num_misses == before


@pytest.mark.parametrize("num_fitting", [0, 1, 2])
def test_only_what_fits_beside_the_others_is_worth_it(
    make_scheduler: Callable[..., Any], num_fitting: int
) -> None:
    """In the order asked, within the tenant's quota; nothing is evicted for it."""
    scheduler = make_scheduler(quotas=Quotas({"t": CHUNK_BYTES * (num_fitting + 1)}))
    stored(scheduler, "a")
    assert worth(scheduler, "b", "a", "c", "d") == ["b", "c", "d"][:num_fitting]
    stored(scheduler, *"bcd"[:num_fitting])
    assert scheduler.store.stats().num_evictions == 0
    assert worth(scheduler, "x") == []


def test_superseded_version_is_not_worth_it(make_scheduler: Callable[..., Any]) -> None:
    """As in a plan."""
    scheduler = make_scheduler()
    scheduler.control("replace", doc_id="doc", version="2", keys=["b"])
    assert worth(scheduler, "a", document=["doc", "1"]) == []
    assert worth(scheduler, "b", document=["doc", "2"]) == ["b"]
