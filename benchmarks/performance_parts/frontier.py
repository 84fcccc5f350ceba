"""Quality against time to first token: the results of two benchmarks, joined by what was recomputed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.figures import panels
from benchmarks.common.text_table import TextTable, markdown
from benchmarks.quality.curves import plot_estimates
from benchmarks.quality.results import RESULTS as QUALITY_RESULTS
from benchmarks.quality.results import result_files
from benchmarks.quality.stats import Estimate
from benchmarks.quality.tables import Cell, agreement, common_ways, estimate, kl
from benchmarks.quality.ways import FULL as FULL_ANSWERS
from benchmarks.quality.ways import Way as QualityWay
from benchmarks.ttft_parts.figures import AIM_CONTEXT, aim_point, speedup
from benchmarks.ttft_parts.record import Measured, Point

_TEXT = Path(__file__).parent / "frontier.md"
Key = tuple[str, float, int]
"""(strategy, budget, granularity)."""


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One way of reuse: how fast it is, and how near to full prefill.

    Attributes:
        name: the way as `benchmarks.quality` calls it; it says how chunks were cached, too.
        speedup: full prefill's time to first token over this way's.
        kl, agreement: means over the sets of that model.
    """

    name: str
    ttft_s: float
    speedup: float
    kl: Estimate
    agreement: Estimate


def join_key(strategy: str, budget: float, granularity: int) -> Key:
    """What two measurements must share. Where nothing or all is recomputed, strategies and runs do not
    differ, so the name of one stands for all."""
    return (strategy, budget, granularity) if 0.0 < budget < 1.0 else ("", budget, 1)


def join(point: Point, cells: Sequence[Cell]) -> list[FrontierPoint]:
    """The ways that both benchmarks measured, fastest first.

    Args:
        cells: of one model; only ways that all of them have count.
    """
    times = {
        join_key(m.way.strategy, m.way.budget, m.way.granularity): m
        for m in reversed(point.ways)
        if m.way.budget is not None
    }
    found = []
    for name in common_ways(cells) if cells else ():
        measured = None if name == FULL_ANSWERS else times.get(_quality_key(QualityWay.parse(name)))
        if measured is not None:
            found.append(_frontier_point(name, point, measured, cells))
    return sorted(found, key=lambda each: (each.ttft_s, each.kl.mean))


def quality_cells(model: str, results: Path = QUALITY_RESULTS) -> list[Cell]:
    """One cell a set, of a model by its name in `benchmarks.quality.models`."""
    cells = (Cell.of(file) for file in result_files(results) if file.model == model)
    return [cell for cell in cells if cell.rows]


def frontiers(files: Mapping[str, Sequence[Point]], quality: Path) -> dict[str, list[FrontierPoint]]:
    """`model-dtype` → its joined points, of files with a point at the aims' context."""
    found = {}
    for name, points in files.items():
        point = aim_point(points)
        joined = join(point, quality_cells(name.split("-", 1)[0], quality)) if point else []
        if joined:
            found[name] = joined
    return found


def section(found: Mapping[str, Sequence[FrontierPoint]]) -> Iterator[str]:
    yield _TEXT.read_text(encoding="utf-8").format(context=AIM_CONTEXT)
    for name, points in found.items():
        yield f"![quality against time to first token](performance/frontier-{name}.png)\n"
        yield markdown(frontier_table(name, points))


def frontier_table(name: str, points: Sequence[FrontierPoint]) -> TextTable:
    rows = [
        [f"`{p.name}`", f"{p.ttft_s:.2f} s", f"{p.speedup:.1f}", f"{p.kl}", f"{p.agreement:.3f}"]
        for p in points
    ]
    return TextTable(f"Frontier, {name}", ("way", "TTFT", "×", "KL (nats)", "agreement"), rows)


def draw(name: str, points: Sequence[FrontierPoint], target: Path) -> None:
    """Write one PNG: KL and agreement over time to first token, a curve for each strategy and cache."""
    with panels(target, f"{name}: budgets and granularities at {AIM_CONTEXT:,} tokens of context") as axes:
        for ax, value in zip(axes, ("kl", "agreement"), strict=True):
            for label, curve in _curves(points).items():
                plot_estimates(ax, label, [(each.ttft_s, getattr(each, value)) for each in curve])
            ax.set(xlabel="time to first token (s)", ylabel="KL (nats)" if value == "kl" else value)
            ax.grid(alpha=0.3)
        axes[0].set_yscale("log")
        axes[1].legend(fontsize=7)


def _curves(points: Sequence[FrontierPoint]) -> dict[str, list[FrontierPoint]]:
    curves: dict[str, list[FrontierPoint]] = {}
    for point in points:
        way = QualityWay.parse(point.name)
        label = QualityWay(way.strategy, None, way.regime, way.granularity).name
        curves.setdefault(label, []).append(point)
    return curves


def _quality_key(way: QualityWay) -> Key:
    budget = 1.0 if way.recomputes_all else way.ratio or 0.0  # no ratio: `naive`, which recomputes nothing
    return join_key(way.strategy, budget, way.granularity)


def _frontier_point(name: str, point: Point, measured: Measured, cells: Sequence[Cell]) -> FrontierPoint:
    return FrontierPoint(
        name=name,
        ttft_s=measured.ttft_s,
        speedup=speedup(point, measured),
        kl=estimate(cells, name, kl),
        agreement=estimate(cells, name, agreement),
    )
