"""How long CPython's garbage collector stops the process that holds an index."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.scale_bench import driver, scheduler

OLDEST_GENERATION = 2
MS = 1e-3


@dataclass(frozen=True, slots=True)
class PauseRow:
    """Full collections while an index is filled, and one over the filled index."""

    index: str
    num_chunks: int
    num_full_collections: int
    longest_ms: float
    filled_ms: float


class _Watch:
    """A callback of the collector that times full collections."""

    def __init__(self) -> None:
        self.pauses_s: list[float] = []
        self._start_s = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] < OLDEST_GENERATION:
            return
        if phase == "start":
            self._start_s = time.perf_counter()
        else:
            self.pauses_s.append(time.perf_counter() - self._start_s)


def measure_pauses(num_chunks: int) -> list[PauseRow]:
    return [
        _measure("known chunks", num_chunks, driver.filled),
        _measure("store", num_chunks, scheduler.filled),
    ]


def _measure(index: str, num_chunks: int, fill: Callable[[int], object]) -> PauseRow:
    watch = _Watch()
    gc.callbacks.append(watch)
    held = fill(num_chunks)
    num_full, longest_s = len(watch.pauses_s), max(watch.pauses_s, default=0.0)
    gc.collect()
    gc.callbacks.remove(watch)
    del held
    return PauseRow(index, num_chunks, num_full, longest_s / MS, watch.pauses_s[-1] / MS)
