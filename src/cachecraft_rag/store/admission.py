"""Admission: whether a newcomer is worth the records that would have to go for it.

Evicting by recency alone lets a scan of chunks that are asked for once push out the hot ones. As in
TinyLFU (Einziger et al., "TinyLFU: A Highly Efficient Cache Admission Policy", ACM Trans. Storage
2017) a memory of recent requests, for stored and other chunks alike, decides.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Final, Generic, TypeVar

from cachecraft_rag.errors import ConfigurationError

WINDOW: Final = 65_536
"""How many requests for chunks `FrequencyMemory` looks back over; see docs/policies.md."""


def admits(candidate: int, victims: Iterable[int]) -> bool:
    """Whether a newcomer may push out these victims: what was asked for once only its like.

    TinyLFU's own rule, to admit what was asked for more often than its victims, was replayed and loses
    on both traces with the default policy, which weighs what becomes popular better. See
    docs/policies.md.

    Args:
        candidate: how often the newcomer was asked for lately, this time included.
        victims: the same of each victim; none when the cache has room, and everything is admitted.
    """
    return candidate > 1 or all(num_requests <= 1 for num_requests in victims)


K = TypeVar("K", bound=Hashable)


class FrequencyMemory(Generic[K]):
    """How often each key was asked for lately: in the last `window` requests, or at least in half of them.

    Two generations of counts, each of half a window; when the younger is full the older is forgotten
    at once. TinyLFU halves all counts instead, which keeps a request waiting while it goes over them,
    and keeps them in a sketch: here they are exact, as the most there can be is some ten megabytes.

    Raises:
        ConfigurationError: `window` is below 2.
    """

    def __init__(self, window: int = WINDOW) -> None:
        if window < 2:
            raise ConfigurationError(f"window is {window!r}: it must be at least 2 requests")
        self._generation_size = window // 2
        self._num_counted = 0
        self._young: dict[K, int] = {}
        self._old: dict[K, int] = {}

    def __len__(self) -> int:
        """Number of keys remembered, at most `window`."""
        return len(self._young.keys() | self._old.keys())

    def record(self, key: K) -> None:
        """Count one request for `key`."""
        if self._num_counted == self._generation_size:
            self._old, self._young, self._num_counted = self._young, {}, 0
        self._young[key] = self._young.get(key, 0) + 1
        self._num_counted += 1

    def num_requests(self, key: K) -> int:
        return self._young.get(key, 0) + self._old.get(key, 0)

    def forget_all(self, is_meant: Callable[[K], bool]) -> None:
        """Leave no trace of some keys, as a purge must. O(keys)."""
        for counts in (self._young, self._old):
            for key in [key for key in counts if is_meant(key)]:
                del counts[key]
