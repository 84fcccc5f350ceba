"""Caches of KV by tokens, the one least recently used going first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from benchmarks.cluster_sim.workload import Part


@dataclass(slots=True)
class TokenCache:
    capacity_tokens: int
    num_tokens: int = 0
    _sizes: OrderedDict[int, int] = field(default_factory=OrderedDict)

    def use(self, key: int) -> bool:
        """Whether `key` is there; if so it counts as used."""
        if key not in self._sizes:
            return False
        self._sizes.move_to_end(key)
        return True

    def put(self, key: int, num_tokens: int) -> None:
        if not self.use(key):
            self._sizes[key] = num_tokens
            self.num_tokens += num_tokens
        self.fit(self.capacity_tokens)

    def fit(self, capacity_tokens: int) -> None:
        """Evict down to `capacity_tokens`."""
        while self.num_tokens > capacity_tokens and self._sizes:
            self.num_tokens -= self._sizes.popitem(last=False)[1]


@dataclass(slots=True)
class PrefixCache:
    """vLLM's prefix cache, by whole parts: a part is named by all that stands before it.

    Blocks of 16 tokens were left out: an engine matches a little more than whole parts where two begin
    alike, and a little less at their ends.
    """

    cache: TokenCache

    def num_hit(self, parts: Iterable[Part]) -> int:
        """How many of the first parts are there. All are used, the first one last: it stays longest."""
        hit = []
        for key in _names(parts):
            if not self.cache.use(key):
                break
            hit.append(key)
        for key in reversed(hit):
            self.cache.use(key)
        return len(hit)

    def put(self, parts: tuple[Part, ...]) -> None:
        for key, part in reversed(list(zip(_names(parts), parts, strict=True))):
            self.cache.put(key, part.num_tokens)


def _names(parts: Iterable[Part]) -> Iterator[int]:
    name = 0
    for part in parts:
        name = hash((name, part.number))
        yield name
