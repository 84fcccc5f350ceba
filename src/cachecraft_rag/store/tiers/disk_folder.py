"""The folder of a disk tier: whose it is, which format it has, and whether its index can be trusted."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections import deque
from contextlib import closing, suppress
from pathlib import Path

from diskcache.core import DBNAME, DEFAULT_SETTINGS, METADATA  # type: ignore[import-untyped]

from cachecraft_rag.errors import ConfigurationError
from cachecraft_rag.store.tiers.base import TierError
from cachecraft_rag.store.tiers.disk_index import SETTINGS

FORMAT = "cachecraft-rag blobs 1\n"
FORMAT_FILE = "format"

# Faults of the machine, not of the file: https://www.sqlite.org/rescode.html
_MACHINE_FAULTS = frozenset(
    {
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
    }
)
_COLUMNS = (
    "rowid, key, raw, store_time, expire_time, access_time, access_count, tag, size, mode, filename, value"
)


class FolderLock:
    """A lock beside the folder: shared while a tier has it open, exclusive while one may move it aside.

    SQLite's own locks do not serve: they are on a file inside, which would move along.
    """

    def __init__(self, folder: Path, timeout_s: float) -> None:
        """Take it exclusively if nobody else has it, else shared (`is_alone` says which).

        Raises:
            TierError: another process is still opening the folder after `timeout_s`.
            OSError: the lock file cannot be made.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._fd: int | None = os.open(f"{folder}.lock", flags, 0o600)
        self.is_alone = self._take(fcntl.LOCK_EX)
        deadline_s = time.monotonic() + timeout_s
        while not self.is_alone and not self._take(fcntl.LOCK_SH):
            if time.monotonic() > deadline_s:
                self.release()
                raise TierError(f"another process has been opening {folder} for {timeout_s:g} s")
            time.sleep(0.01)

    def share(self) -> None:
        """Let others in."""
        if self._fd is not None:
            fcntl.flock(self._fd, fcntl.LOCK_SH)

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _take(self, mode: int) -> bool:
        with suppress(BlockingIOError):
            if self._fd is not None:
                fcntl.flock(self._fd, mode | fcntl.LOCK_NB)
                return True
        return False


def sync(folder: Path) -> None:
    """Make the names of the folder's files survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prepare(folder: Path, is_alone: bool) -> str:
    """Make the folder one that this version can open, moving aside what stands in the way.

    Returns:
        What was moved aside, and why, in a sentence; empty if nothing was.

    Raises:
        ConfigurationError: the folder holds files that are not a tier's.
        TierError: it cannot be used, and other processes have it open.
        OSError, sqlite3.Error: the machine does not let us.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        (folder / FORMAT_FILE).write_text(FORMAT)
    why = _why_unusable(folder)
    if why:
        if not is_alone:
            raise TierError(f"{folder} cannot be used ({why}), and other processes have it open")
        aside = _free_name(folder)
        folder.rename(aside)
        prepare(folder, is_alone)
        return f"{folder} was moved to {aside}, and started empty: {why}"
    folder.chmod(0o700)
    return ""


def _why_unusable(folder: Path) -> str:
    try:
        found = (folder / FORMAT_FILE).read_bytes()
    except FileNotFoundError:
        raise ConfigurationError(
            f"{folder} holds files that are not a disk tier's; give an empty folder or a new one"
        ) from None
    if found != FORMAT.encode():
        return f"its format is {found[:40]!r}, this version reads {FORMAT.encode()!r}"
    return _index_fault(folder / DBNAME) if (folder / DBNAME).exists() else ""


def _index_fault(path: Path) -> str:
    """Why the index cannot be trusted; empty when it can.

    It is looked at before diskcache sees it, because diskcache makes attributes, arguments and pragmas
    of whatever the settings' table holds.
    """
    try:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA trusted_schema = 0")
            connection.execute("PRAGMA cell_size_check = 1")
            (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
            # Either is missing when the process that made them was killed in between.
            settings = connection.execute("SELECT * FROM Settings") if "Settings" in tables else ()
            unknown = {key for key, _ in settings} - {*DEFAULT_SETTINGS, *METADATA, *SETTINGS}
            if "Cache" in tables:
                # All rows, as a name that is no text shows only when it is read.
                deque(connection.execute(f"SELECT {_COLUMNS} FROM Cache"), maxlen=0)
    except sqlite3.Error as fault:
        code = getattr(fault, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
        if code & 0xFF in _MACHINE_FAULTS:
            raise
        return f"its index is damaged: {fault}"
    if verdict != "ok":
        return f"its index is damaged: {verdict}"
    return f"its index has unknown settings: {sorted(map(repr, unknown))}" if unknown else ""


def _free_name(folder: Path) -> Path:
    number = 1
    while (aside := folder.with_name(f"{folder.name}.aside-{number}")).exists():
        number += 1
    return aside
