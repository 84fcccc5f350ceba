"""The file of a SQLite journal: its rows, each with a checksum, and whether it can be trusted.

SQLite finds damage to its own structure, not to what the rows hold, so every row is sealed with a hash of
its name and body. A damaged file stays where it is, and the next number begins: `journal-1.sqlite3`,
`journal-2.sqlite3`. It is not renamed, as another process may have it open, and SQLite would then delete the
log of the new file by its name when that process closes the old one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from cachecraft_rag.store.journal.base import DamagedJournalError, Entry, JournalError, decode, encode

FORMAT = 1
_SEAL_DIGITS = 16
_NAME = re.compile(r"journal-(\d+)\.sqlite3")

# The other codes are faults of the machine, or another process's lock: https://www.sqlite.org/rescode.html
_DAMAGE = frozenset(
    {
        sqlite3.SQLITE_ERROR,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_FORMAT,
        sqlite3.SQLITE_MISMATCH,
    }
)
_SCHEMA = (
    "CREATE TABLE entries (seq INTEGER PRIMARY KEY, body TEXT NOT NULL)",
    "CREATE TABLE books (name TEXT PRIMARY KEY, body TEXT NOT NULL) WITHOUT ROWID",
)


@dataclass(frozen=True, slots=True)
class State:
    """What the file says of itself.

    Attributes:
        grace_until_s: leases of members nobody knows may last until then; by `lease_clock`.
        seq: of the last entry.
        floor: entries up to it are folded into `num_folded` ones.
    """

    epoch: str
    grace_until_s: float
    seq: int = 0
    floor: int = 0
    num_folded: int = 0
    format: int = FORMAT


@dataclass(frozen=True, slots=True)
class Member:
    """`seq` is acknowledged, `until_s` is when the lease ends; by `lease_clock`."""

    seq: int
    until_s: float


def is_damage(fault: BaseException) -> bool:
    """Whether it is the file's fault, not the machine's nor the caller's."""
    if isinstance(fault, sqlite3.Error):
        # Errors that Python's module itself raises have no code: a cell that is not valid text.
        return getattr(fault, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF in _DAMAGE
    return isinstance(fault, DamagedJournalError)


def file_numbers(folder: Path) -> list[int]:
    """Numbers of the journal's files, the current one last."""
    return sorted(int(match[1]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)))


def path_of(folder: Path, number: int) -> Path:
    return folder / f"journal-{number}.sqlite3"


