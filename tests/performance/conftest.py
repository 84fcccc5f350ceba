"""Made-up results. The benchmarks are run from the repository root, so their modules are found from there."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.ttft_parts.figures import AIM_CONTEXT
from benchmarks.ttft_parts.record import Measured, Point, Sample
from benchmarks.ttft_parts.ways import FULL, PREFIX, PREFIX_SAME, Way

from cachecraft_rag import CacheCraftConfig


def _facts() -> dict[str, Any]:
    return {
        "command": "python benchmarks/ttft.py",
        "commit": "abc",
        "machine": {"cpu": "some", "cores": 2, "load_1min": 0.0},
        "model": "tiny",
        "engine_args": {"dtype": "float32"},
    }


@dataclass(frozen=True)
class Made:
    """Makes points as `benchmarks.ttft` measures them; full prefill takes 10 s.

    Attributes:
        strategy, runs: the default strategy and its granularity.
    """

    facts: dict[str, Any] = field(default_factory=_facts)
    strategy: str = CacheCraftConfig().strategy
    runs: int = CacheCraftConfig().granularity

    def timed(self, way: Way, *ttft_s: float, load_s: float = 0.0, loaded_bytes: int = 0) -> Measured:
        """One sample for each time."""
        samples = [
            Sample(
                ttft_s=seconds,
                load_s=load_s,
                select_s=0.0,
                recompute_s=0.0,
                num_prompt=5100,
                num_prefix=0,
                num_reused=0,
                num_recomputed=0,
                num_computed=5100,
                num_probe=0,
                loaded_bytes=loaded_bytes,
            )
            for seconds in ttft_s
        ]
        return Measured(way, samples)

    def reuse(self, budget: float, *ttft_s: float, runs: int | None = None, **loading: Any) -> Measured:
        """With the default strategy."""
        return self.timed(Way.reuse(self.strategy, budget, runs or self.runs), *ttft_s, **loading)

    def point(self, *reuse: Measured, context: int = AIM_CONTEXT) -> Point:
        plain = [self.timed(Way(name), seconds) for name, seconds in _PLAIN.items()]
        return Point(context, self.facts, [*plain, *reuse])


_PLAIN = {FULL: 10.0, PREFIX: 10.0, PREFIX_SAME: 0.5}


@pytest.fixture
def made() -> Made:
    return Made()
