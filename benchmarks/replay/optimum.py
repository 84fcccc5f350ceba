"""What a cache that knows the future would have served: one way to do it, and a bound for all ways.

With chunks of different sizes the best way is NP-hard to find; the truth lies between the two.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.replay.simulate import Rates, rates, sums
from benchmarks.replay.traces import Access, Trace


def belady(trace: Trace, capacity_tokens: int) -> Rates:
    """Belady's rule: whatever is asked for again last goes first, the newcomer itself included.

    Optimal for tokens and chunks where all sizes are equal, a heuristic otherwise.
    """
    return rates(_farthest_next_use(trace, capacity_tokens), trace)


def upper_bound(trace: Trace, capacity_tokens: int) -> Rates:
    """No policy can serve more, each of the three shares taken by itself.

    PFOO-L (Berger et al., "Practical Bounds on Optimal Caching with Variable Object Sizes", POMACS
    2018): keeping a chunk until its next request costs its tokens times the requests in between;
    those intervals that bring most per cost are taken until the capacity over the whole trace is used
    up, in whatever order it falls due.
    """
    intervals = _intervals(trace)
    budget = float(capacity_tokens * (len(trace.requests) - 1))
    best = [
        _knapsack(intervals, budget, value)
        for value in (lambda a: float(a.num_tokens), lambda a: 1.0, lambda a: a.cost)
    ]
    return Rates(*(got / total for got, total in zip(best, sums(trace.accesses()), strict=True)))


@dataclass(frozen=True, slots=True)
class _Interval:
    """From one request for a chunk to the next, which is `access`, `num_requests` later."""

    access: Access
    num_requests: int

    @property
    def volume(self) -> int:
        return self.access.num_tokens * self.num_requests


def _farthest_next_use(trace: Trace, capacity_tokens: int) -> Iterator[Access]:
    next_uses = _next_uses(trace)
    resident: dict[int, tuple[int, int]] = {}  # chunk -> (next use, tokens)
    farthest: list[tuple[int, int]] = []
    used = 0
    for request, nexts in zip(trace.requests, next_uses, strict=True):
        for access, next_use in zip(request.accesses, nexts, strict=True):
            if access.chunk in resident:
                yield access
                used -= resident.pop(access.chunk)[1]
            if next_use is not None:
                resident[access.chunk] = (next_use, access.num_tokens)
                heapq.heappush(farthest, (-next_use, access.chunk))
                used += access.num_tokens
        while used > capacity_tokens:
            negated, chunk = heapq.heappop(farthest)
            if chunk in resident and resident[chunk][0] == -negated:
                used -= resident.pop(chunk)[1]


def _next_uses(trace: Trace) -> list[list[int | None]]:
    """For every access the index of the next request for the same chunk."""
    upcoming: dict[int, int] = {}
    found = []
    for index in range(len(trace.requests) - 1, -1, -1):
        accesses = trace.requests[index].accesses
        found.append([upcoming.get(access.chunk) for access in accesses])
        upcoming.update((access.chunk, index) for access in accesses)
    return found[::-1]


def _intervals(trace: Trace) -> list[_Interval]:
    last: dict[int, int] = {}
    found = []
    for index, request in enumerate(trace.requests):
        for access in request.accesses:
            if access.chunk in last:
                found.append(_Interval(access, index - last[access.chunk]))
            last[access.chunk] = index
    return found


def _knapsack(intervals: list[_Interval], budget: float, value: Callable[[Access], float]) -> float:
    """Fractional: the last interval is taken in part, which keeps it an upper bound."""
    total = 0.0
    for interval in sorted(intervals, key=lambda i: i.volume / value(i.access)):
        share = min(1.0, budget / interval.volume)
        if share <= 0:
            break
        total += share * value(interval.access)
        budget -= share * interval.volume
    return total
