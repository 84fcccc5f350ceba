"""A cache of chunks under a trace: what a policy would have served."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.replay.traces import Access, Request, Trace, cfo

from cachecraft_rag.store.admission import FrequencyMemory, admits
from cachecraft_rag.store.eviction import EvictionQueue
from cachecraft_rag.store.policies import Policy, Score


@dataclass(slots=True)
class Rates:
    """Shares of a trace that were served from the cache: of tokens, of chunks, of prefill work."""

    tokens: float = 0.0
    chunks: float = 0.0
    work: float = 0.0


def rates(hits: Iterable[Access], trace: Trace) -> Rates:
    return Rates(*(hit / total for hit, total in zip(sums(hits), sums(trace.accesses()), strict=True)))


def replay(trace: Trace, policy: Policy, capacity_tokens: int, admission: bool) -> tuple[Rates, int]:
    """Rates of a cache that starts empty, and how many newcomers it did not admit."""
    cache = Cache(policy, capacity_tokens, admission)
    hits = [hit for request in trace.requests for hit in cache.serve(request)]
    return rates(hits, trace), cache.num_rejected


class Cache:
    """One token of KV is one byte here. A request's own chunks are pinned until it is done."""

    def __init__(self, policy: Policy, capacity_tokens: int, admission: bool) -> None:
        self._queue = EvictionQueue(policy)
        self._memory = FrequencyMemory() if admission else None
        self._spare = capacity_tokens
        self._stored: dict[int, Access] = {}
        self.num_rejected = 0

    def serve(self, request: Request) -> list[Access]:
        """Chunks found when the request is planned; the others are stored where there is room."""
        self.expire(request.time_s)
        if self._memory is not None:
            for access in request.accesses:
                self._memory.record(access.chunk)
        hits = [access for access in request.accesses if access.chunk in self._stored]
        pinned = [(access, self._queue.remove(access.chunk)) for access in hits]
        new = [a for a in request.accesses if a.chunk not in self._stored and self._make_room(a)]
        for access, score in pinned:
            self._use(request, access, score)
        for access in new:
            self._use(request, access, None)
        return hits

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._stored

    @property
    def spare_tokens(self) -> int:
        return self._spare

    def expire(self, now_s: float) -> None:
        """Drop what must not be used any more."""
        for chunk in self._queue.pop_expired(now_s):
            self._drop(chunk)

    def victims(self, access: Access) -> list[int]:
        """What would have to go for a newcomer."""
        return self._queue.victims(access.num_tokens - self._spare, self._size_of)

    def put(self, access: Access, now_s: float) -> None:
        """Store a chunk that nobody asks for now, whatever has to go; it must be no larger than the cache."""
        for victim in self.victims(access):
            self._queue.evict(victim)
            self._drop(victim)
        self._spare -= access.num_tokens
        self._stored[access.chunk] = access
        self._use(Request(now_s, ()), access, None)

    def _make_room(self, access: Access) -> bool:
        victims = self._queue.victims(access.num_tokens - self._spare, self._size_of)
        freed = sum(map(self._size_of, victims))
        if self._spare + freed < access.num_tokens:
            return False
        if not self._admits(access.chunk, victims):
            self.num_rejected += 1
            return False
        for victim in victims:
            self._queue.evict(victim)
            self._drop(victim)
        self._spare -= access.num_tokens
        self._stored[access.chunk] = access
        return True

    def _use(self, request: Request, access: Access, score: Score | None) -> None:
        if score is not None:
            self._queue.restore(access.chunk, score)
        share = cfo(self._stored[access.chunk].prefix, access.prefix) if score else 1.0
        self._queue.use(
            access.chunk, now_s=request.time_s, size_bytes=access.num_tokens, cost=access.cost, cfo=share
        )

    def _drop(self, chunk: int) -> None:
        self._spare += self._stored.pop(chunk).num_tokens

    def _size_of(self, chunk: int) -> int:
        return self._stored[chunk].num_tokens

    def _admits(self, chunk: int, victims: Iterable[int]) -> bool:
        if self._memory is None:
            return True
        return admits(self._memory.num_requests(chunk), map(self._memory.num_requests, victims))


def sums(accesses: Iterable[Access]) -> tuple[int, int, float]:
    num_tokens, num_chunks, work = 0, 0, 0.0
    for access in accesses:
        num_tokens += access.num_tokens
        num_chunks += 1
        work += access.cost
    return num_tokens, num_chunks, work
