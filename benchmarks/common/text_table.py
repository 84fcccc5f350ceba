"""Tables as rows of text, for the terminal and for a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

NOTHING = "–"


@dataclass(frozen=True, slots=True)
class TextTable:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def markdown(table: TextTable) -> str:
    lines = [f"**{table.title}**\n", _line(table.columns), _line(["---"] * len(table.columns))]
    return "\n".join([*lines, *map(_line, table.rows)]) + "\n"


def show(tables: Iterable[TextTable], console: Console) -> None:
    for text in tables:
        table = Table(title=text.title)
        for column in text.columns:
            table.add_column(column)
        for row in text.rows:
            table.add_row(*row)
        console.print(table)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
