"""The queue that finds the next victim by the scores of a policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from cachecraft_rag.errors import StoreError
from cachecraft_rag.store.policies import Policy, Score, Use


class EvictionQueue:
    """The records that may be evicted, in the order in which they would be.

    A pinned record is taken out with `remove` and comes back with `restore`, its score kept. Of equal
    priorities the lower id goes first. Every call is O(log n) for each record it names.

    Args:
        policy: scores every use.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._scores: dict[int, Score] = {}
        self._by_priority = _IndexedHeap()
        self._by_expiry = _IndexedHeap()
        self._age = 0.0
        self._floor = 0.0

    def __len__(self) -> int:
        return len(self._scores)

    def __contains__(self, record_id: object) -> bool:
        return record_id in self._scores

    def __iter__(self) -> Iterator[int]:
        return iter(self._scores)

    def use(self, record_id: int, *, now_s: float, size_bytes: int, cost: float, cfo: float = 1.0) -> None:
        """Score one use, see `Use`; a record that is not in the queue joins it as just stored.

        Raises:
            StoreError: a value is out of its range.
        """
        age = self._age + 1 / max(1, len(self._scores))
        use = Use(age, now_s, size_bytes, cost, cfo)
        self.restore(record_id, self._policy(self._scores.get(record_id), use, self._floor))
        self._age = age

    def restore(self, record_id: int, score: Score) -> None:
        """Put a record in with the score that `remove` returned."""
        self._scores[record_id] = score
        self._by_priority.put(record_id, score.priority)
        if score.expires_s < math.inf:
            self._by_expiry.put(record_id, score.expires_s)

    def remove(self, record_id: int) -> Score | None:
        """Take a record out for another reason than eviction; None when it is not in the queue."""
        score = self._scores.pop(record_id, None)
        self._by_priority.discard(record_id)
        self._by_expiry.discard(record_id)
        return score

    def evict(self, record_id: int) -> None:
        """Take a victim out and raise the floor to its priority.

        Raises:
            StoreError: it is not in the queue.
        """
        score = self.remove(record_id)
        if score is None:
            raise StoreError(f"record {record_id} cannot be evicted: it is pinned or unknown")
        self._floor = max(self._floor, score.priority)

    def victim(self) -> int | None:
        """The record to evict next, None when the queue is empty."""
        first = self._by_priority.first()
        return first[1] if first else None

    def victims(self, size_bytes: int, size_of: Callable[[int], int]) -> list[int]:
        """The next victims whose sizes add up to at least `size_bytes`, or all; none is taken out."""
        found: list[int] = []
        while size_bytes > 0 and (record_id := self.victim()) is not None:
            self._by_priority.discard(record_id)
            found.append(record_id)
            size_bytes -= size_of(record_id)
        for record_id in found:
            self._by_priority.put(record_id, self._scores[record_id].priority)
        return found

    def pop_expired(self, now_s: float) -> list[int]:
        """Take out the records that must not be used any more; the longest expired come first."""
        ids = []
        while (first := self._by_expiry.first()) is not None and first[0] <= now_s:
            ids.append(first[1])
            self.remove(first[1])
        return ids


class _IndexedHeap:
    """Record ids by key, a binary heap that knows where each id stands, so any of them can move.

    `heapq` with dead items left in place was tried: sweeping them took a tenth of a second at 100,000
    records, in the middle of a request.
    """

    def __init__(self) -> None:
        self._items: list[tuple[float, int]] = []
        self._places: dict[int, int] = {}

    def first(self) -> tuple[float, int] | None:
        """Key and id of the lowest key, of equal keys the one with the lowest id."""
        return self._items[0] if self._items else None

    def put(self, record_id: int, key: float) -> None:
        """Insert an id, or give it another key."""
        item = (key, record_id)
        place = self._places.get(record_id)
        if place is None:
            place = len(self._items)
            self._items.append(item)
        self._settle(item, place)

    def discard(self, record_id: int) -> None:
        place = self._places.pop(record_id, None)
        if place is None:
            return
        last = self._items.pop()
        if place < len(self._items):
            self._settle(last, place)

    def _settle(self, item: tuple[float, int], place: int) -> None:
        """Fill the hole at `place` with `item`, moving the hole to where the item belongs."""
        while place and item < self._items[parent := (place - 1) // 2]:
            self._fill(place, self._items[parent])
            place = parent
        while (child := self._lower_child(place)) is not None and self._items[child] < item:
            self._fill(place, self._items[child])
            place = child
        self._fill(place, item)

    def _lower_child(self, place: int) -> int | None:
        left, right = 2 * place + 1, 2 * place + 2
        if right < len(self._items) and self._items[right] < self._items[left]:
            return right
        return left if left < len(self._items) else None

    def _fill(self, place: int, item: tuple[float, int]) -> None:
        self._items[place] = item
        self._places[item[1]] = place
