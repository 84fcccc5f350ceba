"""Requests of the RAGPulse trace, with all their parts, at other arrival times."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from benchmarks.replay.traces import rows_of

SEED = 6
WARM_UP_GAP_S = 3600.0
KINDS = ("sys", "passages", "history", "web", "user")
"""Order of the parts in a prompt: that of the trace's own replay example."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a prompt: equal numbers are equal texts."""

    number: int
    num_tokens: int
    is_chunk: bool = False


@dataclass(frozen=True, slots=True)
class SimRequest:
    time_s: float
    session: int
    parts: tuple[Part, ...]
    num_output_tokens: int

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.parts)


@lru_cache(2)
def ragpulse_requests(folder: Path) -> tuple[SimRequest, ...]:
    """All requests of the trace; a passage named twice in one counts once, as in `replay.traces`."""
    num_tokens = {row["id"]: row["tokens"] for row in rows_of(folder, "trace_ragpulse_lengths")}
    return tuple(
        SimRequest(
            row["t"],
            row["s"],
            tuple(
                Part(number, num_tokens[number], kind == "passages")
                for kind in KINDS
                for number in dict.fromkeys(row[kind])
                if num_tokens[number]
            ),
            max(1, row["out"]),
        )
        for row in rows_of(folder, "trace_ragpulse")
    )


def at_rate(requests: Sequence[SimRequest], requests_per_s: float) -> list[SimRequest]:
    """The same requests in the same order, arrival times compressed to this mean rate.

    The trace's own bursts and nights would decide the tail at any compression; gaps are drawn anew from
    an exponential distribution instead, always the same.
    """
    dice, time_s, found = random.Random(SEED), 0.0, []
    for request in requests:
        time_s += dice.expovariate(requests_per_s)
        found.append(replace(request, time_s=time_s))
    return found


def replayed(
    requests: Sequence[SimRequest], num_warm_up: int, arrivals_s: Sequence[float]
) -> list[SimRequest]:
    """Requests as a replay sent them: the first `num_warm_up` one after another, before it began, the next
    at `arrivals_s`. Warm-up at the trace's own times would leave a queue that no replay begins with."""
    times_s = [*((index - num_warm_up) * WARM_UP_GAP_S for index in range(num_warm_up)), *arrivals_s]
    return [replace(request, time_s=time_s) for request, time_s in zip(requests, times_s, strict=False)]


def shortened(
    requests: Sequence[SimRequest], token_scale: float, max_output_tokens: int
) -> Iterator[SimRequest]:
    """Requests with lengths as a smaller machine replayed them."""
    for request in requests:
        parts = (replace(p, num_tokens=max(1, round(p.num_tokens * token_scale))) for p in request.parts)
        yield replace(
            request,
            parts=tuple(parts),
            num_output_tokens=min(request.num_output_tokens, max_output_tokens),
        )
