"""How a blob lies on disk: diskcache's `Disk`, for bytes under text and nothing else."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import diskcache  # type: ignore[import-untyped]
from diskcache.core import MODE_BINARY, MODE_RAW, UNKNOWN  # type: ignore[import-untyped]

from cachecraft_rag.store.tiers.base import DamagedBlobError, TierError

MIN_FILE_BYTES = 4096
"""A value below it lies in the index: a file of its own would take a whole block of the disk, and two more
calls to read. Manifests are the usual case."""

INCOMING = "incoming.val"
"""The one file being written, by whoever holds the write lock. A crash leaves it for the next writer to
write over, so that crashes never add up to more than one file."""

VALUE_FILE = re.compile(r"[0-9a-f]{32}\.val")


class BytesDisk(diskcache.Disk):  # type: ignore[misc]
    """Stores bytes under text. A pickle, or anything else, is refused in both directions."""

    def put(self, key: object) -> tuple[str, bool]:
        if type(key) is not str:
            raise TierError(f"names are text, not {type(key).__name__}")
        return key, True

    def get(self, key: object, raw: bool) -> str:
        if not raw or type(key) is not str:
            raise DamagedBlobError("the index holds a name that is no text")
        return key

    def store(
        self, value: Sequence[memoryview], read: bool, key: object = UNKNOWN
    ) -> tuple[int, int, str | None, bytes | None]:
        """Write a value; the caller must hold the write lock.

        The file is synced before its row exists, so that no crash leaves a row with a torn file, and
        a manifest's row, written later, never comes without the files it speaks of.
        """
        num_bytes = sum(view.nbytes for view in value)
        if num_bytes < self.min_file_size:
            return 0, MODE_RAW, None, b"".join(value)
        incoming, (filename, path) = Path(self._directory, INCOMING), self.filename()
        try:
            _write_synced(incoming, value)
            incoming.rename(path)
        except BaseException:
            with suppress(OSError):
                incoming.unlink()
            raise
        return num_bytes, MODE_BINARY, filename, None

    def fetch(self, mode: int, filename: str | None, value: object, read: bool) -> bytes:
        """A stored value.

        Raises:
            FileNotFoundError: its file is gone.
            DamagedBlobError: the row is not one that `store` makes.
        """
        if mode == MODE_RAW and filename is None and type(value) is bytes:
            return value
        if mode == MODE_BINARY and type(filename) is str and VALUE_FILE.fullmatch(filename):
            return Path(self._directory, filename).read_bytes()
        raise DamagedBlobError(f"the index holds a row of mode {mode!r} that is not plain bytes")

    def filename(self, key: object = UNKNOWN, value: object = UNKNOWN) -> tuple[str, str]:
        """A name never used before, in the folder itself, so that `flush` has one folder to sync."""
        name = f"{uuid.uuid4().hex}.val"
        return name, os.path.join(self._directory, name)

    def remove(self, file_path: str | None) -> None:
        """Remove a file after the commit that let go of it; one that stays is swept at the next opening."""
        with suppress(OSError):
            self.unlink(file_path)

    def unlink(self, filename: str | None) -> None:
        """Remove a row's file if there is one. A name that `store` does not make is left alone."""
        if type(filename) is str and VALUE_FILE.fullmatch(filename):
            Path(self._directory, filename).unlink(missing_ok=True)


def _write_synced(path: Path, value: Sequence[memoryview]) -> None:
    with open(path, "wb", buffering=0) as file:
        for view in value:
            num_written = 0
            # One call may write less than asked: Linux stops at 2 GiB.
            while num_written < view.nbytes:
                num_written += file.write(view[num_written:])
        os.fdatasync(file.fileno())
