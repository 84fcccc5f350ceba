"""The simulation beside what a replay on one machine measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cluster_sim.assumptions import Assumptions
from benchmarks.cluster_sim.run import ClusterRow, measure
from benchmarks.cluster_sim.ways import Way
from benchmarks.cluster_sim.workload import SimRequest, replayed, shortened

from cachecraft_rag.errors import ConfigurationError

FIGURES = ("done_per_s", "ttft_p50_s", "ttft_p99_s", "computed_share")
WAYS = ("full", "prefix", "reuse")


@dataclass(frozen=True, slots=True)
class ValidationRow:
    """One figure of one way; `ratio` is simulated over measured."""

    way: str
    figure: str
    measured: float
    simulated: float
    ratio: float


def validate(requests: Sequence[SimRequest], assumed: Assumptions, path: Path) -> list[ValidationRow]:
    """Simulate what was replayed, and compare.

    Args:
        path: JSON with `workload` (first, num_warm_up, arrivals_s, token_scale, max_output_tokens) and
            `rows` (way, budget, and any of `FIGURES`).

    Raises:
        ConfigurationError: a row's way is unknown.
    """
    measured = json.loads(path.read_text())
    workload = measured["workload"]
    timed = replayed(requests[workload["first"] :], workload["num_warm_up"], workload["arrivals_s"])
    sent = list(shortened(timed, workload["token_scale"], workload["max_output_tokens"]))
    found: list[ValidationRow] = []
    for row in measured["rows"]:
        simulated = measure(sent, assumed, _way(row), 1, workload["num_warm_up"])
        found += _compared(row, simulated)
    return found


def _way(row: dict[str, Any]) -> Way:
    if row["way"] not in WAYS:
        raise ConfigurationError(f"the way is {row['way']!r}: choose one of {', '.join(WAYS)}")
    return Way(row["way"], row["way"] != "full", row.get("budget") if row["way"] == "reuse" else None)


def _compared(row: dict[str, Any], simulated: ClusterRow) -> list[ValidationRow]:
    pairs = [(name, float(row[name]), float(getattr(simulated, name))) for name in FIGURES if name in row]
    return [ValidationRow(row["way"], name, real, guess, guess / real) for name, real, guess in pairs]
