"""Compare the index of a disk tier with its folder, row by row and file by file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from diskcache.core import MODE_BINARY, MODE_RAW  # type: ignore[import-untyped]

from cachecraft_rag.store.tiers.bytes_disk import INCOMING, VALUE_FILE
from cachecraft_rag.store.tiers.disk_index import BlobIndex
from cachecraft_rag.store.tiers.disk_room import index_bytes

ROWS = "SELECT rowid, key, raw, typeof(key), size, mode, filename, typeof(value) FROM Cache"
SUMS = {
    "count": "SELECT COUNT(*) FROM Cache",
    "size": "SELECT COALESCE(SUM(size), 0) FROM Cache",
}


def audit(index: BlobIndex, folder: Path, budget_bytes: int, repair: bool) -> list[str]:
    """One sentence for each fault; with `repair` damaged rows, ownerless files and wrong sums are put
    right. Called inside a write transaction, so that no file is being written. O(blobs).
    """
    sizes = {entry.name: entry.stat().st_size for entry in os.scandir(folder) if _is_value(entry.name)}
    owned: set[str | None] = set()
    return [
        *_rows(index, sizes, owned, repair),
        *_ownerless(folder, sizes.keys() - owned, repair),
        *_sums(index, repair),
        *_volume(folder, sizes, budget_bytes),
    ]


def _rows(index: BlobIndex, sizes: Mapping[str, int], owned: set[str | None], repair: bool) -> Iterator[str]:
    for rowid, key, *columns, filename, value_type in index.rows(ROWS):
        fault = _row_fault((*columns, filename, value_type), sizes)
        if not fault or not repair:
            owned.add(filename)
        if fault:
            yield f"{key!r} {fault}"
            if repair:
                index.drop_row(rowid, filename)


def _row_fault(row: tuple[Any, ...], sizes: Mapping[str, int]) -> str:
    raw, key_type, size, mode, filename, value_type = row
    if (raw, key_type) != (1, "text"):
        return "is no name"
    if mode == MODE_RAW:
        return "" if (size, filename, value_type) == (0, None, "blob") else "holds no bytes in its row"
    if mode != MODE_BINARY:
        return f"is stored in mode {mode!r}, which is not plain bytes"
    if filename not in sizes:
        return f"has no file ({filename!r})"
    return "" if sizes[filename] == size else f"has a file of {sizes[filename]} bytes instead of {size!r}"


def _ownerless(folder: Path, filenames: set[str], repair: bool) -> Iterator[str]:
    for filename in sorted(filenames):
        yield f"the file {filename} belongs to no blob"
        if repair:
            (folder / filename).unlink(missing_ok=True)


def _sums(index: BlobIndex, repair: bool) -> Iterator[str]:
    for key, statement in SUMS.items():
        ((actual,),) = index.rows(statement)
        noted = [value for (value,) in index.rows("SELECT value FROM Settings WHERE key = ?", key)]
        if noted != [actual]:
            yield f"the {key} of all blobs is {actual}, the books say {noted}"
            if repair:
                index.rows("INSERT OR REPLACE INTO Settings VALUES (?, ?)", key, actual)


def _volume(folder: Path, sizes: Mapping[str, int], budget_bytes: int) -> Iterator[str]:
    num_bytes = sum(sizes.values()) + index_bytes(folder)
    if num_bytes > budget_bytes:
        yield f"the folder holds {num_bytes} bytes, over the budget of {budget_bytes}"


def _is_value(filename: str) -> bool:
    return filename == INCOMING or VALUE_FILE.fullmatch(filename) is not None
