"""How much each key is asked for, by frequency with exponential decay."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from cachecraft_rag.errors import ConfigurationError
from cachecraft_rag.store.policies import log2_sum

K = TypeVar("K", bound=Hashable)


class DecayedCounts(Generic[K]):
    """Counts that halve every `half_life_s`: `C(t) = sum_i 2^-((t - t_i) / half_life_s)`.

    Kept as `log2 C(t) + t / half_life_s`, which time does not change (see `store.policies.hybrid`), so
    that `add` is O(1) and nothing has to be halved. At most `max_keys` are counted; the one asked for
    longest ago goes first. Dropping the lowest count instead would take a heap for keys that differ
    little: what is not asked for has decayed.

    Raises:
        ConfigurationError: the half-life or the number of keys is not positive.
    """

    def __init__(self, half_life_s: float, max_keys: int) -> None:
        if not 0 < half_life_s < math.inf:
            raise ConfigurationError(f"half_life_s is {half_life_s!r}: it must be positive and finite")
        if max_keys < 1:
            raise ConfigurationError(f"max_keys is {max_keys!r}: it must be at least 1")
        self._half_life_s = half_life_s
        self._max_keys = max_keys
        self._levels: OrderedDict[K, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._levels)

    def __iter__(self) -> Iterator[K]:
        return iter(self._levels)

    def add(self, key: K, now_s: float) -> K | None:
        """Count one request for `key`; the key that had to go for it, if one had to."""
        this = now_s / self._half_life_s
        level = self._levels.get(key)
        self._levels[key] = this if level is None else log2_sum(level, this)
        self._levels.move_to_end(key)
        return self._levels.popitem(last=False)[0] if len(self._levels) > self._max_keys else None

    def discard(self, key: K) -> None:
        self._levels.pop(key, None)

    def count(self, key: K, now_s: float) -> float:
        """Decayed number of requests for `key`; 0 for one that is not counted."""
        level = self._levels.get(key)
        return 0.0 if level is None else 2.0 ** (level - now_s / self._half_life_s)

    def most_wanted(self, at_least: float, now_s: float) -> list[K]:
        """Keys whose count is `at_least` so much, the highest count first. O(n log n)."""
        lowest = math.log2(at_least) + now_s / self._half_life_s
        levels = self._levels
        return sorted((k for k in levels if levels[k] >= lowest), key=levels.__getitem__, reverse=True)
