"""What will be asked for next: guesses from the requests so far."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Protocol

from benchmarks.replay.traces import Request

from cachecraft_rag.engine.demand import DecayedCounts

MAX_COUNTED = 1 << 20


class Predictor(Protocol):
    """Scores are compared with each other only."""

    def see(self, request: Request) -> None: ...
    def candidates(self) -> Iterable[int]: ...
    def score(self, chunk: int, now_s: float) -> float: ...


class Recency:
    """What was asked for last comes first."""

    def __init__(self) -> None:
        self._last_s: dict[int, float] = {}

    def see(self, request: Request) -> None:
        self._last_s.update((access.chunk, request.time_s) for access in request.accesses)

    def candidates(self) -> Iterable[int]:
        return self._last_s

    def score(self, chunk: int, now_s: float) -> float:
        return 1 / (1 + now_s - self._last_s[chunk]) if chunk in self._last_s else 0.0


class Frequency:
    """Requests so far, each weighing half as much after a half-life: what the engine does."""

    def __init__(self, half_life_s: float) -> None:
        self._counts: DecayedCounts[int] = DecayedCounts(half_life_s, MAX_COUNTED)

    def see(self, request: Request) -> None:
        for access in request.accesses:
            self._counts.add(access.chunk, request.time_s)

    def candidates(self) -> Iterable[int]:
        return self._counts

    def score(self, chunk: int, now_s: float) -> float:
        return self._counts.count(chunk, now_s)


class Sequence:
    """First order: how often a chunk was in the request after one that had those of the latest request.

    Args:
        by_conversation: *after* means within the conversation; otherwise whoever asks.
    """

    def __init__(self, by_conversation: bool) -> None:
        self._by_conversation = by_conversation
        self._followers: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._num_followed: Counter[int] = Counter()
        self._latest: dict[int, list[int]] = {}
        self._scores: Counter[int] = Counter()

    def see(self, request: Request) -> None:
        conversation = request.conversation if self._by_conversation else 0
        chunks = [access.chunk for access in request.accesses]
        for before in self._latest.get(conversation, ()):
            self._num_followed[before] += 1
            self._followers[before].update(chunks)
        self._latest[conversation] = chunks
        self._scores = Counter()
        for chunk in chunks:
            for follower, times in self._followers[chunk].items():
                self._scores[follower] += times / (self._num_followed[chunk] + 1)

    def candidates(self) -> Iterable[int]:
        return self._scores

    def score(self, chunk: int, now_s: float) -> float:
        return self._scores[chunk]
