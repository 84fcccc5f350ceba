"""The ways of answering that are compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

FULL, PREFIX, PREFIX_SAME = "full", "prefix", "prefix-same"
RUN_BUDGETS = (0.15, 0.30)
"""Budgets at which other granularities than the default are measured: those with an aim."""
_REST = 0.05
"""Of a full prefill, about what an answer costs besides its budget: system prompt, question, loading."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way; without a budget nothing is reused but, for two of them, vLLM's own prefix cache.

    Attributes:
        budget: share of the reused tokens to recompute, in [0, 1].
        granularity: tokens are recomputed in runs of this many.
    """

    name: str
    budget: float | None = None
    strategy: str = ""
    granularity: int = 1

    @classmethod
    def reuse(cls, strategy: str, budget: float, granularity: int) -> Way:
        runs = "" if granularity == 1 else f"/g{granularity}"
        return cls(f"{strategy}@{budget:g}{runs}", budget, strategy, granularity)

    @property
    def options(self) -> dict[str, Any]:
        """The engine's options for a call that is answered this way."""
        if self.budget is None:
            return {"reuse": "off"}
        return {"reuse": self.strategy, "recompute_ratio": self.budget, "granularity": self.granularity}

    @property
    def cost(self) -> float:
        """About how long it takes, full prefill being 1; only for telling how long a run will take."""
        if self.budget is not None:
            return self.budget + _REST
        return _REST if self.name == PREFIX_SAME else 1.0


def make_ways(strategies: Sequence[str], budgets: Sequence[float], granularities: Sequence[int]) -> list[Way]:
    """Full prefill, prefix caching twice, then reuse by strategy and budget.

    The first granularity is measured at all budgets, the others at `RUN_BUDGETS`. Where nothing or all is
    recomputed, strategies and runs do not differ: the first alone is measured.
    """
    ways = [Way(FULL), Way(PREFIX), Way(PREFIX_SAME)]
    for place, strategy in enumerate(strategies):
        for budget in budgets:
            if 0.0 < budget < 1.0:
                ways += (Way.reuse(strategy, budget, runs) for runs in _runs_at(budget, granularities))
            elif place == 0:
                ways.append(Way.reuse(strategy, budget, granularities[0]))
    return list(dict.fromkeys(ways))


def _runs_at(budget: float, granularities: Sequence[int]) -> Iterator[int]:
    yield granularities[0]
    if budget in RUN_BUDGETS:
        yield from granularities[1:]


def warming_way(ways: Sequence[Way]) -> Way | None:
    """The cheapest way with a recompute pass: it warms up what only such a pass uses."""
    with_pass = [way for way in ways if way.budget]
    return min(with_pass, key=lambda way: way.cost, default=None)
