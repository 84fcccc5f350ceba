"""A cache under a trace that is warmed between requests: what that serves, and what it costs."""

from __future__ import annotations

import enum
import heapq
from dataclasses import dataclass

from benchmarks.replay.predictors import Predictor
from benchmarks.replay.simulate import Cache
from benchmarks.replay.traces import Access, Request, Trace

from cachecraft_rag.engine.idle import IDLE_BEFORE_WORK_S

MAX_CANDIDATES = 64
"""Most chunks warmed between two requests."""


class Rule(enum.StrEnum):
    """When a chunk may be warmed."""

    ANY = "whatever goes"
    BETTER = "for less wanted"
    """Only where all that goes for it together has a lower score."""
    ROOM = "into room"
    """Only where nothing has to go."""


@dataclass(slots=True)
class Warmth:
    """Attributes:
    served: share of the tokens asked for that was in the cache.
    num_warmed_tokens: tokens computed between requests.
    num_wasted_tokens: of these, those of chunks that were gone, or the trace over, before they were used.
    """

    served: float
    num_warmed_tokens: int
    num_wasted_tokens: int


class Warming:
    """Warms `cache` with what `predictor` says. What a request computes takes its time from the gap after
    it; of the rest each second computes `tokens_per_s`."""

    def __init__(
        self, cache: Cache, capacity_tokens: int, predictor: Predictor | None, rule: Rule, tokens_per_s: float
    ) -> None:
        self._cache = cache
        self._capacity_tokens = capacity_tokens
        self._predictor = predictor
        self._rule = rule
        self._tokens_per_s = tokens_per_s
        self._last_access: dict[int, Access] = {}
        self._unused: dict[int, int] = {}
        self._smallest = 0
        self._num_warmed = 0
        self._num_used = 0

    def run(self, trace: Trace) -> Warmth:
        self._smallest = min(access.num_tokens for access in trace.accesses())
        num_asked, num_served = 0, 0
        following = (*(request.time_s for request in trace.requests[1:]), None)
        for request, next_s in zip(trace.requests, following, strict=True):
            asked = sum(access.num_tokens for access in request.accesses)
            served = self._serve(request)
            num_asked, num_served = num_asked + asked, num_served + served
            if self._predictor is not None and next_s is not None:
                self._predictor.see(request)
                idle_s = next_s - request.time_s - IDLE_BEFORE_WORK_S - (asked - served) / self._tokens_per_s
                self._warm(self._predictor, next_s, int(idle_s * self._tokens_per_s))
        return Warmth(num_served / num_asked, self._num_warmed, self._num_warmed - self._num_used)

    def _serve(self, request: Request) -> int:
        hits = self._cache.serve(request)
        self._num_used += sum(self._unused.pop(hit.chunk, 0) for hit in hits)
        # What is asked for and missing was evicted before it was used.
        for access in request.accesses:
            self._last_access[access.chunk] = access
            self._unused.pop(access.chunk, None)
        return sum(hit.num_tokens for hit in hits)

    def _warm(self, predictor: Predictor, now_s: float, budget_tokens: int) -> None:
        if budget_tokens <= 0:
            return
        self._cache.expire(now_s)
        if self._rule is Rule.ROOM and self._cache.spare_tokens < self._smallest:
            return
        missing = [chunk for chunk in predictor.candidates() if chunk not in self._cache]
        for chunk in heapq.nlargest(MAX_CANDIDATES, missing, key=lambda chunk: predictor.score(chunk, now_s)):
            access = self._last_access[chunk]
            if access.num_tokens > budget_tokens:
                return
            if self._may_come(predictor, access, now_s):
                self._cache.put(access, now_s)
                budget_tokens -= access.num_tokens
                self._num_warmed += access.num_tokens
                self._unused[chunk] = access.num_tokens

    def _may_come(self, predictor: Predictor, access: Access, now_s: float) -> bool:
        if access.num_tokens > self._capacity_tokens:
            return False
        if self._rule is not Rule.BETTER:
            return self._rule is Rule.ANY or access.num_tokens <= self._cache.spare_tokens
        leaving = sum(predictor.score(victim, now_s) for victim in self._cache.victims(access))
        return predictor.score(access.chunk, now_s) > leaving
