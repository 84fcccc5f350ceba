"""The tables of a run, and its section of docs/performance.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.common.aims import Verdict, verdict_table
from benchmarks.common.facts import origin
from benchmarks.common.text_table import NOTHING, TextTable, markdown
from benchmarks.stall_parts.record import FULL, Row, StallRecord

_TEXT = Path(__file__).parent / "intro.md"
MOST_OF_WHOLE = 1.3
"""Time to first token in pieces, over that of the prompt in one piece."""
_TIMES = ("gap_s", "alone_gap_s", "ttft_s", "alone_ttft_s", "whole_ttft_s", "together_s", "in_turn_s")
_TITLES = ("longest gap", "without it", "TTFT beside", "alone", "alone, whole", "together", "in turn")


def all_tables(record: StallRecord) -> Iterator[TextTable]:
    settings = record.settings
    title = f"{settings['context']:,} tokens of context at {settings['step_tokens']} tokens a step"
    yield TextTable(title, ("way", *_TITLES), [_row(row) for row in record.rows])
    yield verdict_table("Aims", verdicts(record))


def verdicts(record: StallRecord) -> Iterator[Verdict]:
    """Of every way that reuses, beside vLLM's own chunked prefill and beside itself in one piece."""
    full = next((row for row in record.rows if row.way == FULL), None)
    for row in record.rows:
        if row.way == FULL:
            continue
        if full is not None:
            yield Verdict(
                f"{row.way}: longest gap / that of full prefill", 1.0, row.gap_s / full.gap_s, False
            )
        if row.whole_ttft_s:
            value = row.alone_ttft_s / row.whole_ttft_s
            yield Verdict(f"{row.way}: TTFT in pieces / in one piece", MOST_OF_WHOLE, value, False)


def section(record: StallRecord) -> Iterator[str]:
    yield _TEXT.read_text(encoding="utf-8").format(**record.settings)
    yield f"{origin(record.facts)}\n"
    yield from map(markdown, all_tables(record))


def _row(row: Row) -> tuple[str, ...]:
    values = (getattr(row, name) for name in _TIMES)
    return row.way, *(f"{value:.3f} s" if value else NOTHING for value in values)
