"""Blobs in a folder, shared by the processes of one machine."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import diskcache  # type: ignore[import-untyped]
from filelock import FileLock, Timeout

from cachecraft_rag.errors import ConfigurationError
from cachecraft_rag.store.tiers import disk_audit
from cachecraft_rag.store.tiers.base import (
    Blob,
    Counters,
    DamagedBlobError,
    TierError,
    TierStats,
    as_buffers,
)
from cachecraft_rag.store.tiers.disk_folder import FolderLock, prepare, sync
from cachecraft_rag.store.tiers.disk_index import BlobIndex
from cachecraft_rag.store.tiers.disk_room import (
    MIN_BUDGET_BYTES,
    SMALLEST_INDEX_BYTES,
    index_bytes,
    most_index_bytes,
)
from cachecraft_rag.store.tiers.disk_uses import UnsavedUses

NUM_READ_TRIES = 5
WRITE_LOCK_FILE = "write.lock"
POLL_S = 0.002


class _BusyError(TierError):
    """Somebody else writes, and the call was not to wait. No fault of the medium."""


class DiskTier:
    """Least-recently-used blobs in a folder of mode 0700, one file per blob of 4 KiB or more.

    Any number of processes may have the folder open. One of them writes at a time; reads take no lock.
    The budget is for the whole folder with its index. It is never exceeded, because the lock of the
    writers is held while room is made, the file written and replaced ones removed. Room is also kept for
    the index's log, which makes 0.8 MB.

    `flush` and `delete` hold against a crash of the machine, everything else against one of the process.
    A blob found damaged is a miss and counts as an error. An index found damaged, or of another format,
    is moved aside at opening, folder and all, and `check` says so until it repairs.
    """

    def __init__(self, folder: str | os.PathLike[str], budget_bytes: int, *, timeout_s: float = 5.0) -> None:
        """Open the folder, or make it, and put right what a crash left.

        Args:
            folder: `~` and `$NAME` are expanded; a lock file is made beside it.
            budget_bytes: most bytes of values and index together.
            timeout_s: longest wait for the other writers.

        Raises:
            ConfigurationError: the budget is below 1 MiB, or the folder holds files of somebody else.
            TierError: the folder cannot be used.
        """
        if budget_bytes < MIN_BUDGET_BYTES:
            raise ConfigurationError(
                f"budget_bytes is {budget_bytes}; a disk tier's index alone needs {MIN_BUDGET_BYTES}"
            )
        self._budget_bytes = budget_bytes
        self._timeout_s = timeout_s
        # As diskcache does it, or it would use another folder than the one that is prepared here.
        self.folder = Path(os.path.expandvars(os.path.expanduser(folder))).absolute()
        self._counters = Counters()
        self._write_lock = threading.Lock()
        self._uses = UnsavedUses()
        self._closed = False
        self._index: BlobIndex
        self._moved = ""
        with self._medium("open"):
            self._open()
        self._put_right()

    def get(self, name: str) -> bytes | None:
        with self._medium("read"):
            value = self._read(name)
        self._counters.found(value is not None)
        if value is not None:
            self._remember_use(name)
        return value

    def put(self, name: str, value: Blob) -> bool:
        buffers = as_buffers(value)
        num_bytes = sum(view.nbytes for view in buffers)
        with self._turn("write"):
            if num_bytes + most_index_bytes(self.folder, SMALLEST_INDEX_BYTES) > self._budget_bytes:
                return False
            while not self._try_put(name, buffers, num_bytes):
                pass
        return True

    def delete(self, names: Iterable[str]) -> int:
        with self._turn("delete"), self._index.synced(), self._index.writing():
            return self._index.drop(names)

    def discard(self, name: str, seen: bytes) -> bool:
        # Looked at without the lock first: mostly somebody has replaced or removed it.
        with self._medium("read"):
            is_there = self._read(name) == seen
        if is_there:
            with suppress(_BusyError), self._turn("delete", wait=False), self._index.writing():
                return self._read(name) == seen and self._index.drop([name]) > 0
        return False

    def names(self, prefix: str = "") -> Iterator[str]:
        with self._medium("list"):
            return iter(self._index.names(prefix))

    def stats(self) -> TierStats:
        with self._medium("count"):
            num_blobs, value_bytes = self._index.sums()
            num_bytes = value_bytes + index_bytes(self.folder)
        return self._counters.stats(num_blobs=num_blobs, num_bytes=num_bytes, budget_bytes=self._budget_bytes)

    def flush(self) -> None:
        with self._turn("flush"):
            sync(self.folder)
            with self._index.synced(), self._index.writing():
                self._save_uses()
                self._index.write_something()

    def check(self, repair: bool = False) -> list[str]:
        with self._turn("check"):
            faults = [self._moved] if self._moved else []
            faults += [f"the index is damaged: {fault}" for fault in self._index.integrity()]
            with self._index.writing():
                faults += disk_audit.audit(self._index, self.folder, self._budget_bytes, repair)
            if repair:
                self._moved = ""
                self._shrink()
            return faults

    def close(self) -> None:
        if self._closed:
            return
        with suppress(TierError):
            self.flush()
        self._closed = True
        self._index.close()
        self._folder_lock.release()

    def _open(self) -> None:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self._folder_lock = FolderLock(self.folder, self._timeout_s)
        try:
            self._moved = prepare(self.folder, self._folder_lock.is_alone)
            self._index = BlobIndex(self.folder, self._timeout_s, self._budget_bytes)
            self._file_lock = FileLock(self.folder / WRITE_LOCK_FILE, self._timeout_s)
            self._folder_lock.share()
        except BaseException:
            self._folder_lock.release()
            raise

    def _put_right(self) -> None:
        try:
            with self._turn("open"):
                with self._index.writing():
                    disk_audit.audit(self._index, self.folder, self._budget_bytes, repair=True)
                self._shrink()
        except BaseException:
            self._folder_lock.release()
            raise

    def _read(self, name: str) -> bytes | None:
        # A file can vanish between row and file because the blob was replaced: then look again.
        for _ in range(NUM_READ_TRIES):
            row = self._index.find(name)
            if row is None:
                return None
            try:
                return self._index.read(row)
            except FileNotFoundError:
                continue
            except DamagedBlobError as fault:
                self._counters.failed(f"{name}: {fault}")
                return None
        return None

    def _try_put(self, name: str, buffers: list[memoryview], num_bytes: int) -> bool:
        """Make room, and if that was enough, store; else it is when the index has shrunk by the commit."""
        with self._index.writing() as files:
            self._save_uses()
            if self._make_room(num_bytes, name):
                return False
            self._index.put(name, buffers, self._uses.now_s(), files)
            return True

    def _make_room(self, num_bytes: int, spared: str | None = None) -> bool:
        """Evict for `num_bytes` more; whether that leaves the index to shrink before there is room."""
        _, value_bytes = self._index.sums()
        kept_bytes = most_index_bytes(self.folder, self._index.page_bytes())
        lacking_bytes = value_bytes + kept_bytes + num_bytes - self._budget_bytes
        freed_bytes, num_blobs, is_spared_gone = self._index.evict(lacking_bytes, spared)
        self._counters.evicted(num_blobs - is_spared_gone)
        return freed_bytes < lacking_bytes and num_blobs > 0

    def _shrink(self) -> None:
        """Evict what is over the budget, which another process may have left larger."""
        is_over = True
        while is_over:
            with self._index.writing():
                is_over = self._make_room(0)

    def _remember_use(self, name: str) -> None:
        """Uses are written with the next put; a process that only reads writes them now and then."""
        self._uses.note(name)
        if self._uses.is_many:
            with suppress(TierError), self._turn("note uses", wait=False), self._index.writing():
                self._save_uses()

    def _save_uses(self) -> None:
        self._index.touch(self._uses.take().items())

    @contextmanager
    def _turn(self, doing: str, wait: bool = True) -> Iterator[None]:
        """One writer at a time, threads and processes: from the first file made to the last one removed.

        Raises:
            _BusyError: it is somebody else's turn, and that is not waited for.
        """
        if not self._write_lock.acquire(blocking=wait):
            raise _BusyError(f"cannot {doing}: somebody else writes")
        try:
            with self._medium(doing, wait), self._file_lock.acquire(None if wait else 0, POLL_S):
                yield
        finally:
            self._write_lock.release()

    @contextmanager
    def _medium(self, doing: str, is_busy_a_fault: bool = True) -> Iterator[None]:
        if self._closed:
            raise TierError(f"the disk tier of {self.folder} is closed")
        try:
            yield
        except (OSError, sqlite3.Error, diskcache.Timeout) as fault:
            text = str(fault) or "other processes held the write lock all the time"
            message = f"cannot {doing} in {self.folder}: {text}"
            if not is_busy_a_fault and isinstance(fault, Timeout | diskcache.Timeout):
                raise _BusyError(message) from fault
            self._counters.failed(message)
            raise TierError(message) from fault
