"""The document journal: replacements, invalidations and purges, kept and binding for all processes.

`SqliteJournal` is in `journal.sqlite` (processes of one machine), `RedisJournal` in `journal.redis`, which
needs a library of its own; `Follower` is a process's side of either.
"""

from __future__ import annotations

from cachecraft_rag.store.journal.base import (
    MAX_LEASE_S,
    Action,
    Entry,
    Journal,
    JournalError,
    Position,
    StartOverError,
)
from cachecraft_rag.store.journal.follower import Follower

__all__ = [
    "MAX_LEASE_S",
    "Action",
    "Entry",
    "Follower",
    "Journal",
    "JournalError",
    "Position",
    "StartOverError",
]
