"""`audit` finds each kind of damage, so that an empty answer means something, and `rebuilt` mends it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cachecraft_rag.chunks import ChunkKey, DocumentRef, RecordMeta
from cachecraft_rag.store.audit import audit
from cachecraft_rag.store.books import RecordBooks, State
from cachecraft_rag.store.documents import DocumentRegistry
from cachecraft_rag.store.policies import POLICIES
from cachecraft_rag.store.quotas import Quotas
from cachecraft_rag.store.repair import rebuilt

LIMITS = {"budget_bytes": 100, "max_variants": 2}


def sound_books() -> RecordBooks:
    """A ready record (0), a pinned one (1), a doomed one (2) and a reserved one (3)."""
    books = RecordBooks(POLICIES["lru"], lambda: 0.0, Quotas({"a": 60}))
    for record_id, key in enumerate("xyzw"):
        books.insert(RecordMeta(record_id, ChunkKey(key), "a", 4, 0, 10, "p"))
    for record_id in range(3):
        books.make_ready(books.records[record_id], None)
    books.pin(books.records[1], "request", 1.0)
    books.pin(books.records[2], "request", 1.0)
    books.leave_index(books.records[2])
    return books


def _drop_from_index(books: RecordBooks) -> None:
    del books.index["a"][ChunkKey("w")]


def _misfile(books: RecordBooks) -> None:
    by_key = books.index["a"]
    by_key[ChunkKey("other")] = by_key.pop(ChunkKey("w"))


def _twin(books: RecordBooks) -> None:
    books.insert(RecordMeta(9, ChunkKey("x"), "a", 4, 0, 10, "p"))
    books.make_ready(books.records[9], None)


def _extra_variants(books: RecordBooks) -> None:
    for record_id in (8, 9):
        books.insert(RecordMeta(record_id, ChunkKey("x"), "a", 4, 0, 10, f"p{record_id}"))


def _add_ready(books: RecordBooks, size_bytes: int, tenant: str = "a") -> None:
    books.insert(RecordMeta(9, ChunkKey("v"), tenant, 4, 0, size_bytes, "p"))
    books.make_ready(books.records[9], None)


def _orphan_doomed(books: RecordBooks) -> None:
    del books.pinned_by["request"][2]
    del books.num_pins[2]


DAMAGE: dict[str, Callable[[RecordBooks], object]] = {
    "10 bytes can be evicted": lambda b: setattr(b, "evictable_bytes", 30),
    "the books say 7": lambda b: setattr(b, "used_bytes", 7),
    "over the budget": lambda b: _add_ready(b, 999, "b"),
    "over its quota of 60": lambda b: _add_ready(b, 30),
    "states are counted": lambda b: b.num_in_state.update([State.READY]),
    "tenants use": lambda b: setattr(b.usage["a"], "num_ready", 9),
    "freed records are alive: [0]": lambda b: b.freed.update({0: None}),
    "freed records are alive: [1]": lambda b: b.freed.update({1: None}),
    "is filed under": _misfile,
    "index and records differ": _drop_from_index,
    "two variants behind one prefix": _twin,
    "more than 2 variants": _extra_variants,
    "owners hold pins": lambda b: b.num_pins.update([1]),
    "pins refer to ids that hold no payload": lambda b: b.pinned_by["request"].update({77: 1.0}),
    "nobody pins it": _orphan_doomed,
    "eviction queue and records differ": lambda b: b.evictable.remove(b.records[0].meta),
    "the eviction queue of tenant 'a'": lambda b: b.evictable.forget("a"),
    "kept scores": lambda b: b.scores.pop(1),
}


def test_sound_books_have_no_faults() -> None:
    """Records in all states at once are in order."""
    assert audit(sound_books(), **LIMITS) == []


@pytest.mark.parametrize("sentence", DAMAGE)
def test_each_damage_is_named(sentence: str) -> None:
    """The sentence says which rule is broken."""
    books = sound_books()
    DAMAGE[sentence](books)
    faults = audit(books, **LIMITS)
    assert any(sentence in fault for fault in faults), faults


@pytest.mark.parametrize("sentence", DAMAGE)
def test_each_damage_is_mended(sentence: str) -> None:
    """Nothing is wrong any more, every payload is still held or freed, and it is said what was done."""
    books = sound_books()
    DAMAGE[sentence](books)
    mended, done = rebuilt(books, **LIMITS)
    assert audit(mended, **LIMITS) == []
    assert mended.records.keys() | mended.freed.keys() == books.records.keys() | books.freed.keys()
    assert mended.records.keys().isdisjoint(mended.freed)
    assert all(sentence.startswith("repaired: ") for sentence in done) and done


def test_sound_records_survive_the_mending_of_others() -> None:
    """They keep state, pins and profile's place; what stood in doubt is named and dropped."""
    books = sound_books()
    _drop_from_index(books)
    mended, done = rebuilt(books, **LIMITS)
    states = {record_id: record.state for record_id, record in mended.records.items()}
    assert states == {0: State.READY, 1: State.READY, 2: State.DOOMED, 3: State.CANCELLED}
    assert mended.pinned_by == books.pinned_by
    assert any("record 3 of tenant 'a' was dropped" in sentence for sentence in done)


def test_a_request_reads_on_what_the_mending_drops() -> None:
    """A pinned record whose place is in doubt is not found any more, and freed when it is released."""
    books = sound_books()
    books.index["a"][ChunkKey("q")] = books.index["a"].pop(ChunkKey("y"))
    mended, _ = rebuilt(books, **LIMITS)
    assert mended.records[1].state is State.DOOMED
    mended.unpin("request")
    assert mended.drain_freed() == (1, 2)


def test_a_one_sided_reference_is_named() -> None:
    """Documents and keys must refer to each other."""
    registry = DocumentRegistry()
    registry.register("a", ChunkKey("x"), DocumentRef("doc"))
    assert registry.check() == []
    registry._tenants["a"].doc_ids_by_key.clear()
    assert any("differ" in fault for fault in registry.check())


def test_a_generation_ahead_of_the_clock_is_named() -> None:
    """The next change would not raise it."""
    registry = DocumentRegistry()
    registry.replace("a", "doc", "v1", [])
    registry._tenants["a"].clock = 0
    assert any("ahead" in fault for fault in registry.check())


def test_references_in_doubt_are_taken_out() -> None:
    """Neither side is believed; references that both sides know stay, and generations go on upwards."""
    registry = DocumentRegistry()
    for key in "xy":
        registry.register("a", ChunkKey(key), DocumentRef("doc"))
    registry.invalidate_chunks("a", [ChunkKey("y")])
    del registry._tenants["a"].doc_ids_by_key[ChunkKey("x")]
    registry._tenants["a"].clock = 0
    assert registry.repair() == {"a": ["x"]}
    assert registry.check() == []
    assert registry.invalidate("a", "doc") == ["y"]
    assert registry.generation("a", "doc") > 1
