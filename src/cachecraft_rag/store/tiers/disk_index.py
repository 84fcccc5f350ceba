"""The index of a disk tier: `diskcache`'s tables and settings, with bytes and text only.

What is taken from diskcache (5.6): the schema with its sums, settings and pragmas, one connection per
thread and process, write transactions between processes. What is not, and why:

- its pickling: see `BytesDisk`;
- `Cache.get` under a least-recently-used policy: it reads the file inside a write transaction, so that
  one slow read stops everybody; here reads take no lock, and uses are written later in one go;
- `Cache.set`: it writes the file before it has the lock, so that two processes together overshoot the
  limit, and a crash leaves the file behind. Here everything of a put happens under one lock;
- its culling: it goes by rows, ten at a time after the limit was passed, not by bytes before.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import diskcache  # type: ignore[import-untyped]

from cachecraft_rag.store.tiers.base import DamagedBlobError, prefix_end
from cachecraft_rag.store.tiers.bytes_disk import MIN_FILE_BYTES, BytesDisk

PAGE_BYTES = 4096
WAL_PAGES = 128

SETTINGS: dict[str, str | int] = {
    # The tier evicts by bytes itself, before it writes: see the module's text.
    "eviction_policy": "none",
    "cull_limit": 0,
    "statistics": 0,
    "tag_index": 0,
    "disk_min_file_size": MIN_FILE_BYTES,
    # Readers are never stopped by a writer, nor a writer by readers.
    "sqlite_journal_mode": "wal",
    # 1 is NORMAL: the log is synced at checkpoints, not at each commit. A crash of the machine can lose
    # the last commits, in order and never torn; `flush` and `delete` sync. FULL, as a rule, would pay a
    # sync per put for blobs that can be computed again.
    "sqlite_synchronous": 1,
    # Freed pages go back to the file system at each commit, or the budget would be spent on them.
    "sqlite_auto_vacuum": 1,
    # The log's share of the budget, kept small. Checkpoints come more often than by default (1000).
    "sqlite_wal_autocheckpoint": WAL_PAGES,
    "sqlite_journal_size_limit": WAL_PAGES * PAGE_BYTES,
    # Reading a mapped file that was cut short kills the process (SIGBUS); a plain read answers an error.
    "sqlite_mmap_size": 0,
    # The file may have been tampered with: no functions in its schema, and cells are checked.
    "sqlite_trusted_schema": 0,
    "sqlite_cell_size_check": 1,
}

TOUCH = "UPDATE Cache SET access_time = ? WHERE key = ? AND raw = 1"
FIND = "SELECT rowid, size, mode, filename, value FROM Cache WHERE key = ? AND raw = 1"
OLDEST = "SELECT rowid, key, CAST(size AS INTEGER), filename FROM Cache ORDER BY access_time LIMIT ?"
NAMES = "SELECT key FROM Cache WHERE key >= ? AND key < ? AND raw = 1"
"""A range of diskcache's index on (key, raw), which compares text byte by byte."""
ABOVE_ALL_TEXT = b""
"""SQLite sorts any bytes behind any text."""


class Row(NamedTuple):
    """Where a blob lies: in a file of `size` bytes, or (`size` 0) in the row itself."""

    rowid: int
    size: int
    mode: int
    filename: str | None
    value: Any


class FileChanges(NamedTuple):
    """Value files a transaction wrote, and those it let go of; None stands for a value in the row."""

    new: list[str | None]
    old: list[str | None]