class Rows:
    """One connection; methods are called inside a transaction, and raise sqlite3's errors."""

    def __init__(self, path: Path, timeout_s: float, *, create: bool = False) -> None:
        self.path = path
        uri = f"{path.absolute().as_uri()}?mode={'rwc' if create else 'rw'}"
        self._connection = sqlite3.connect(
            uri, uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=False
        )
        # The file may have been tampered with: no functions in its schema, and cells are checked.
        self._connection.execute("PRAGMA trusted_schema = 0")
        self._connection.execute("PRAGMA cell_size_check = 1")

    def close(self) -> None:
        self._connection.close()

    def create(self, state: State) -> None:
        """Make the tables and the first state, in one transaction of their own."""
        self._connection.execute("PRAGMA journal_mode = WAL")
        self.begin_write(durable=True)
        for statement in _SCHEMA:
            self._connection.execute(statement)
        self.set_state(state)
        self.commit()

    def begin_read(self) -> None:
        self._connection.execute("BEGIN")

    def begin_write(self, *, durable: bool) -> None:
        """Wait for the write lock; `durable`: what is committed survives a crash of the machine."""
        self._connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        self._connection.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        self._connection.execute("COMMIT")

    def state(self) -> State:
        body = self._book("state")
        if body is None:
            raise DamagedJournalError("the journal's state is missing")
        fields = json.loads(body)
        if fields.get("format") != FORMAT:
            raise JournalError(
                f"{self.path} has format {fields.get('format')}, this version reads {FORMAT}: "
                "use another folder, or remove the file and all cold records"
            )
        return State(**fields)

    def set_state(self, state: State) -> None:
        self._set_book("state", json.dumps(asdict(state)))

    def members(self) -> dict[str, Member]:
        rows = self._connection.execute("SELECT name, body FROM books ORDER BY name")
        # All rows are looked at: a damaged name would hide a member.
        books = {name: _unsealed(name, body) for name, body in rows}
        return {
            name.removeprefix("member "): Member(*json.loads(body))
            for name, body in books.items()
            if name != "state"
        }

    def set_member(self, name: str, member: Member) -> None:
        self._set_book(f"member {name}", json.dumps([member.seq, member.until_s]))

    def drop_member(self, name: str) -> None:
        self._connection.execute("DELETE FROM books WHERE name = ?", (f"member {name}",))

    def entries(self, state: State, after: int, limit: int) -> list[Entry]:
        """Entries behind `after`, 0 or at least the floor; the limit is for those above the floor."""
        past = self._entries(0, state.floor, -1) if after == 0 else []
        if after == 0 and len(past) != state.num_folded:
            raise DamagedJournalError(f"{len(past)} compacted entries are there, not {state.num_folded}")
        start = max(after, state.floor)
        fresh = self._entries(start, state.seq, limit)
        num_expected = min(limit, state.seq - start)
        if [entry.seq for entry in fresh] != list(range(start + 1, start + num_expected + 1)):
            raise DamagedJournalError(f"entries behind {start} are missing")
        return past + fresh

    def add(self, rows: Iterable[tuple[int, str]]) -> None:
        """Insert what `sealed_rows` gave."""
        self._connection.executemany("INSERT INTO entries VALUES (?, ?)", rows)

    def drop_entries(self, seqs: Iterable[int]) -> None:
        self._connection.executemany("DELETE FROM entries WHERE seq = ?", ((seq,) for seq in seqs))

    def audit(self) -> None:
        """Read everything, outside a transaction.

        Raises:
            DamagedJournalError, sqlite3.Error: something is damaged.
            JournalError: the format is unknown.
        """
        (verdict,) = self._connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise DamagedJournalError(verdict)
        self.begin_read()
        state = self.state()
        entries = self.entries(state, 0, max(state.seq, 1))
        self.members()
        (num_rows,) = self._connection.execute("SELECT count(*) FROM entries").fetchone()
        self.commit()
        if num_rows != len(entries):
            raise DamagedJournalError(f"{num_rows} entries are there, not {len(entries)}")

    def _entries(self, after: int, upto: int, limit: int) -> list[Entry]:
        rows = self._connection.execute(
            "SELECT seq, body FROM entries WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT ?",
            (after, upto, limit),
        )
        return [decode(seq, _unsealed(seq, body)) for seq, body in rows]

    def _book(self, name: str) -> str | None:
        row = self._connection.execute("SELECT body FROM books WHERE name = ?", (name,)).fetchone()
        return _unsealed(name, row[0]) if row else None

    def _set_book(self, name: str, body: str) -> None:
        self._connection.execute("INSERT OR REPLACE INTO books VALUES (?, ?)", (name, _sealed(name, body)))


def fault_of(path: Path, timeout_s: float) -> str:
    """Why a file cannot be trusted; empty when it can.

    Raises:
        JournalError: it has another format.
        sqlite3.Error: the machine does not let us look.
    """
    try:
        with closing(Rows(path, timeout_s)) as rows:
            rows.audit()
            # A header that says read-only shows only when something is written.
            rows.begin_write(durable=False)
            rows.set_state(rows.state())
            rows.commit()
    except (DamagedJournalError, sqlite3.Error) as fault:
        says_read_only = getattr(fault, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_READONLY
        if not is_damage(fault) and not (says_read_only and os.access(path, os.W_OK)):
            raise
        return str(fault)
    return ""


def sealed_rows(entries: Iterable[Entry]) -> list[tuple[int, str]]:
    return [(entry.seq, _sealed(entry.seq, encode(entry))) for entry in entries]


def remove(path: Path) -> None:
    """Delete a file with its log."""
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _digest(name: str | int, body: str) -> str:
    text = f"{name}\0{body}".encode()
    return hashlib.blake2b(text, digest_size=_SEAL_DIGITS // 2).hexdigest()


def _sealed(name: str | int, body: str) -> str:
    return _digest(name, body) + body


def _unsealed(name: str | int, text: object) -> str:
    if isinstance(text, str) and text[:_SEAL_DIGITS] == _digest(name, text[_SEAL_DIGITS:]):
        return text[_SEAL_DIGITS:]
    raise DamagedJournalError(f"row {name!r} of the journal is damaged")
