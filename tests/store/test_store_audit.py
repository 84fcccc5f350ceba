"""`audit` finds each kind of damage, so that an empty answer means something."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cachecraft_rag.chunks import ChunkKey, DocumentRef, RecordMeta
from cachecraft_rag.store.audit import audit
from cachecraft_rag.store.books import RecordBooks, State
from cachecraft_rag.store.documents import DocumentRegistry
from cachecraft_rag.store.policies import POLICIES


def sound_books() -> RecordBooks:
    """A ready record (0), a pinned one (1), a doomed one (2) and a reserved one (3)."""
    books = RecordBooks(POLICIES["lru"], lambda: 0.0)
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


def _orphan_doomed(books: RecordBooks) -> None:
    del books.pinned_by["request"][2]
    del books.num_pins[2]


DAMAGE: dict[str, Callable[[RecordBooks], object]] = {
    "10 bytes can be evicted": lambda b: setattr(b, "evictable_bytes", 30),
    "the books say 7": lambda b: setattr(b, "used_bytes", 7),
    "over the budget": lambda b: b.insert(RecordMeta(9, ChunkKey("v"), "a", 4, 0, 999, "p")),
    "states are counted": lambda b: b.num_in_state.update([State.READY]),
    "tenants use": lambda b: setattr(b.usage["a"], "num_ready", 9),
    "freed records are alive": lambda b: b.freed.update({0: None}),
    "is filed under": _misfile,
    "index and records differ": _drop_from_index,
    "two variants behind one prefix": _twin,
    "more than 2 variants": _extra_variants,
    "owners hold pins": lambda b: b.num_pins.update([1]),
    "pins refer to ids that hold no payload": lambda b: b.pinned_by["request"].update({77: 1.0}),
    "nobody pins it": _orphan_doomed,
    "eviction queue and records differ": lambda b: b.evictable.remove(0),
    "kept scores": lambda b: b.scores.pop(1),
}


def test_sound_books_have_no_faults() -> None:
    """Records in all states at once are in order."""
    assert audit(sound_books(), budget_bytes=100, max_variants=2) == []


@pytest.mark.parametrize("sentence", DAMAGE)
def test_each_damage_is_named(sentence: str) -> None:
    """The sentence says which rule is broken."""
    books = sound_books()
    DAMAGE[sentence](books)
    faults = audit(books, budget_bytes=100, max_variants=2)
    assert any(sentence in fault for fault in faults), faults


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