class BlobIndex(diskcache.Cache):  # type: ignore[misc]
    """Rows of blobs. Methods that write are called inside `transact()`; errors are sqlite3's and OSError."""

    def __init__(self, folder: Path, timeout_s: float, budget_bytes: int) -> None:
        super().__init__(str(folder), timeout=timeout_s, disk=BytesDisk, size_limit=budget_bytes, **SETTINGS)
        self._sql("CREATE INDEX IF NOT EXISTS Cache_access_time ON Cache (access_time)")

    def rows(self, statement: str, *arguments: object) -> list[Any]:
        """All rows at once: a cursor left open would keep the log from being reused."""
        rows: list[Any] = self._sql(statement, arguments).fetchall()
        return rows

    def find(self, name: str) -> Row | None:
        rows = self.rows(FIND, name)
        return Row(*rows[0]) if rows else None

    def read(self, row: Row) -> bytes:
        """The blob of a row.

        Raises:
            FileNotFoundError: it was replaced or removed since the row was found, or lost in a crash.
            DamagedBlobError: it is not what was stored.
        """
        value: bytes = self.disk.fetch(row.mode, row.filename, row.value, False)
        if row.filename and len(value) != row.size:
            raise DamagedBlobError(f"a blob's file has {len(value)} bytes instead of {row.size}")
        return value

    def integrity(self) -> list[str]:
        """What is wrong with the pages of the index; empty when they are sound."""
        return [verdict for (verdict,) in self.rows("PRAGMA integrity_check") if verdict != "ok"]

    def names(self, prefix: str) -> list[str]:
        end = prefix_end(prefix)
        return [name for (name,) in self.rows(NAMES, prefix, ABOVE_ALL_TEXT if end is None else end)]

    def sums(self) -> tuple[int, int]:
        """Number of blobs, and bytes in files of their own."""
        sums = dict(self.rows("SELECT key, value FROM Settings WHERE key IN ('count', 'size')"))
        return sums["count"], sums["size"]

    def page_bytes(self) -> int:
        ((num_pages,),) = self.rows("PRAGMA page_count")
        return int(num_pages * self._page_size)

    @contextmanager
    def synced(self) -> Iterator[None]:
        """Transactions of this thread inside it survive a crash of the machine, with all before them.

        Not a checkpoint: that fails at once while another process makes one.
        """
        self.rows("PRAGMA synchronous = FULL")
        try:
            yield
        finally:
            self.rows("PRAGMA synchronous = NORMAL")

    def write_something(self) -> None:
        """A commit that changes nothing is not synced; diskcache's count of misses is not used here."""
        self.rows("UPDATE Settings SET value = value + 1 WHERE key = 'misses'")

    @contextmanager
    def writing(self) -> Iterator[FileChanges]:
        """One write transaction over rows and files; nothing of it stays if it fails.

        Raises:
            diskcache.Timeout: another process held SQLite's write lock all the time.
        """
        files = FileChanges([], [])
        try:
            with self.transact():
                yield files
        except BaseException:
            self._end_transaction()
            for filename in files.new:
                self.disk.remove(filename)
            raise
        for filename in files.old:
            self.disk.remove(filename)

    def _end_transaction(self) -> None:
        """A commit that failed leaves this thread's connection inside its transaction.

        It is not simply closed, because on a full disk it could not be opened again, not even to read.
        """
        try:
            if self._con.in_transaction:
                self._con.rollback()
        except sqlite3.Error:
            self.close()

    def put(self, name: str, value: Sequence[memoryview], now_s: float, files: FileChanges) -> None:
        size, mode, filename, inline = self.disk.store(value, False, key=name)
        files.new.append(filename)
        columns = (None, None, size, mode, filename, inline)
        old = self.find(name)
        if old:
            self._row_update(old.rowid, now_s, columns)
            files.old.append(old.filename)
        else:
            self._row_insert(name, True, now_s, columns)

    def touch(self, uses: Iterable[tuple[str, float]]) -> None:
        self._con.executemany(TOUCH, [(used_s, name) for name, used_s in uses])

    def evict(self, num_bytes: int, spared: str | None = None) -> tuple[int, int, bool]:
        """Drop the least recently used blobs until `num_bytes` are free, `spared` as the last of all.

        Returns:
            Bytes in files that were freed, how many blobs were dropped, and whether `spared` was one.
        """
        freed_bytes = num_blobs = 0
        while freed_bytes < num_bytes:
            oldest = self.rows(OLDEST, 64)
            rows = [row for row in oldest if row[1] != spared]
            for rowid, _, size, filename in rows or oldest:
                if freed_bytes >= num_bytes:
                    break
                self.drop_row(rowid, filename)
                freed_bytes += size
                num_blobs += 1
            if not rows:
                return freed_bytes, num_blobs, bool(oldest)
        return freed_bytes, num_blobs, False

    def drop(self, names: Iterable[str]) -> int:
        rows = [row for row in map(self.find, dict.fromkeys(names)) if row]
        for row in rows:
            self.drop_row(row.rowid, row.filename)
        return len(rows)

    def drop_row(self, rowid: int, filename: str | None) -> None:
        # The file first: after a crash a row without a file is a miss, a file without a row is space lost.
        self.disk.unlink(filename)
        self._sql("DELETE FROM Cache WHERE rowid = ?", (rowid,))
