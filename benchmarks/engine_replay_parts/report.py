"""The section of docs/performance.md that is made from the results; no figure in it was typed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.engine_replay_parts.plots import draw
from benchmarks.engine_replay_parts.record import RESULTS, RunRecord, read
from benchmarks.engine_replay_parts.tables import TextTable, all_tables, gain_sentence
from benchmarks.engine_replay_parts.ways import WAYS

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "performance.md"
PLOTS = DOCS / "performance"
INTRO = Path(__file__).parent / "intro.md"
BEGIN, END = "<!-- engine-replay -->", "<!-- /engine-replay -->"


def write_report(results: Path = RESULTS, page: Path = PAGE, plots: Path = PLOTS) -> None:
    """Draw the plots and put the section between its marks, at the page's end if they are not there.

    Raises:
        SystemExit: there are no results.
    """
    records = [read(path) for path in sorted(results.glob("*.json"))]
    if not records:
        raise SystemExit(
            f"{results} holds no results: run `python -m benchmarks.engine_replay passages` first"
        )
    for record in records:
        draw(record, plots / f"replay-{record.workload}.png")
    text = page.read_text(encoding="utf-8") if page.is_file() else "# Performance\n"
    page.write_text(with_section(text, "\n".join(section(records))), encoding="utf-8")


def with_section(page: str, text: str) -> str:
    """The page with `text` between the marks."""
    block = f"{BEGIN}\n{text.strip()}\n{END}"
    before, mark, rest = page.partition(BEGIN)
    if not mark:
        return f"{page.rstrip()}\n\n{block}\n"
    return before + block + rest.partition(END)[2]


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


def markdown(table: TextTable) -> str:
    lines = [f"**{table.title}**\n", _line(table.columns), _line(["---"] * len(table.columns))]
    return "\n".join([*lines, *map(_line, table.rows)]) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _how(record: RunRecord) -> str:
    facts = record.facts
    machine = facts["machine"]
    return (
        f"`{facts['command']}` at commit `{facts['commit']}`; {machine['cores']} cores, {machine['cpu']}, "
        f"load {machine['load_1min']:.1f} at the start; model {facts['model']}, "
        f"`{json.dumps(facts['engine_args'])}`. Workload: `{json.dumps(facts['workload'])}`."
    )
