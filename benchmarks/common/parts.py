"""Benchmarks of several tables: measured one after the other, printed as they come, kept for a file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH = 150
"""Columns, so that cells stay whole where the output is no terminal."""


@dataclass(frozen=True, slots=True)
class Part:
    """One table; `measure` gives its rows, records of one kind with units in their names."""

    name: str
    title: str
    measure: Callable[[], Sequence[Any]]


def measure_parts(parts: Iterable[Part], console: Console) -> dict[str, list[dict[str, Any]]]:
    """The rows of each table, by its name, as JSON takes them."""
    found = {}
    for part in parts:
        start_s = time.perf_counter()
        rows = part.measure()
        console.print(table(part.title, rows))
        console.print(f"{part.name}: {time.perf_counter() - start_s:.1f} s\n")
        found[part.name] = [asdict(row) for row in rows]
    return found


def table(title: str, rows: Sequence[Any]) -> Table:
    found = Table(title=title)
    for name, value in asdict(rows[0]).items():
        heading = name.replace("_", " ").replace(" us", " µs")
        found.add_column(heading, justify="left" if isinstance(value, str) else "right")
    for row in rows:
        found.add_row(*map(cell, asdict(row).values()))
    return found


def cell(value: object) -> str:
    """Three digits that count, or all of a whole number."""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
