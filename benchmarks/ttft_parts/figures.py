"""From the calls to speed-ups, efficiency and what was aimed at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.common.aims import Verdict
from benchmarks.ttft_parts.record import Measured, Point

from cachecraft_rag import CacheCraftConfig

AIM_CONTEXT = 5000
LEAST_SPEEDUPS = {0.0: 30.0, 0.15: 5.0, 0.30: 3.0}
MOST_EFFICIENCY = 1.10
EFFICIENCY_BUDGETS = (0.15, 0.30)


def speedup(point: Point, measured: Measured) -> float:
    """Full prefill's time to first token over this way's, in the same run."""
    return point.full_s / measured.ttft_s


def efficiency(point: Point, measured: Measured) -> float | None:
    """(TTFT - load) / (budget * TTFT of full prefill): 1 where recomputed tokens cost what they do in full
    prefill and nothing else costs time; the pass of the question is part of the TTFT.

    Medians over the calls. None where nothing is recomputed.
    """
    budget = measured.way.budget
    if not budget:
        return None
    return (measured.ttft_s - measured.median("load_s")) / (budget * point.full_s)


def default_way(point: Point, budget: float) -> Measured | None:
    """Reuse with the default strategy at its own granularity, None if it was not measured."""
    config = CacheCraftConfig()
    wanted = (budget, config.strategy, config.granularity)
    ways = ((measured.way, measured) for measured in point.ways)
    return next((m for way, m in ways if (way.budget, way.strategy, way.granularity) == wanted), None)


def verdicts(points: Sequence[Point]) -> Iterator[Verdict]:
    """Of the default strategy at the context that the aims speak of; nothing where it was not measured."""
    point = aim_point(points)
    if point is None:
        return
    for budget, least in LEAST_SPEEDUPS.items():
        if (measured := default_way(point, budget)) is not None:
            yield Verdict(
                f"times faster than full prefill at {budget:.0%}", least, speedup(point, measured), True
            )
    for budget in EFFICIENCY_BUDGETS:
        measured = default_way(point, budget)
        if measured is not None and (value := efficiency(point, measured)) is not None:
            yield Verdict(f"efficiency at {budget:.0%}", MOST_EFFICIENCY, value, False)


def aim_point(points: Sequence[Point]) -> Point | None:
    return next((point for point in points if point.context == AIM_CONTEXT), None)
