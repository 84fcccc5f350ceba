"""What was measured, as JSON: call by call, so that every figure can be made again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.ttft_parts.ways import FULL, Way

from cachecraft_rag.events import ReuseReport

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Sample:
    """One call, by the engine's own report.

    Attributes:
        ttft_s: from the call to the first token; the other times are parts of it.
        num_prefix: prompt tokens from vLLM's prefix cache.
        num_probe: tokens of the question, computed once more to choose by.
    """

    ttft_s: float
    load_s: float
    select_s: float
    recompute_s: float
    num_prompt: int
    num_prefix: int
    num_reused: int
    num_recomputed: int
    num_computed: int
    num_probe: int
    loaded_bytes: int

    @classmethod
    def of(cls, report: ReuseReport) -> Sample:
        return cls(
            ttft_s=report.ttft_s,
            load_s=report.load_s,
            select_s=report.select_s,
            recompute_s=report.recompute_s,
            num_prompt=report.num_prompt_tokens,
            num_prefix=report.num_prefix_tokens,
            num_reused=report.num_reused_tokens,
            num_recomputed=report.num_recomputed_tokens,
            num_computed=report.num_computed_tokens,
            num_probe=report.num_probe_tokens,
            loaded_bytes=report.loaded_bytes,
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """One way at one context length."""

    way: Way
    samples: Sequence[Sample]

    def median(self, name: str) -> float:
        return median(getattr(sample, name) for sample in self.samples)

    @property
    def ttft_s(self) -> float:
        return self.median("ttft_s")


@dataclass(frozen=True, slots=True)
class Point:
    """One context length: all its ways were measured in one run.

    Attributes:
        context: tokens of passages that were asked for; the prompt has a few more.
        facts: of the run, see `common.facts`.
    """

    context: int
    facts: Mapping[str, Any]
    ways: Sequence[Measured]

    def of(self, name: str) -> Measured | None:
        return next((measured for measured in self.ways if measured.way.name == name), None)

    @property
    def full_s(self) -> float:
        full = self.of(FULL)
        assert full is not None  # every run measures it
        return full.ttft_s


def add_point(path: Path, point: Point) -> None:
    """Put a point into a file, in the place of an older one at its context."""
    others = [old for old in read(path) if old.context != point.context] if path.is_file() else []
    points = sorted([*others, point], key=lambda each: each.context)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(each) for each in points], indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> list[Point]:
    """The points of a file, shortest context first."""
    return [
        Point(
            data["context"],
            data["facts"],
            [
                Measured(Way(**measured["way"]), [Sample(**sample) for sample in measured["samples"]])
                for measured in data["ways"]
            ],
        )
        for data in json.loads(path.read_text(encoding="utf-8"))
    ]
