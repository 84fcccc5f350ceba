"""Warming, replacing, invalidating and purging, on a backend without vLLM."""

from __future__ import annotations

import pytest

from cachecraft_rag.chunks import Chunk
from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.engine import CacheCraftEngine
from cachecraft_rag.errors import EngineError, InvalidRequestError

OLD = Chunk("The bridge was built in 1954.", doc_id="bridge", version="1")
NEW = Chunk("The bridge was rebuilt in 1987.", doc_id="bridge", version="2")


def arguments_of(backend, action: str) -> dict:
    return next(dict(m.arguments) for m in backend.controls if m.action == action)


def num_found(engine: CacheCraftEngine, backend, spec_of, chunk: Chunk) -> int:
    engine.complete(f"{chunk.text}\n\nWhen?")
    return len(spec_of(backend.requests[-1]).chunks)


def test_replace_sends_the_keys_of_the_new_text(engine, backend, spec_of) -> None:
    """The keys that stay valid are those under which the new chunks are looked up."""
    backend.replies["replace"] = 4
    assert engine.replace("bridge", "2", [Chunk(NEW.text)]) == 4
    engine.complete(f"{NEW.text}\n\nWhen?")
    (found,) = spec_of(backend.requests[0]).chunks
    assert arguments_of(backend, "replace") == {
        "doc_id": "bridge",
        "version": "2",
        "tenant": "default",
        "keys": [found.key],
    }
    assert (found.document.doc_id, found.document.version) == ("bridge", "2")


def test_replaced_text_is_not_found_any_more(engine, backend, spec_of) -> None:
    """After `replace` the old text is no known chunk, the new one is."""
    engine.prefetch([OLD])
    engine.replace("bridge", "2", [NEW])
    assert [num_found(engine, backend, spec_of, chunk) for chunk in (OLD, NEW)] == [0, 1]


def test_invalidated_document_is_forgotten(engine, backend, spec_of) -> None:
    """`invalidate` tells the store and forgets the text."""
    backend.replies["invalidate"] = 1
    engine.prefetch([OLD])
    engine.start()
    assert engine.invalidate("bridge") == 1
    assert arguments_of(backend, "invalidate") == {
        "doc_id": "bridge",
        "version": None,
        "tenant": "default",
    }
    assert num_found(engine, backend, spec_of, OLD) == 0


def test_purge_forgets_one_tenant(engine, backend, spec_of) -> None:
    """`purge` of one tenant leaves the chunks of the others."""
    engine.prefetch([OLD])
    engine.prefetch([OLD], tenant="other")
    engine.start()
    engine.purge("other")
    assert arguments_of(backend, "purge") == {"tenant": "other"}
    assert num_found(engine, backend, spec_of, OLD) == 1


@pytest.mark.parametrize("name", [Chunk, str])
def test_invalidated_chunk_is_forgotten_with_all_its_documents(engine, backend, spec_of, name) -> None:
    """Its key is the one under which it is looked up; other texts of its documents stay known."""
    backend.replies["invalidate_chunks"] = 2
    rest = Chunk("It is long.", doc_id="bridge")
    engine.prefetch([OLD, Chunk(OLD.text, doc_id="copy"), rest])
    assert num_found(engine, backend, spec_of, OLD) == 1
    (ref,) = spec_of(backend.requests[-1]).chunks
    assert engine.invalidate_chunk(name(f" {OLD.text}\n")) == 2
    assert arguments_of(backend, "invalidate_chunks") == {"tenant": "default", "keys": [ref.key]}
    assert [num_found(engine, backend, spec_of, chunk) for chunk in (OLD, rest)] == [0, 1]


@pytest.mark.parametrize("chunk", ["", None, 7])
def test_only_a_text_can_be_invalidated(engine, chunk) -> None:
    with pytest.raises(InvalidRequestError):
        engine.invalidate_chunk(chunk)


def test_invalidating_nothing_that_was_stored_starts_nothing(engine, backend) -> None:
    assert engine.invalidate_chunk(OLD) == 0
    assert not engine.is_started


