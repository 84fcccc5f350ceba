"""How calls are timed, and how memory is read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

NUM_WARM_UP = 50
US = 1e-6


@dataclass(frozen=True, slots=True)
class Times:
    """Of one kind of call, in µs.

    `p99_cpu_us` is processor time of the calling thread: without what other programs take.
    """

    p50_us: float
    p99_us: float
    p99_cpu_us: float
    max_us: float


@dataclass(frozen=True, slots=True)
class SizeRow:
    """Times of one kind of call at one size of the index.

    `bytes_per_chunk` is the growth of resident memory while the index was filled.
    """

    call: str
    num_chunks: int
    bytes_per_chunk: float
    p50_us: float
    p99_us: float
    p99_cpu_us: float
    max_us: float


class Stopwatch:
    """Times of single calls, by the clock and of the processor."""

    def __init__(self) -> None:
        self._wall_s: list[float] = []
        self._cpu_s: list[float] = []

    def time(self, call: Callable[[], object]) -> None:
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        call()
        self._cpu_s.append(time.thread_time() - start_cpu_s)
        self._wall_s.append(time.perf_counter() - start_s)

    def times(self) -> Times:
        wall, cpu = (np.array(s[NUM_WARM_UP:]) / US for s in (self._wall_s, self._cpu_s))
        return Times(
            float(np.percentile(wall, 50)),
            float(np.percentile(wall, 99)),
            float(np.percentile(cpu, 99)),
            float(wall.max()),
        )


def time_each(calls: Iterable[Callable[[], object]]) -> Times:
    watch = Stopwatch()
    for call in calls:
        watch.time(call)
    return watch.times()
