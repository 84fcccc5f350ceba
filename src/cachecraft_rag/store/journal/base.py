"""The contract of the document journal: one order of changes for all processes that share stored KV.

Entries say what happened to documents; `DocumentRegistry` is their fold. A process that applies what the
journal gives, in its order and nothing else, is in the same state as every other that has read as far.

Members are processes with a lease. A member may use stored KV while its lease lasts, and renews it when it
acknowledges what it has read. So a change is binding, for whoever asks, once every member has acknowledged
it or has no lease any more.
"""

from __future__ import annotations

import enum
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cachecraft_rag.chunks import ChunkKey
from cachecraft_rag.errors import ConfigurationError, StoreError

MAX_LEASE_S = 5.0
"""Longest lease by default. After a loss of the journal nobody knows who its members were, so changes are
binding only when the longest lease they can have had is over."""

LOST_MEMBERS = "members of a lost journal"
"""What `waiting_for` names while leases of unknown members may last; see `MAX_LEASE_S`."""

DEFAULT_LIMIT = 1000
DEFAULT_KEEP = 1000


class JournalError(StoreError):
    """The journal's medium failed: disk full, file damaged, connection lost, timeout, closed."""


class StartOverError(JournalError):
    """What this reader holds is not a part of the journal any more.

    The journal was begun anew (damage, Redis restarted), or entries the reader has not seen were compacted.
    It cannot know what it missed: drop all stored KV, and read from seq 0 of the present epoch.
    """


class DamagedJournalError(JournalError):
    """What is stored is not what was written."""


class Action(enum.StrEnum):
    """What happened to a document, as the methods of `DocumentRegistry` of the same names say.

    Whatever a later version adds must concern one tenant, must be carried out if that tenant is purged
    in the books, and its author sees to the cold tiers: then `UNKNOWN` is enough for older members.
    """

    REGISTER = "register"
    REPLACE = "replace"
    INVALIDATE = "invalidate"
    INVALIDATE_CHUNKS = "invalidate_chunks"
    """Concerns chunks, whatever documents name them; the entry names no document."""
    PURGE = "purge"
    """Concerns the whole tenant; the entry names no document."""
    RESET = "reset"
    """Only from `Follower.drain`, never in a journal: changes were missed. Forget all documents and drop
    all stored KV of all tenants; the entries that follow tell the present state."""
    UNKNOWN = "unknown"
    """Only from `Journal.read`, never in a journal: a later version wrote something that this one does not
    know. Purge the tenant in the books: that costs time, and no correctness."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One change.

    Attributes:
        seq: place in the journal, from 1 on; 0 before it is appended.
        keys: of `register`, `replace` and `invalidate_chunks`: the chunks.
        author: member that appended it; empty when unknown, as after compaction.
    """

    action: Action
    tenant: str
    doc_id: str = ""
    version: str | None = None
    keys: tuple[ChunkKey, ...] = ()
    author: str = ""
    seq: int = 0


@dataclass(frozen=True, slots=True)
class Position:
    """A place in one journal: everything up to `seq` is taken. Numbers of other epochs mean nothing."""

    epoch: str
    seq: int


