"""The section of docs/performance.md that is made from the results; no figure in it was typed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.common.facts import origin
from benchmarks.common.text_table import markdown
from benchmarks.engine_replay_parts.plots import draw
from benchmarks.engine_replay_parts.record import RESULTS, RunRecord, read
from benchmarks.engine_replay_parts.tables import all_tables, gain_sentence
from benchmarks.engine_replay_parts.ways import WAYS

INTRO = Path(__file__).parent / "intro.md"


def result_records(results: Path = RESULTS) -> list[RunRecord]:
    return [read(path) for path in sorted(results.glob("*.json"))]


def draw_all(records: Sequence[RunRecord], plots: Path) -> None:
    for record in records:
        draw(record, plots / f"replay-{record.workload}.png")


def section(records: Sequence[RunRecord]) -> Iterator[str]:
    yield INTRO.read_text(encoding="utf-8")
    yield "Ways:\n"
    for name in dict.fromkeys(way.way for record in records for way in record.ways):
        yield f"- `{name}`: {WAYS[name].what}."
    yield ""
    for record in records:
        yield f"### Workload `{record.workload}`\n"
        yield f"{_how(record)}\n"
        yield f"![{record.workload}](performance/replay-{record.workload}.png)\n"
        for table in all_tables(record):
            yield markdown(table)
        yield f"{gain_sentence(record)}\n"


def _how(record: RunRecord) -> str:
    return f"{origin(record.facts)} Workload: `{json.dumps(record.facts['workload'])}`."
