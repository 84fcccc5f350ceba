"""How often passages are asked for: Zipf's law, fitted to a trace and drawn from."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from itertools import accumulate

_GOLDEN = (math.sqrt(5) - 1) / 2
_LARGEST_EXPONENT = 4.0
_PRECISION = 1e-4


def zipf_weights(num_items: int, exponent: float) -> list[float]:
    """Probabilities of the ranks 1..num_items, p(r) ~ r^-exponent."""
    raw = [rank**-exponent for rank in range(1, num_items + 1)]
    total = sum(raw)
    return [weight / total for weight in raw]


def fit_exponent(counts: Iterable[int]) -> float:
    """Maximum-likelihood exponent of Zipf's law over as many ranks as there are counts.

    Ranks are those of the counts themselves. A straight line through log count against log rank was
    rejected: the many passages named once would decide it.
    """
    ranked = sorted(counts, reverse=True)
    logs = [math.log(rank) for rank in range(1, len(ranked) + 1)]
    total = sum(ranked)
    weighted = sum(count * log for count, log in zip(ranked, logs, strict=True))

    def loss(exponent: float) -> float:
        return exponent * weighted + total * math.log(sum(math.exp(-exponent * log) for log in logs))

    low, high = 0.0, _LARGEST_EXPONENT  # the loss is convex: golden-section search
    while high - low > _PRECISION:
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        low, high = (low, right) if loss(left) < loss(right) else (left, high)
    return (low + high) / 2


def draw_distinct(weights: Sequence[float], num_drawn: int, dice: random.Random) -> list[int]:
    """Indices drawn one after the other by their weights, none twice.

    Popular ones tend to stand first. That favours prefix caching, as do requests of the trace.
    """
    if num_drawn > len(weights):
        raise ValueError(f"{num_drawn} of {len(weights)} cannot be drawn without repetition")
    cumulative = list(accumulate(weights))
    drawn: dict[int, None] = {}
    while len(drawn) < num_drawn:
        drawn.update(dict.fromkeys(dice.choices(range(len(weights)), cum_weights=cumulative)))
    return list(drawn)
