"""Uses of blobs that the index of a disk tier has not heard of yet."""

from __future__ import annotations

import threading
import time

MAX_UNSAVED_USES = 256
"""From here on it is worth a write of their own."""
MAX_KEPT_USES = 4096
"""While the index cannot be written more than these are not kept: the oldest go."""


class UnsavedUses:
    """Thread-safe, bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used_s: dict[str, float] = {}
        self._last_tick_s = 0.0

    @property
    def is_many(self) -> bool:
        return len(self._used_s) >= MAX_UNSAVED_USES

    def note(self, name: str) -> None:
        """The blob is used now."""
        with self._lock:
            self._used_s.pop(name, None)
            self._used_s[name] = self._tick_s()
            if len(self._used_s) > MAX_KEPT_USES:
                del self._used_s[next(iter(self._used_s))]

    def take(self) -> dict[str, float]:
        """When which blobs were used last, since the last call."""
        with self._lock:
            used_s, self._used_s = self._used_s, {}
        return used_s

    def now_s(self) -> float:
        """The wall clock, which processes share, made strictly increasing within this one."""
        with self._lock:
            return self._tick_s()

    def _tick_s(self) -> float:
        self._last_tick_s = max(time.time(), self._last_tick_s + 1e-6)
        return self._last_tick_s
