"""Which chunks were handed out as public: nodes do not say it, and must not be changed to."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

from cachecraft_rag.chunks import Chunk
from cachecraft_rag.engine.api import ChatEngine

_MAX_NOTES = 20_000
_Note = tuple[str | None, str, str | None]

_lock = threading.Lock()
_notes: WeakKeyDictionary[ChatEngine, OrderedDict[_Note, None]] = WeakKeyDictionary()


def note_shared(engine: ChatEngine, tenant: str | None, chunks: Iterable[Chunk]) -> None:
    """Remember the public ones of `chunks`, the last 20,000 of each engine."""
    with _lock:
        notes = _notes.setdefault(engine, OrderedDict())
        for chunk in chunks:
            if chunk.is_shared:
                notes[_note(tenant, chunk)] = None
                notes.move_to_end(_note(tenant, chunk))
        while len(notes) > _MAX_NOTES:
            notes.popitem(last=False)


def as_shared(engine: ChatEngine, tenant: str | None, chunks: Sequence[Chunk]) -> list[Chunk]:
    """`chunks`, those marked as public that were noted so: with the same text, of the same document."""
    with _lock:
        notes = _notes.get(engine, OrderedDict[_Note, None]())
        return [
            replace(chunk, is_shared=True) if _note(tenant, chunk) in notes else chunk for chunk in chunks
        ]


def _note(tenant: str | None, chunk: Chunk) -> _Note:
    return tenant, chunk.text.strip(), chunk.doc_id