class Journal(Protocol):
    """Entries in one order, and the members that follow it.

    Thread-safe and shared by processes. All calls block: they belong into side threads. Every method but
    `close` raises `JournalError` when the medium fails, and nothing else of the medium gets out.

    An epoch is a history without gaps. A new one begins when the medium lost entries, or may have: members
    of the old one get `StartOverError`, and for `max_lease_s` `waiting_for` names `LOST_MEMBERS`.
    """

    @property
    def was_reset(self) -> bool:
        """Whether this object began a new epoch in place of another: cold records may be out of date.

        For this object only. Who keeps its `Position` beside its cold records learns it in any case.
        """
        ...

    def end(self) -> Position:
        """The last entry of all."""
        ...

    def append(self, entries: Sequence[Entry]) -> Position:
        """Add entries, all or none, and return the position of the last; seqs are dense.

        After an error they may be in the journal or not; appending them again is harmless.
        """
        ...

    def read(self, after: Position, limit: int = DEFAULT_LIMIT) -> list[Entry]:
        """Entries behind `after`, in order; fewer than `limit` only at the end.

        No entry appears later with a lower seq than one already read. From seq 0 on it begins with the
        compacted past, which is always given whole, whatever the limit.

        Raises:
            StartOverError: `after` is of another epoch, inside the compacted past or ahead of the journal.
        """
        ...

    def continues(self, position: Position) -> bool:
        """Whether every entry behind `position` is still there: of this epoch, and not compacted."""
        ...

    def join(self, name: str, lease_s: float) -> Position:
        """Become a member, with a lease from now on, that has taken nothing.

        Args:
            name: never used before: a second process of the same name would answer for the first.

        Returns:
            Seq 0 of the present epoch.

        Raises:
            ConfigurationError: the lease is not above zero and at most `max_lease_s`.
        """
        ...

    def acknowledge(self, name: str, position: Position, lease_s: float) -> None:
        """Say that all up to `position` is taken, and renew the lease, even one that has run out.

        Raises:
            StartOverError: as `read`.
        """
        ...

    def leave(self, name: str) -> None:
        """End a membership; the member must have stopped using stored KV. Unknown names are ignored."""
        ...

    def waiting_for(self, position: Position) -> tuple[str, ...]:
        """Members with a lease that have not acknowledged `position`, in order of name.

        Raises:
            StartOverError: another epoch has begun; the entry may be lost.
        """
        ...

    def compact(self, keep: int = DEFAULT_KEEP) -> int:
        """Fold old entries to what is left of them (`snapshot.folded`), and return how many went.

        The last `keep` entries stay, and all that a member with a lease has not acknowledged. Where a
        later version wrote what this one does not know, nothing is folded.
        """
        ...

    def check(self) -> list[str]:
        """What is wrong, one sentence each; empty when all is sound. Reads the whole journal."""
        ...

    def close(self) -> None:
        """Release files and connections. Calls after it raise `JournalError`; closing again does nothing."""
        ...


def lease_clock() -> float:
    """Seconds since the machine started, the same in all its processes.

    Unlike wall time it never jumps, and unlike `time.monotonic` on Linux it goes on while the machine
    sleeps, so that no lease lasts longer for its holder than for Redis.
    """
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


def checked_lease(lease_s: float, max_lease_s: float) -> float:
    """The lease.

    Raises:
        ConfigurationError: it is not above zero and at most `max_lease_s`.
    """
    if not 0 < lease_s <= max_lease_s:
        raise ConfigurationError(f"lease_s is {lease_s:g}; it must be above 0 and at most {max_lease_s:g}")
    return lease_s


def encode(entry: Entry) -> str:
    """An entry without its seq, as ASCII JSON."""
    return json.dumps(
        [entry.action, entry.tenant, entry.doc_id, entry.version, entry.author, entry.keys],
        separators=(",", ":"),
    )


def decode(seq: int, text: str | bytes) -> Entry:
    """The entry that `encode` wrote.

    Raises:
        DamagedJournalError: it is something else.
    """
    try:
        action, tenant, doc_id, version, author, keys = json.loads(text)
        entry = Entry(
            action=_action(action),
            tenant=tenant,
            doc_id=doc_id,
            version=version,
            keys=tuple(map(ChunkKey, keys)),
            author=author,
            seq=seq,
        )
    except (ValueError, TypeError) as fault:
        raise DamagedJournalError(f"entry {seq} of the journal is damaged: {fault}") from fault
    return entry


def _action(name: object) -> Action:
    if not isinstance(name, str):
        raise TypeError(f"{name!r} is no action")
    return Action(name) if name in _WRITTEN else Action.UNKNOWN


_WRITTEN = frozenset(Action) - {Action.RESET, Action.UNKNOWN}
