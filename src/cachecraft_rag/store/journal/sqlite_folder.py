"""The folder of a SQLite journal: which file counts, and the connections to it."""

from __future__ import annotations

import logging
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from cachecraft_rag.store.journal.base import JournalError
from cachecraft_rag.store.journal.sqlite_file import (
    Rows,
    State,
    fault_of,
    file_numbers,
    is_damage,
    path_of,
    remove,
)

logger = logging.getLogger(__name__)


class SqliteFolder:
    """Transactions on the current file, each on a connection of its own, for any number of threads.

    Args:
        timeout_s: longest wait for another process's write.
        grace_until_s: says until when members of a file begun now in place of another may have leases.

    Every transaction raises `JournalError` when the file or the machine fails, and is then undone. A file
    in which damage was met is looked through at the next, and given up for a new one if it is not sound.
    """

    def __init__(self, folder: Path, timeout_s: float, grace_until_s: Callable[[], float]) -> None:
        self._folder = folder
        self._timeout_s = timeout_s
        self._grace_until_s = grace_until_s
        self._lock = threading.Lock()
        self._number = 0
        self._idle: list[Rows] = []
        self._is_suspect = False
        self._closed = False
        self.was_reset = False

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._drop_idle()

    @contextmanager
    def reading(self) -> Iterator[Rows]:
        with self.connection() as rows:
            rows.begin_read()
            yield rows
            rows.commit()

    @contextmanager
    def writing(self, *, durable: bool) -> Iterator[Rows]:
        with self.connection() as rows:
            rows.begin_write(durable=durable)
            yield rows
            rows.commit()

    @contextmanager
    def connection(self) -> Iterator[Rows]:
        """A connection of this call's own; closed, and its transaction undone, when anything fails."""
        rows: Rows | None = None
        try:
            rows = self._take()
            yield rows
        except BaseException as fault:
            if rows is not None:
                rows.close()
            self._is_suspect = self._is_suspect or is_damage(fault)
            if isinstance(fault, (sqlite3.Error, OSError)):
                raise JournalError(f"the journal in {self._folder} failed: {fault}") from fault
            raise
        self._give_back(rows)

    def _take(self) -> Rows:
        with self._lock:
            if self._closed:
                raise JournalError("the journal is closed")
            if self._is_suspect or not self._is_current_file():
                self._open()
            return self._idle.pop() if self._idle else Rows(self._path, self._timeout_s)

    def _give_back(self, rows: Rows) -> None:
        with self._lock:
            if self._closed or rows.path != self._path:
                rows.close()
            else:
                self._idle.append(rows)

    def _drop_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()

    @property
    def _path(self) -> Path:
        return path_of(self._folder, self._number)

    def _is_current_file(self) -> bool:
        return self._path.exists() and not path_of(self._folder, self._number + 1).exists()

    def _open(self) -> None:
        """Find the file that counts, or begin one; other processes wait meanwhile."""
        self._drop_idle()
        is_first = not self._number
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.chmod(0o700)
        with FileLock(self._folder / "lock", timeout=self._timeout_s, mode=0o600):
            numbers = file_numbers(self._folder)
            number = max([self._number, *numbers])
            fault = (
                fault_of(path_of(self._folder, number), self._timeout_s) if number in numbers else "missing"
            )
            if fault:
                self._begin(number + 1, is_new=is_first and not numbers, fault=fault)
                number += 1
        self._number = number
        self._is_suspect = False

    def _begin(self, number: int, *, is_new: bool, fault: str) -> None:
        """Begin a file; `is_new`: there never was one, so there are no members to wait for."""
        if not is_new:
            self.was_reset = True
            logger.warning("The journal in %s begins anew: %s is %s", self._folder, number - 1, fault)
        grace_until_s = 0.0 if is_new else self._grace_until_s()
        rows = Rows(path_of(self._folder, number), self._timeout_s, create=True)
        try:
            rows.create(State(uuid.uuid4().hex, grace_until_s))
        finally:
            rows.close()
        # The damaged file is kept for a look at it; those before it are not.
        for older in file_numbers(self._folder):
            if older < number - 1:
                remove(path_of(self._folder, older))
