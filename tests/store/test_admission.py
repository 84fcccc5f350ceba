"""Admission: what was asked for once does not push out what is asked for again and again."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.errors import ConfigurationError
from cachecraft_rag.store.admission import FrequencyMemory, admits
from cachecraft_rag.store.eviction import EvictionQueue
from cachecraft_rag.store.policies import lru

CAPACITY = 4
HOT = range(CAPACITY)
SCAN = range(100, 150)


class SmallCache:
    """Least recently used, `CAPACITY` records of one byte, with or without admission."""

    def __init__(self, memory: FrequencyMemory | None) -> None:
        self.memory = memory
        self.queue = EvictionQueue(lru)

    def request(self, keys: Iterable[int]) -> None:
        for key in keys:
            if self.memory is not None:
                self.memory.record(key)
            if key in self.queue or self._make_room(key):
                self.queue.use(key, now_s=0.0, size_bytes=1, cost=1.0)

    def _make_room(self, key: int) -> bool:
        victims = self.queue.victims(len(self.queue) + 1 - CAPACITY, lambda record_id: 1)
        if self.memory is not None and not admits(
            self.memory.num_requests(key), map(self.memory.num_requests, victims)
        ):
            return False
        for victim in victims:
            self.queue.evict(victim)
        return True


def assert_holds(cache: SmallCache, keys: Iterable[int]) -> None:
    assert all(key in cache.queue for key in keys)


def memory_after(window: int, keys: Iterable[str]) -> FrequencyMemory:
    memory = FrequencyMemory(window)
    for key in keys:
        memory.record(key)
    return memory


def test_a_hot_set_outlives_a_scan() -> None:
    """Without admission the same scan leaves nothing of it."""
    guarded, plain = SmallCache(FrequencyMemory()), SmallCache(None)
    for cache in (guarded, plain):
        cache.request([*HOT, *HOT, *SCAN])
    assert_holds(guarded, HOT)
    assert_holds(plain, SCAN[-CAPACITY:])


def test_what_is_asked_for_again_gets_in() -> None:
    """The second request is what tells it from a scan."""
    cache = SmallCache(FrequencyMemory())
    cache.request([*HOT, *HOT, 100, 100])
    assert_holds(cache, [100])


def test_a_hot_set_that_is_no_longer_asked_for_gives_way() -> None:
    """Old counts fade by the requests that come in, so the cache never locks up."""
    cache = SmallCache(FrequencyMemory(window=40))
    cache.request([*HOT, *HOT, *range(1000, 1200)])
    assert not any(key in cache.queue for key in HOT)


@pytest.mark.parametrize("candidate", [0, 1, 7])
def test_a_cache_that_is_not_full_admits_everything(candidate: int) -> None:
    """Without victims there is nothing to protect."""
    assert admits(candidate, [])


@pytest.mark.parametrize(
    ("victims", "admitted"), [([1], True), ([0, 1], True), ([2], False), ([1, 9], False)]
)
def test_a_first_request_displaces_only_its_like(victims: list[int], admitted: bool) -> None:
    """One hot record among the victims is enough to refuse it, and none to refuse a second request."""
    assert admits(1, victims) is admitted
    assert admits(2, victims)


def test_the_older_half_of_the_window_is_forgotten_at_once() -> None:
    """What was asked for half a window ago counts in full, what is older than a window not at all."""
    memory = memory_after(8, "aaabbcc")
    assert [memory.num_requests(key) for key in "abc"] == [3, 2, 2]
    memory.record("d")
    assert [memory.num_requests(key) for key in "abcd"] == [3, 2, 2, 1]
    memory.record("d")
    assert [memory.num_requests(key) for key in "abcd"] == [0, 1, 2, 2]


def test_a_forgotten_key_leaves_no_trace() -> None:
    """Neither half of the window remembers it, and unknown keys are no error."""
    memory = memory_after(8, "aaabab")
    memory.forget_all(lambda key: key in ("a", "never seen"))
    assert memory.num_requests("a") == 0
    assert memory.num_requests("b") == 2
    assert len(memory) == 1


@given(st.integers(2, 20), st.lists(st.integers(0, 50), max_size=200))
def test_the_memory_is_bounded_by_its_window(window: int, keys: list[int]) -> None:
    """Whatever is asked for, no more keys than its length are remembered."""
    memory = FrequencyMemory(window)
    for key in keys:
        memory.record(key)
        assert len(memory) <= window


def test_a_window_without_memory_is_refused() -> None:
    """One request would be forgotten as soon as it is counted."""
    with pytest.raises(ConfigurationError, match="window is 1"):
        FrequencyMemory(1)
