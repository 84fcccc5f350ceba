"""Tenants, `store` and the prefix cache: what keeps one request's KV from another."""

from __future__ import annotations

from cachecraft_rag.chunks import Chunk
from cachecraft_rag.engine import CacheCraftEngine

RIVER = Chunk("The river flows from the hills to the sea.", doc_id="river")
PROMPT = f"{RIVER.text}\n\nWhere?"


def salts(backend) -> list[str]:
    return [request.cache_salt for request in backend.requests]


def test_requests_of_one_tenant_share_a_salt(engine: CacheCraftEngine, backend) -> None:
    """The default tenant has a salt too, and naming it is the same as leaving it out."""
    engine.complete(PROMPT)
    engine.complete(PROMPT, tenant="default")
    assert len(set(salts(backend))) == 1


def test_tenants_share_neither_salt_nor_keys(engine: CacheCraftEngine, backend, spec_of) -> None:
    """The same text has another key and another salt for each tenant."""
    for tenant in ("a", "b"):
        engine.complete(PROMPT, tenant=tenant, chunks=[RIVER])
    keys = {chunk.key for request in backend.requests for chunk in spec_of(request).chunks}
    assert len(set(salts(backend))) == len(keys) == 2


def test_chunk_is_known_to_its_own_tenant_only(engine: CacheCraftEngine, backend, spec_of) -> None:
    """A chunk passed once is found by text later, by the same tenant."""
    engine.complete(PROMPT, tenant="a", chunks=[RIVER])
    engine.complete(PROMPT, tenant="a")
    engine.complete(PROMPT, tenant="b")
    assert [len(spec_of(request).chunks) for request in backend.requests] == [1, 1, 0]


def test_request_without_store_leaves_nothing_behind(engine, backend, spec_of) -> None:
    """`store=False` forbids storing, has a salt of its own each time, and is not remembered."""
    for _ in range(2):
        engine.complete(PROMPT, chunks=[RIVER], store=False)
    engine.complete(PROMPT)
    assert len(set(salts(backend))) == 3
    assert [spec_of(request).store for request in backend.requests] == [False, False, True]
    assert not spec_of(backend.requests[2]).chunks


def test_request_can_be_kept_apart_from_the_prefix_cache(engine, backend, spec_of) -> None:
    """`read_prefix_cache=False` has a salt of its own, but is still stored and looked up."""
    engine.complete(PROMPT, chunks=[RIVER])
    engine.complete(PROMPT, chunks=[RIVER], read_prefix_cache=False)
    first, second = map(spec_of, backend.requests)
    assert len(set(salts(backend))) == 2
    assert [chunk.key for chunk in first.chunks] == [chunk.key for chunk in second.chunks]
    assert second.store


def test_prefetched_chunk_is_found_without_starting_the_engine(engine, backend, spec_of) -> None:
    """`prefetch` only remembers: nothing is started or computed."""
    engine.prefetch([RIVER])
    assert not engine.is_started
    engine.complete(PROMPT)
    assert spec_of(backend.requests[0]).chunks
