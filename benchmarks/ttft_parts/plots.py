"""Pictures: time to first token over the context, and over the budget beside what is ideal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.figures import panels
from benchmarks.ttft_parts.figures import aim_point, default_way
from benchmarks.ttft_parts.record import Measured, Point
from benchmarks.ttft_parts.ways import FULL, PREFIX, PREFIX_SAME

_SHOWN_BUDGETS = (0.0, 0.15, 0.30)


def draw(points: Sequence[Point], target: Path) -> None:
    """Write one PNG of a model's points."""
    facts = points[-1].facts
    title = f"{facts['model']}, {facts['engine_args']['dtype']}, on {facts['machine']['cpu']}"
    with panels(target, title) as axes:
        _over_context(axes[0], points)
        _over_budget(axes[1], aim_point(points) or points[-1])


def _over_context(ax: Any, points: Sequence[Point]) -> None:
    for name in (FULL, PREFIX, PREFIX_SAME):
        _line(ax, name, [(point, point.of(name)) for point in points])
    for budget in _SHOWN_BUDGETS:
        _line(ax, f"reuse, {budget:.0%}", [(point, default_way(point, budget)) for point in points])
    ax.set(xlabel="context (tokens)", ylabel="time to first token (s)", xscale="log", yscale="log")
    ax.grid(alpha=0.3, which="both")
    ax.legend(fontsize=7)


def _line(ax: Any, label: str, found: Sequence[tuple[Point, Measured | None]]) -> None:
    pairs = [(point.context, measured.ttft_s) for point, measured in found if measured is not None]
    if pairs:
        ax.plot(*zip(*pairs, strict=True), marker="o", markersize=3, lw=1, label=label)


def _over_budget(ax: Any, point: Point) -> None:
    curves: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for measured in point.ways:
        way = measured.way
        if way.budget is not None:
            curves[f"{way.strategy}, runs of {way.granularity}"].append((way.budget, measured.ttft_s))
    for label, curve in curves.items():
        ax.plot(*zip(*sorted(curve), strict=True), marker="o", markersize=3, lw=1, label=label)
    ax.plot([0, 1], [0, point.full_s], color="grey", lw=1, ls=":", label="budget × full prefill")
    ax.axhline(point.full_s, color="black", lw=1, ls="--", label="full prefill")
    ax.set(xlabel="budget (share of the reused tokens)", ylabel="time to first token (s)")
    ax.set_title(f"{point.context:,} tokens of context", fontsize=9)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=7)
