"""Changes of documents in the one order that all processes share: from the journal into the store's books.

A change is appended and waited for in a side thread, and applied on the scheduler's thread where the
journal gives it, in every process. What a request names (this chunk belongs to that document) is noted
here at once and reaches the journal in the background, before KV of the chunk is published to others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from cachecraft_rag.chunks import ChunkKey, DocumentRef, RecordMeta
from cachecraft_rag.errors import StoreError
from cachecraft_rag.store.base import ChunkStore
from cachecraft_rag.store.journal import Action, Entry, Follower, Position

logger = logging.getLogger(__name__)

Steps = Generator[Future[Any], Any, Any]
"""A command in steps: it yields what it waits for and returns its result."""

OnApplied = Callable[[Entry, bool], None]

CHANGE_TIMEOUT_S = 20.0
"""Longer than any lease: after it the journal itself is at fault."""


def apply_change(store: ChunkStore, entry: Entry) -> int:
    """Carry out a change in the books; returns how many records left the index."""
    match entry.action:
        case Action.REPLACE:
            return store.replace(entry.tenant, entry.doc_id, entry.version, entry.keys)
        case Action.INVALIDATE:
            return store.invalidate(entry.tenant, entry.doc_id, entry.version)
        case Action.INVALIDATE_CHUNKS:
            return store.invalidate_chunks(entry.tenant, entry.keys)
        case Action.PURGE | Action.UNKNOWN:
            return store.purge(entry.tenant)
        case Action.REGISTER:
            for key in entry.keys:
                store.register(entry.tenant, key, DocumentRef(entry.doc_id, entry.version))
        case Action.RESET:
            return store.forget_all()
    return 0


class SharedChanges:
    """Used from the scheduler's thread only.

    Args:
        follower: started by the caller.
        registrar: where KV is published too, so that what was noted before is in the journal before.
        on_applied: told each change that was applied, for what lies outside the books, and whether it is
            news: at the start the journal tells the past again.
        num_past: seq up to which cold records have followed the journal already.
        keep_position: told, in a side thread, how far the journal was followed.
        make_executor: from a number of threads to what runs them.
    """

    def __init__(
        self,
        follower: Follower,
        store: ChunkStore,
        registrar: Executor,
        on_applied: OnApplied,
        num_past: int = 0,
        keep_position: Callable[[Position], None] = lambda position: None,
        make_executor: Callable[[int], Executor] = ThreadPoolExecutor,
    ) -> None:
        self._follower = follower
        self._store = store
        self._on_applied = on_applied
        self._keep_position = keep_position
        self._changer = make_executor(1)
        self._registrar = registrar
        self._noted: dict[tuple[str, DocumentRef], dict[ChunkKey, None]] = {}
        self._registered: set[tuple[str, DocumentRef, ChunkKey]] = set()
        self._num_dropped: dict[Entry, int] = {}
        self._kept: Position | None = None
        self._num_past = num_past

    def catch_up(self) -> bool:
        """Apply what is new; whether stored KV may be used now."""
        for entry in self._follower.drain():
            if entry.action is Action.REGISTER and entry.author == self._follower.name:
                continue  # applied when it was noted
            num_dropped = apply_change(self._store, entry)
            if entry.author == self._follower.name:
                self._num_dropped[_as_ordered(entry)] = num_dropped
            self._on_applied(entry, entry.seq > self._num_past)
        return self._follower.is_current()

    def make(self, entry: Entry) -> Steps:
        """Make a change binding for all processes; returns how many records left the index here.

        Raises:
            StoreError: not every process is known to follow it.
        """
        is_binding = yield self._changer.submit(self._follower.append_and_wait, [entry], CHANGE_TIMEOUT_S)
        self.catch_up()
        num_dropped = self._num_dropped.pop(entry, 0)
        if not is_binding:
            raise StoreError(
                f"{entry.action} of {entry.doc_id or entry.tenant!r} is not known to be followed by every "
                "process: repeat it"
            )
        return num_dropped

    def note(self, tenant: str, key: ChunkKey, document: DocumentRef) -> None:
        """This document contains this text too; `register` sends it on."""
        if (tenant, document, key) not in self._registered:
            self._noted.setdefault((tenant, document), {})[key] = None

    def register(self) -> None:
        """Send what was noted since the last call to the journal, in the background."""
        noted, self._noted = self._noted, {}
        if noted:
            self._registrar.submit(self._register, noted)
        self.keep_position()

    def keep_position(self) -> None:
        """Have the position written down, in the background, if it has changed."""
        position = self._follower.position
        if position is not None and position != self._kept:
            self._kept = position
            self._registrar.submit(self._keep_position, position)

    def is_registered(self, meta: RecordMeta) -> bool:
        """Whether other processes will know that the record's document contains it."""
        return meta.document is None or (meta.tenant, meta.document, meta.key) in self._registered

    def close(self) -> None:
        self._changer.shutdown(wait=True)
        self._follower.close()

    def _register(self, noted: dict[tuple[str, DocumentRef], dict[ChunkKey, None]]) -> None:
        entries = [
            Entry(
                action=Action.REGISTER,
                tenant=tenant,
                doc_id=document.doc_id,
                version=document.version,
                keys=tuple(keys),
            )
            for (tenant, document), keys in noted.items()
        ]
        try:
            self._follower.append(entries)
        except StoreError as error:
            logger.warning("KV of %d documents is not shared: %s", len(noted), error)
            return
        self._registered.update(_triples(noted.items()))


def _triples(
    noted: Iterable[tuple[tuple[str, DocumentRef], dict[ChunkKey, None]]],
) -> Iterable[tuple[str, DocumentRef, ChunkKey]]:
    return ((tenant, document, key) for (tenant, document), keys in noted for key in keys)


def _as_ordered(entry: Entry) -> Entry:
    """The entry as it was before the journal gave it a place."""
    return replace(entry, seq=0, author="")
