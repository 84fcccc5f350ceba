"""KL and agreement over the budget, one picture per model and set."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.common.figures import panels
from benchmarks.quality.stats import Estimate
from benchmarks.quality.tables import Cell, agreement, estimate, kl
from benchmarks.quality.ways import FULL, Way


def draw(cell: Cell, target: Path) -> None:
    """Write the curves of one cell as PNG; a strategy without a budget is one point."""
    with panels(target, f"{cell.model}, {cell.set_name}") as axes:
        for ax, value, label in zip(axes, (kl, agreement), ("KL (nats)", "agreement"), strict=True):
            for name, ways in _curves(cell).items():
                plot_estimates(
                    ax, name, [(_charged(cell, way), estimate([cell], way.name, value)) for way in ways]
                )
            ax.set(xlabel="charged budget (share of the loaded chunk tokens)", ylabel=label)
            ax.grid(alpha=0.3)
        axes[0].set_yscale("log")
        axes[1].legend(fontsize=7)


def plot_estimates(ax: Any, name: str, points: Sequence[tuple[float, Estimate]]) -> None:
    """A curve with its intervals through (x, estimate)."""
    places = [place for place, _ in points]
    means = [estimate.mean for _, estimate in points]
    # Rounding can put the mean outside an interval of no width.
    below = [max(0.0, estimate.mean - estimate.low) for _, estimate in points]
    above = [max(0.0, estimate.high - estimate.mean) for _, estimate in points]
    ax.errorbar(places, means, yerr=[below, above], marker="o", markersize=3, capsize=2, lw=1, label=name)


def _curves(cell: Cell) -> dict[str, list[Way]]:
    curves: dict[str, list[Way]] = defaultdict(list)
    for way in (Way.parse(name) for name in cell.way_names() if name != FULL):
        curves[Way(way.strategy, None, way.regime, way.granularity).name].append(way)
    return curves


def _charged(cell: Cell, way: Way) -> float:
    return fmean(cell.values(way.name, lambda row: row.charged).values())
