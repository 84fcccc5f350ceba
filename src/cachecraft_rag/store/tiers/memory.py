"""Blobs in a dictionary of this process: the reference of the contract."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from cachecraft_rag.store.tiers.base import (
    Blob,
    Counters,
    TierError,
    TierStats,
    as_bytes,
    checked_budget,
    prefix_end,
)

ENTRY_BYTES = 192
"""What an entry takes beside its value and the characters of its name: the heads of two objects, a place in
the dictionary (measured in CPython 3.11: 156 to 176 bytes) and one in the list of names (8 or 9)."""


class MemoryTier:
    """Least-recently-used blobs in memory. Nothing survives the process, so `flush` has nothing to do."""

    def __init__(self, budget_bytes: int) -> None:
        """
        Args:
            budget_bytes: most bytes of values, names and entries together.

        Raises:
            ConfigurationError: the budget is below zero.
        """
        self._budget_bytes = checked_budget(budget_bytes)
        self._lock = threading.Lock()
        self._blobs: OrderedDict[str, bytes] = OrderedDict()
        # A plain list: moving its end for a put costs microseconds, and no library has to be there.
        self._sorted: list[str] = []
        self._used_bytes = 0
        self._counters = Counters()
        self._closed = False

    def get(self, name: str) -> bytes | None:
        with self._lock:
            self._refuse_if_closed()
            value = self._blobs.get(name)
            if value is not None:
                self._blobs.move_to_end(name)
        self._counters.found(value is not None)
        return value

    def put(self, name: str, value: Blob) -> bool:
        held = as_bytes(value)
        size_bytes = _charge(name, held)
        with self._lock:
            self._refuse_if_closed()
            if size_bytes > self._budget_bytes:
                return False
            self._drop(name)
            self._make_room(size_bytes)
            self._blobs[name] = held
            insort(self._sorted, name)
            self._used_bytes += size_bytes
        return True

    def delete(self, names: Iterable[str]) -> int:
        with self._lock:
            self._refuse_if_closed()
            return sum(self._drop(name) for name in names)

    def discard(self, name: str, seen: bytes) -> bool:
        with self._lock:
            self._refuse_if_closed()
            return self._blobs.get(name) == seen and self._drop(name)

    def names(self, prefix: str = "") -> Iterator[str]:
        end = prefix_end(prefix)
        with self._lock:
            self._refuse_if_closed()
            start = bisect_left(self._sorted, prefix)
            stop = len(self._sorted) if end is None else bisect_left(self._sorted, end, start)
            return iter(self._sorted[start:stop])

    def stats(self) -> TierStats:
        with self._lock:
            num_blobs, num_bytes = len(self._blobs), self._used_bytes
        return self._counters.stats(num_blobs=num_blobs, num_bytes=num_bytes, budget_bytes=self._budget_bytes)

    def flush(self) -> None:
        with self._lock:
            self._refuse_if_closed()

    def check(self, repair: bool = False) -> list[str]:
        with self._lock:
            self._refuse_if_closed()
            used_bytes = sum(_charge(name, value) for name, value in self._blobs.items())
            faults = []
            if used_bytes != self._used_bytes:
                faults.append(f"blobs take {used_bytes} bytes, the books say {self._used_bytes}")
            if used_bytes > self._budget_bytes:
                faults.append(f"blobs take {used_bytes} bytes, over the budget of {self._budget_bytes}")
            if self._sorted != sorted(self._blobs):
                faults.append("the list of names is not that of the blobs")
            if repair:
                self._sorted = sorted(self._blobs)
                self._used_bytes = used_bytes
                self._make_room(0)
            return faults

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._blobs.clear()
            self._sorted.clear()
            self._used_bytes = 0

    def _make_room(self, size_bytes: int) -> None:
        num_evicted = 0
        while self._used_bytes + size_bytes > self._budget_bytes:
            self._drop(next(iter(self._blobs)))
            num_evicted += 1
        self._counters.evicted(num_evicted)

    def _drop(self, name: str) -> bool:
        value = self._blobs.pop(name, None)
        if value is None:
            return False
        del self._sorted[bisect_left(self._sorted, name)]
        self._used_bytes -= _charge(name, value)
        return True

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise TierError("the memory tier is closed")


def _charge(name: str, value: bytes) -> int:
    return len(value) + len(name) + ENTRY_BYTES
