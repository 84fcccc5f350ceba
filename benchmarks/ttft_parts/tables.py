"""The tables, as rows of text: for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.common.aims import verdict_table
from benchmarks.common.text_table import NOTHING, TextTable
from benchmarks.ttft_parts.figures import AIM_CONTEXT, aim_point, default_way, efficiency, speedup, verdicts
from benchmarks.ttft_parts.record import Measured, Point
from benchmarks.ttft_parts.ways import PREFIX, PREFIX_SAME

from cachecraft_rag import CacheCraftConfig


def page_tables(points: Sequence[Point]) -> Iterator[TextTable]:
    """In detail the context that the aims speak of, or else the longest, and what is told of all."""
    yield detail_table(aim_point(points) or points[-1])
    yield from summary_tables(points)


def summary_tables(points: Sequence[Point]) -> Iterator[TextTable]:
    """Over all contexts; aims where the context was measured that they speak of."""
    yield overview_table(points)
    yield efficiency_table(points)
    if list(verdicts(points)):
        yield aims_table(points)


def aims_table(points: Sequence[Point]) -> TextTable:
    config = CacheCraftConfig()
    what = f"`{config.strategy}`, runs of {config.granularity}"
    return verdict_table(f"Aims at {AIM_CONTEXT:,} tokens of context, {what}", verdicts(points))


def overview_table(points: Sequence[Point]) -> TextTable:
    """Time to first token by context, and how many times faster than full prefill."""
    budgets = _budgets(points)
    rows = [
        [
            f"{point.context:,}",
            f"{_num_prompt(point):,}",
            f"{point.full_s:.2f} s",
            *(_time(point, point.of(name)) for name in (PREFIX, PREFIX_SAME)),
            *(_time(point, default_way(point, budget)) for budget in budgets),
        ]
        for point in points
    ]
    columns = ("context", "prompt", "full prefill", "prefix caching", "same order", *map(_percent, budgets))
    return TextTable("Time to first token, default strategy by budget", columns, rows)


def efficiency_table(points: Sequence[Point]) -> TextTable:
    budgets = [budget for budget in _budgets(points) if budget > 0]
    rows = [
        [f"{point.context:,}", *(_efficiency(point, default_way(point, budget)) for budget in budgets)]
        for point in points
    ]
    return TextTable("Efficiency, default strategy by budget", ("context", *map(_percent, budgets)), rows)


def detail_table(point: Point) -> TextTable:
    """Every way at one context; medians over the calls."""
    columns = (
        "way",
        "TTFT",
        "least",
        "×",
        "efficiency",
        "load",
        "question",
        "pass",
        "from prefix cache",
        "reused",
        "recomputed",
        "computed",
        "question twice",
    )
    title = f"{point.context:,} tokens of context, {len(point.ways[0].samples)} calls of each way"
    return TextTable(title, columns, [_detail_row(point, measured) for measured in point.ways])


def _detail_row(point: Point, measured: Measured) -> list[str]:
    seconds = ("load_s", "select_s", "recompute_s")
    counts = ("num_prefix", "num_reused", "num_recomputed", "num_computed", "num_probe")
    return [
        f"`{measured.way.name}`",
        f"{measured.ttft_s:.3f} s",
        f"{min(sample.ttft_s for sample in measured.samples):.3f} s",
        f"{speedup(point, measured):.1f}",
        _efficiency(point, measured),
        *(f"{measured.median(name):.3f} s" for name in seconds),
        *(f"{measured.median(name):,.0f}" for name in counts),
    ]


def _budgets(points: Sequence[Point]) -> list[float]:
    """Budgets that the default strategy was measured at, anywhere."""
    budgets = {m.way.budget for point in points for m in point.ways if m.way.budget is not None}
    return [
        budget
        for budget in sorted(budgets)
        if any(default_way(point, budget) is not None for point in points)
    ]


def _num_prompt(point: Point) -> int:
    return point.ways[0].samples[0].num_prompt


def _time(point: Point, measured: Measured | None) -> str:
    if measured is None:
        return NOTHING
    return f"{measured.ttft_s:.2f} s ({speedup(point, measured):.1f} ×)"


def _efficiency(point: Point, measured: Measured | None) -> str:
    value = None if measured is None else efficiency(point, measured)
    return NOTHING if value is None else f"{value:.2f}"


def _percent(budget: float) -> str:
    return f"{budget:.0%}"
