"""Figures that were aimed at, and whether they were reached."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.common.text_table import TextTable

MET, MISSED = "met", "MISSED"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One measured figure beside its aim.

    Attributes:
        is_least: whether `limit` is the least that will do; else it is the most.
    """

    figure: str
    limit: float
    value: float
    is_least: bool

    @property
    def is_met(self) -> bool:
        return self.value >= self.limit if self.is_least else self.value <= self.limit

    def row(self) -> tuple[str, str, str, str]:
        sign = "≥" if self.is_least else "≤"
        return self.figure, f"{sign} {self.limit:g}", f"{self.value:.2f}", MET if self.is_met else MISSED


def verdict_table(title: str, verdicts: Iterable[Verdict]) -> TextTable:
    return TextTable(title, ("figure", "aim", "measured", ""), [verdict.row() for verdict in verdicts])
