"""A report in a terminal, by rich."""

from __future__ import annotations

from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from cachecraft_rag.events import ChunkReport, ReuseReport
from cachecraft_rag.report_view import (
    NONE,
    Fate,
    cells_of,
    decision_of,
    document_of,
    parts_of,
    sentences,
)


@dataclass(frozen=True, slots=True)
class ReportBar:
    """The prompt as one line, as wide as there is room: each cell shows what became of its tokens."""

    report: ReuseReport

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        bar = Text(no_wrap=True)
        for fate, count in cells_of(parts_of(self.report), options.max_width):
            bar.append(fate.glyph * count, style=fate.colour)
        yield bar


def report_text(report: ReuseReport) -> RenderableType:
    """Sentences and figures, the bar with its legend, and a table with a row per chunk."""
    first, *others = sentences(report)
    return Group(
        Text(first, style="bold"),
        *map(Text, others),
        ReportBar(report),
        legend(),
        *(_chunks(report) if report.chunks else ()),
    )


def legend() -> Text:
    text = Text()
    for fate in Fate:
        text.append(f"{fate.glyph * 2} {fate.label}   ", style=fate.colour)
    text.rstrip()
    return text


def _chunks(report: ReuseReport) -> tuple[RenderableType, ...]:
    """The table, and below it what its reasons mean: each sentence once, however many chunks say it."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("#", "document", "decision"):
        table.add_column(heading)
    for heading in ("reused", "recomp.", "new"):
        table.add_column(heading, justify="right")
    for heading in ("from", "reason"):
        table.add_column(heading)
    for number, chunk in enumerate(report.chunks, start=1):
        table.add_row(*_row(number, chunk))
    reasons = dict.fromkeys(chunk.reason for chunk in report.chunks)
    return table, *(Text(f"{reason.value}: {reason.sentence}", style="dim") for reason in reasons)


def _row(number: int, chunk: ChunkReport) -> tuple[RenderableType, ...]:
    # Text, not str: a document's id may look like rich's markup.
    return (
        str(number),
        Text(document_of(chunk)),
        decision_of(chunk),
        str(chunk.num_reused_tokens),
        str(chunk.num_recomputed_tokens),
        str(chunk.num_computed_tokens),
        chunk.tier or NONE,
        chunk.reason.value,
    )
