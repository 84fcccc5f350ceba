"""Public documents: warmed once, read by every tenant, changed in their own name only."""

from __future__ import annotations

import pytest

from cachecraft_rag.chunks import SHARED_TENANT, Chunk
from cachecraft_rag.engine import CacheCraftEngine
from cachecraft_rag.errors import InvalidRequestError
from cachecraft_rag.events import Reason

LAW = Chunk("The river belongs to nobody.", doc_id="law", version="1", is_shared=True)
NOTE = Chunk("The queen sold the river in June.", doc_id="note")
PROMPT = f"{LAW.text}\n\n{NOTE.text}\n\nWhose?"


def sent(backend, spec_of, index: int = -1):
    return spec_of(backend.requests[index])


@pytest.fixture
def warmed(engine: CacheCraftEngine, backend, spec_of):
    """The spec of the request that warmed `LAW`."""
    engine.warm([LAW])
    return sent(backend, spec_of)


@pytest.mark.parametrize("tenant", ["a", "b"])
def test_warmed_chunk_is_looked_up_by_every_tenant(engine, backend, spec_of, warmed, tenant) -> None:
    """Under one key and one prefix, though it is not passed again and each tenant has a salt of its own."""
    engine.complete(PROMPT, tenant=tenant, chunks=[NOTE])
    law, note = sent(backend, spec_of).chunks
    assert (law.key, law.is_shared) == (warmed.chunks[0].key, True)
    assert not note.is_shared
    assert (warmed.tenant, sent(backend, spec_of).tenant) == (SHARED_TENANT, tenant)
    assert len({request.cache_salt for request in backend.requests}) == 2


def test_exact_behind_the_same_system_prompt(engine, backend, spec_of) -> None:
    """What stands before a shared chunk has one name for all, so its KV is exact where it is the same."""
    engine.warm([LAW], system="Be brief.")
    engine.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}], tenant="a")
    warmed, asked = (spec_of(request).chunks[0] for request in backend.requests)
    assert warmed.prefix_hash == asked.prefix_hash


def test_private_chunk_of_equal_text_stays_private(engine, backend, spec_of, warmed) -> None:
    """What a tenant passes unmarked is its own: another key, which no other tenant looks up."""
    private = Chunk(LAW.text, doc_id="mine")
    engine.complete(PROMPT, tenant="a", chunks=[private])
    (own,) = sent(backend, spec_of).chunks
    assert (own.is_shared, own.document.doc_id) == (False, "mine")
    engine.complete(PROMPT, tenant="b")
    (shared,) = sent(backend, spec_of).chunks
    assert own.key != shared.key == warmed.chunks[0].key


def test_marked_chunk_is_shared_before_it_was_warmed(engine, backend, spec_of) -> None:
    """The mark decides, not what happens to be stored; its report names the shared key."""
    out = engine.complete(NOTE.text, tenant="a", chunks=[LAW])
    engine.warm([LAW])
    assert [chunk.reason for chunk in out.report.chunks][-1] is Reason.NOT_IN_PROMPT
    assert out.report.chunks[-1].chunk_key == sent(backend, spec_of).chunks[0].key


def test_warm_keeps_shared_and_private_chunks_apart(engine, backend, spec_of) -> None:
    """Each is computed in its own tenant, so that no private text stands before a shared chunk."""
    assert engine.warm([LAW, NOTE], tenant="a", system="Be brief.") == 2
    specs = {spec_of(request).tenant: spec_of(request) for request in backend.requests}
    assert {tenant: [ref.document.doc_id for ref in spec.chunks] for tenant, spec in specs.items()} == {
        SHARED_TENANT: ["law"],
        "a": ["note"],
    }


def test_all_that_is_warmed_for_the_shared_tenant_is_shared(engine, backend, spec_of) -> None:
    """Marked or not."""
    engine.warm([NOTE], tenant=SHARED_TENANT)
    engine.complete(PROMPT, tenant="a")
    (note,) = sent(backend, spec_of).chunks
    assert note.is_shared


@pytest.mark.parametrize("method", ["chat", "complete"])
def test_no_question_can_be_asked_of_the_shared_tenant(engine, backend, method) -> None:
    """Its text would stand before chunks that everybody reads."""
    prompt = PROMPT if method == "complete" else [{"role": "user", "content": PROMPT}]
    with pytest.raises(InvalidRequestError, match="is_shared=True"):
        getattr(engine, method)(prompt, tenant=SHARED_TENANT)
    assert not backend.requests


def test_prefetch_looks_in_both_parts(engine, backend) -> None:
    """What is marked is sought where it is stored."""
    engine.start()
    engine.prefetch([LAW, NOTE], tenant="a")
    engine.prefetch([NOTE], tenant=SHARED_TENANT)
    assert [message.arguments["tenant"] for message in backend.controls] == [
        SHARED_TENANT,
        "a",
        SHARED_TENANT,
    ]


def test_replacing_a_public_document(engine, backend, spec_of, warmed) -> None:
    """By the shared tenant: the new text is known to all, the old one to nobody."""
    new = Chunk("The river belongs to everybody.")
    engine.replace("law", "2", [new], tenant=SHARED_TENANT)
    engine.complete(f"{PROMPT}\n{new.text}", tenant="a")
    (found,) = sent(backend, spec_of).chunks
    assert (found.is_shared, found.document.version) == (True, "2")
    (command,) = backend.controls
    assert command.arguments["keys"] == [found.key]


def test_marked_chunks_cannot_replace_a_private_document(engine) -> None:
    with pytest.raises(InvalidRequestError, match="SHARED_TENANT"):
        engine.replace("law", "2", [LAW], tenant="a")


def test_invalidating_a_shared_chunk(engine, backend, warmed) -> None:
    """The mark says which KV is meant, whatever the tenant."""
    engine.invalidate_chunk(LAW, tenant="a")
    (command,) = backend.controls
    assert dict(command.arguments) == {"tenant": SHARED_TENANT, "keys": [warmed.chunks[0].key]}


def test_dropped_public_text_comes_from_nobodys_prefix_cache(engine, backend, warmed) -> None:
    """Every tenant may have KV of it there; a tenant's own purge concerns nobody else."""

    def salts() -> list[str]:
        for tenant in ("a", "b"):
            engine.complete("Hello", tenant=tenant)
        return [request.cache_salt for request in backend.requests[-2:]]

    before = salts()
    engine.purge("a")
    after_own = salts()
    engine.invalidate("law", tenant=SHARED_TENANT)
    after_shared = salts()
    assert before[0] != after_own[0] and before[1] == after_own[1]
    assert set(after_own).isdisjoint(after_shared)


def test_purge_of_a_tenant_leaves_what_is_shared(engine, backend, spec_of, warmed) -> None:
    engine.complete(PROMPT, tenant="a", chunks=[NOTE])
    engine.purge("a")
    engine.complete(PROMPT, tenant="a")
    (found,) = sent(backend, spec_of).chunks
    assert found.is_shared