@pytest.mark.parametrize(
    "drop",
    [
        lambda engine: engine.purge(),
        lambda engine: engine.invalidate("bridge"),
        lambda engine: engine.invalidate_chunk(OLD),
    ],
    ids=["purge", "invalidate", "invalidate_chunk"],
)
def test_what_an_earlier_engine_left_is_dropped_before_the_first_call(make_engine, backend, drop) -> None:
    """With cold tiers there may be KV of which this engine knows nothing yet."""
    engine = make_engine(CacheCraftConfig(self_test=False, disk_store_bytes=1 << 20))
    backend.replies.update(purge=3, invalidate=3, invalidate_chunks=3)
    assert drop(engine) == 3
    assert engine.is_started


@pytest.mark.parametrize(
    "drop",
    [
        lambda engine: engine.purge(),
        lambda engine: engine.invalidate("bridge"),
        lambda engine: engine.invalidate_chunk(OLD),
        lambda engine: engine.replace("bridge", "2", [NEW]),
    ],
    ids=["purge", "invalidate", "invalidate_chunk", "replace"],
)
def test_dropped_text_cannot_come_from_the_prefix_cache(engine, backend, drop) -> None:
    """After a drop the tenant's requests find nothing of before in vLLM's prefix cache."""
    engine.complete("Hello")
    engine.complete("Hello", tenant="other")
    drop(engine)
    engine.complete("Hello")
    engine.complete("Hello", tenant="other")
    before, other_before, after, other_after = (request.cache_salt for request in backend.requests)
    assert before != after
    assert other_before == other_after


def test_prefix_cache_is_forgotten_though_the_drop_failed(engine, backend) -> None:
    """The call has to be repeated; until then nothing of before is served from there either."""
    backend.replies["purge"] = RuntimeError("a tier is gone")
    engine.complete("Hello")
    with pytest.raises(EngineError):
        engine.purge()
    engine.complete("Hello")
    before, after = (request.cache_salt for request in backend.requests)
    assert before != after


def test_repair_is_asked_for(engine, backend) -> None:
    """`check` looks, `check(repair=True)` mends; both tell what they found."""
    backend.replies["check"] = ["wrong", "repaired: all of it"]
    engine.start()
    assert engine.check() == engine.check(repair=True) == ["wrong", "repaired: all of it"]
    assert [dict(message.arguments) for message in backend.controls] == [{"repair": False}, {"repair": True}]


def test_nothing_is_started_to_forget_what_was_never_stored(engine, backend) -> None:
    """Before the start the store is empty: the answers are known without vLLM."""
    engine.prefetch([OLD])
    assert (engine.invalidate("bridge"), engine.purge(), engine.check()) == (0, 0, [])
    assert not engine.is_started
    assert engine.stats() == {"engine": {"num_known_chunks": 0}}


def test_control_waits_for_its_answer(engine, backend) -> None:
    """The reply is asked for until it is there."""
    backend.replies["check"] = ["a record without an owner"]
    engine.start()
    backend.polls_until_reply = 2
    assert engine.check() == ["a record without an owner"]
    assert backend.polls == ["cachecraft_take_reply"] * 3


def test_failed_control_is_raised(engine, backend) -> None:
    """An error on the scheduler side reaches the caller with its text."""
    backend.replies["purge"] = RuntimeError("books do not balance")
    engine.start()
    with pytest.raises(EngineError, match="books do not balance"):
        engine.purge()


def test_warm_computes_each_text_once_behind_the_system_prompt(engine, backend, tokenizer) -> None:
    """Equal texts are sent once, each with the system prompt, for one token."""
    texts = engine.warm([OLD, Chunk(OLD.text, doc_id="copy"), NEW], system="Be brief.")
    prompts = [tokenizer.decode(request.token_ids) for request in backend.requests]
    assert texts == len(prompts) == 2
    for prompt, chunk in zip(sorted(prompts), (OLD, NEW), strict=True):
        assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
        assert chunk.text in prompt
    assert {request.sampling.max_tokens for request in backend.requests} == {1}


def test_warm_does_without_a_chat_template(engine, backend, tokenizer, monkeypatch) -> None:
    """A base model is warmed with plain text."""
    engine.start()
    monkeypatch.setattr(tokenizer, "chat_template", None)
    engine.warm([OLD], system="Be brief.")
    assert tokenizer.decode(backend.requests[0].token_ids) == f"Be brief.\n\n{OLD.text}"


def test_warm_counts_what_is_stored(engine, backend) -> None:
    """A chunk that was neither stored nor found is not counted."""
    backend.delivers_report = backend.keeps_report = False
    assert engine.warm([OLD]) == 0
