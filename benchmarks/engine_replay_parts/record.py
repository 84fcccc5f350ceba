"""What a run measured, as JSON: request by request, so that every figure can be made again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from benchmarks.engine_replay_parts.figures import Comparison, Figures, compare, figures_of
from benchmarks.engine_replay_parts.served import Served
from benchmarks.engine_replay_parts.ways import BASELINE, FULL, WAYS

RESULTS = Path(__file__).parent / "results"
SATURATED, MODERATE = "saturated", "moderate"
LOADS = (SATURATED, MODERATE)
_DIGITS = 4


@dataclass(frozen=True, slots=True)
class WayRecord:
    """One way in its own engine.

    Attributes:
        probe_before_s, probe_after_s: full prefill of one fixed prompt before and after all else: how far
            the machine itself changed.
        warm_up_s: filling the store and warming up.
        rates: arrivals per second by load.
        served: by load, in the order of the requests.
    """

    way: str
    probe_before_s: float
    probe_after_s: float
    warm_up_s: float
    peak_engine_bytes: int
    peak_driver_bytes: int
    rates: Mapping[str, float]
    served: Mapping[str, Sequence[Served]]
    store: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run: all its ways answered the same requests.

    Attributes:
        facts: of workload, machine, code and command.
    """

    workload: str
    facts: Mapping[str, Any]
    ways: Sequence[WayRecord]

    @property
    def loads(self) -> list[str]:
        """The loads under which a way was measured."""
        return [load for load in LOADS if any(way.served.get(load) for way in self.ways)]

    def of(self, name: str) -> WayRecord | None:
        return next((way for way in self.ways if way.way == name), None)

    def figures(self, way: WayRecord, load: str) -> Figures | None:
        """None where the way was not measured under this load."""
        served, full = way.served.get(load), self.of(FULL)
        if not served:
            return None
        return figures_of(served, full.served.get(load, ()) if full else (), WAYS[way.way].budget)

    def comparison(self, way: WayRecord, load: str) -> Comparison | None:
        base = self.of(BASELINE)
        ours, other = self.figures(way, load), base and self.figures(base, load)
        return compare(ours, other) if ours and other else None


def save(record: RunRecord, path: Path) -> None:
    data = {
        "workload": record.workload,
        "facts": dict(record.facts),
        "ways": [_packed(way) for way in record.ways],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, ensure_ascii=False) + "\n", encoding="utf-8")


def read(path: Path) -> RunRecord:
    data = json.loads(path.read_text(encoding="utf-8"))
    return RunRecord(data["workload"], data["facts"], [_unpacked(way) for way in data["ways"]])


def _packed(way: WayRecord) -> dict[str, Any]:
    values = {each.name: getattr(way, each.name) for each in fields(way)}
    values["served"] = {load: _columns(served) for load, served in way.served.items()}
    return values


def _unpacked(values: Mapping[str, Any]) -> WayRecord:
    served = {load: _rows(columns) for load, columns in values["served"].items()}
    return WayRecord(**{**values, "served": served})


def _columns(served: Sequence[Served]) -> dict[str, list[Any]]:
    """By field, the values of all requests: a third of the size of rows."""
    return {each.name: [_short(getattr(one, each.name)) for one in served] for each in fields(Served)}


def _rows(columns: Mapping[str, Sequence[Any]]) -> list[Served]:
    return [Served(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def _short(value: Any) -> Any:
    return round(value, _DIGITS) if isinstance(value, float) else value
