"""The section of docs/performance.md on time to first token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.common.facts import origin
from benchmarks.common.text_table import markdown
from benchmarks.ttft_parts.plots import draw
from benchmarks.ttft_parts.record import RESULTS, Point, read
from benchmarks.ttft_parts.tables import page_tables

_INTRO = Path(__file__).parent / "intro.md"


def result_points(results: Path = RESULTS) -> dict[str, list[Point]]:
    """`model-dtype` → its points, shortest context first."""
    return {path.stem: read(path) for path in sorted(results.glob("*.json"))}


def draw_all(files: Mapping[str, Sequence[Point]], plots: Path) -> None:
    for name, points in files.items():
        draw(points, plots / f"ttft-{name}.png")


def section(files: Mapping[str, Sequence[Point]]) -> Iterator[str]:
    yield _INTRO.read_text(encoding="utf-8")
    for name, points in files.items():
        facts = points[-1].facts
        yield f"### {facts['model']}, {facts['engine_args']['dtype']}\n"
        yield from _origins(points)
        yield f"![time to first token](performance/ttft-{name}.png)\n"
        yield from map(markdown, page_tables(points))


def _origins(points: Sequence[Point]) -> Iterator[str]:
    """Where the points come from; those of one run together."""
    contexts: dict[str, list[str]] = {}
    for point in points:
        contexts.setdefault(origin(point.facts), []).append(f"{point.context:,}")
    for sentence, of_run in contexts.items():
        yield f"Context {', '.join(of_run)}: {sentence}\n"
