"""What the replay compares policies with, against trying everything on small traces."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import pytest
from benchmarks.replay.optimum import belady, upper_bound
from benchmarks.replay.simulate import Rates, replay
from benchmarks.replay.traces import Access, Request, Trace, cfo
from hypothesis import given, settings
from hypothesis import strategies as st

from cachecraft_rag.store.policies import POLICIES, lru, with_ttl

ROUNDING = 1e-9
CHUNKS = range(4)
requests = st.lists(st.sets(st.sampled_from(CHUNKS), min_size=1, max_size=3), min_size=1, max_size=7)
sizes = st.lists(st.integers(1, 4), min_size=len(CHUNKS), max_size=len(CHUNKS))
capacities = st.integers(1, 8)


def trace_of(requests: Iterable[Iterable[int]], sizes: list[int], period_s: float = 1.0) -> Trace:
    def request(turn: int, chunks: Iterable[int]) -> Request:
        accesses = tuple(Access(chunk, sizes[chunk], 1.5 * sizes[chunk]) for chunk in chunks)
        return Request(turn * period_s, accesses)

    return Trace("small", tuple(request(turn, chunks) for turn, chunks in enumerate(requests)))


def best_tokens(requests: list[set[int]], sizes: list[int], capacity: int) -> float:
    """Token rate of the best of all ways to fill the cache."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for chunks in requests:
        following: dict[frozenset[int], int] = {}
        for held, served in best.items():
            got = served + sum(sizes[chunk] for chunk in chunks & held)
            for kept in _fitting(held | chunks, sizes, capacity):
                following[kept] = max(got, following.get(kept, 0))
        best = following
    return max(best.values()) / sum(sizes[chunk] for chunks in requests for chunk in chunks)


def _fitting(chunks: frozenset[int], sizes: list[int], capacity: int) -> Iterator[frozenset[int]]:
    for count in range(len(chunks) + 1):
        for kept in itertools.combinations(sorted(chunks), count):
            if sum(sizes[chunk] for chunk in kept) <= capacity:
                yield frozenset(kept)


def assert_none_above(bound: Rates, *rates: Rates) -> None:
    for got in rates:
        assert got.tokens <= bound.tokens + ROUNDING
        assert got.chunks <= bound.chunks + ROUNDING
        assert got.work <= bound.work + ROUNDING


@settings(max_examples=60, deadline=None)
@given(requests, st.integers(1, 3), capacities)
def test_beladys_rule_is_optimal_for_equal_sizes(requests: list[set[int]], size: int, capacity: int) -> None:
    """Nothing that was tried serves more, and it serves what the best does."""
    equal = [size] * len(CHUNKS)
    found = belady(trace_of(requests, equal), capacity)
    assert found.tokens == pytest.approx(best_tokens(requests, equal, capacity))


@settings(max_examples=60, deadline=None)
@given(requests, sizes, capacities)
def test_the_best_lies_between_beladys_rule_and_the_bound(
    requests: list[set[int]], sizes: list[int], capacity: int
) -> None:
    """For unequal sizes the one can be reached and the other cannot be passed."""
    trace = trace_of(requests, sizes)
    best = best_tokens(requests, sizes, capacity)
    assert belady(trace, capacity).tokens <= best + ROUNDING
    assert best <= upper_bound(trace, capacity).tokens + ROUNDING


@settings(max_examples=40, deadline=None)
@given(requests, sizes, capacities, st.booleans())
def test_no_policy_passes_the_bound(
    requests: list[set[int]], sizes: list[int], capacity: int, admission: bool
) -> None:
    """A replay that did would have kept more than fits, or have served what was not stored."""
    trace = trace_of(requests, sizes)
    found = [replay(trace, policy, capacity, admission)[0] for policy in POLICIES.values()]
    assert_none_above(upper_bound(trace, capacity), belady(trace, capacity), *found)
    assert max(rates.tokens for rates in found) <= best_tokens(requests, sizes, capacity) + ROUNDING


def test_a_cache_for_everything_serves_every_repeat() -> None:
    """Only the first request for each chunk is computed."""
    trace = trace_of([[0, 1], [1, 2], [0, 2]], [1, 1, 2])
    assert replay(trace, lru, 4, admission=False)[0] == Rates(4 / 8, 3 / 6, 6 / 12)


def test_records_past_their_time_are_not_served() -> None:
    """A chunk asked for every ten seconds is computed every time with a time to live of ten."""
    trace = trace_of([[0]] * 4, [1], period_s=10.0)
    assert replay(trace, with_ttl(lru, 10.0), 1, admission=False)[0].chunks == 0.0
    assert replay(trace, with_ttl(lru, 10.1), 1, admission=False)[0].chunks == 2 / 4


def test_the_stand_in_for_cfo_is_zero_only_behind_the_same_prefix() -> None:
    """Chunks that came or went cost alike, and nothing in common costs the whole CCI."""
    assert cfo((1, 2), (1, 2)) == cfo(None, None) == 0.0
    assert cfo((1, 2), (1,)) == cfo((1,), (1, 2)) == pytest.approx(0.3)
    assert cfo((), (1,)) == cfo((1,), (2,)) == pytest.approx(0.6)
