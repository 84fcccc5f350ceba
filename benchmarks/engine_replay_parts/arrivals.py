"""When requests arrive: an open loop, so that a slow way does not slow its own arrivals."""

from __future__ import annotations

import random
from collections.abc import Sequence

SEED = 6
KINDS = ("poisson", "trace")


def poisson(num_requests: int, requests_per_s: float, seed: int = SEED) -> list[float]:
    """Seconds since the first arrival, ascending; gaps are exponential."""
    dice, time_s, times = random.Random(seed), 0.0, []
    for _ in range(num_requests):
        times.append(time_s)
        time_s += dice.expovariate(requests_per_s)
    return times


def compressed(times_s: Sequence[float], requests_per_s: float) -> list[float]:
    """A trace's own times, started at 0 and compressed to this mean rate.

    Raises:
        ValueError: the times do not span any time.
    """
    first, last = times_s[0], times_s[-1]
    if last <= first:
        raise ValueError(f"{len(times_s)} arrivals within no time cannot be compressed: use poisson")
    factor = (len(times_s) - 1) / requests_per_s / (last - first)
    return [(time_s - first) * factor for time_s in times_s]


def arrivals(kind: str, times_s: Sequence[float], requests_per_s: float) -> list[float]:
    """Arrival times of as many requests as have `times_s`; `kind` is one of `KINDS`."""
    if kind == "trace":
        return compressed(times_s, requests_per_s)
    return poisson(len(times_s), requests_per_s)
