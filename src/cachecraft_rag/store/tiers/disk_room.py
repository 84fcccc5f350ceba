"""How many bytes the index of a disk tier takes, and how many it may take until somebody looks again."""

from __future__ import annotations

from pathlib import Path

from diskcache.core import DBNAME  # type: ignore[import-untyped]

from cachecraft_rag.store.tiers.disk_folder import FORMAT_FILE
from cachecraft_rag.store.tiers.disk_index import PAGE_BYTES, WAL_PAGES

MIN_BUDGET_BYTES = 2**20
SMALLEST_INDEX_BYTES = 16 * PAGE_BYTES
"""More than an index of no blobs takes (8 pages)."""

LOG = f"{DBNAME}-wal"
INDEX_FILES = (DBNAME, LOG, f"{DBNAME}-shm", FORMAT_FILE)
NEW_PAGES = 16
FRAME_BYTES = PAGE_BYTES + 24
SHARED_MEMORY_BYTES = 32 * 1024
"""Size of SQLite's file of locks beside a log of up to 4062 pages."""


def index_bytes(folder: Path) -> int:
    """Size of all files that hold no blob."""
    return sum(_size(folder / name) for name in INDEX_FILES)


def most_index_bytes(folder: Path, page_bytes: int) -> int:
    """Most the index takes until room is made the next time, if its pages take `page_bytes` now.

    That is its pages and some new ones, its log up to a checkpoint, and what one transaction adds to
    the log, which is each page once. A log that readers have kept from being reused counts as it is.
    """
    page_bytes += NEW_PAGES * PAGE_BYTES
    log_bytes = max(_size(folder / LOG), WAL_PAGES * FRAME_BYTES + page_bytes)
    return page_bytes + log_bytes + SHARED_MEMORY_BYTES


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
