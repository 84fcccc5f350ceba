"""docs/performance.md: one writer, all sections made from results; no figure in it was typed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine_replay_parts import record as replay_record
from benchmarks.engine_replay_parts import report as replay_report
from benchmarks.performance_parts import frontier, limits
from benchmarks.quality.results import RESULTS as QUALITY_RESULTS
from benchmarks.quality.results import ROOT
from benchmarks.stall_parts import record as stall_record
from benchmarks.stall_parts import tables as stall_tables
from benchmarks.ttft_parts import record as ttft_record
from benchmarks.ttft_parts import report as ttft_report

_INTRO = Path(__file__).parent / "intro.md"
_ELSEWHERE = {
    "scale.md": "planner, index and store alone at up to a million chunks and 64 threads; simulated clusters",
    "soak.md": "10,000 requests with churn; the cost of capture and of the attention profile",
    "store-benchmark.md": "look-ups, loads and codecs of the store",
    "policies.md": "hit rates of eviction policies on real traces, against the optimum",
}


@dataclass(frozen=True, slots=True)
class Sources:
    """Where results are read from; what is not there has no section."""

    ttft: Path = ttft_record.RESULTS
    quality: Path = QUALITY_RESULTS
    stall: Path = stall_record.RESULT
    replay: Path = replay_record.RESULTS


def write_page(docs: Path = ROOT / "docs", sources: Sources | None = None) -> Path:
    """Write `performance.md` in `docs` and the plots in `docs/performance`; returns the page."""
    sources = sources or Sources()
    page = docs / "performance.md"
    docs.mkdir(parents=True, exist_ok=True)
    blocks = (block.strip("\n") for block in _sections(sources, docs / "performance", docs))
    text = "\n\n".join(filter(None, blocks))
    # A figure that is not there leaves its empty line.
    page.write_text(re.sub(r"\n{3,}", "\n\n", text) + "\n", encoding="utf-8")
    return page


def _sections(sources: Sources, plots: Path, docs: Path) -> Iterator[str]:
    """All blocks of the page; draws the plots on the way."""
    yield _INTRO.read_text(encoding="utf-8")
    files = ttft_report.result_points(sources.ttft)
    if files:
        ttft_report.draw_all(files, plots)
        yield from ttft_report.section(files)
    joined = frontier.frontiers(files, sources.quality)
    for name, points in joined.items():
        frontier.draw(name, points, plots / f"frontier-{name}.png")
    if joined:
        yield from frontier.section(joined)
    if sources.stall.is_file():
        yield from stall_tables.section(stall_record.read(sources.stall))
    if records := replay_report.result_records(sources.replay):
        replay_report.draw_all(records, plots)
        yield "\n".join(replay_report.section(records))
    yield from _elsewhere(docs)
    yield limits.section(files)


def _elsewhere(docs: Path) -> Iterator[str]:
    """Pages of their own that are there."""
    lines = [f"- [{name}]({name}): {what}." for name, what in _ELSEWHERE.items() if (docs / name).is_file()]
    if lines:
        yield "## Scale, soak and the store\n"
        yield "\n".join(lines)
