"""One engine a way, one way after the other, the same requests at the same times.

Engines of their own give every way an empty prefix cache, an empty store, and a peak of memory that is
its own. Taking turns in one engine was rejected: the ways would warm each other's prefix cache, and
prefix caching alone would pay for filling a store.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.engine_replay_parts.arrivals import arrivals
from benchmarks.engine_replay_parts.driver import prefill_s, serve, warm
from benchmarks.engine_replay_parts.figures import makespan_s
from benchmarks.engine_replay_parts.memory import PeakMemory
from benchmarks.engine_replay_parts.record import MODERATE, SATURATED, WayRecord
from benchmarks.engine_replay_parts.served import Served
from benchmarks.engine_replay_parts.ways import BASELINE, Way
from benchmarks.engine_replay_parts.workload import ReplayRequest, Workload

from cachecraft_rag import CacheCraftEngine

PROBE_PASSAGES = 5


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run.

    Attributes:
        engine_args: of vLLM, for all ways.
        arrival: one of `arrivals.KINDS`.
        overload: saturating arrivals per second, over what full prefill can serve by the first probe.
        moderate: moderate arrivals per second, over the measured capacity of prefix caching.
    """

    model: str
    engine_args: Mapping[str, Any]
    arrival: str
    overload: float
    moderate: float


def run_ways(
    workload: Workload, ways: Sequence[Way], settings: Settings, say: Callable[[str], None]
) -> Iterator[WayRecord]:
    """One record a way. The first is prefix caching: rates follow from it and hold for all."""
    rates: dict[str, float] = {}
    for way in ways:
        say(f"{way.name}: {way.what}")
        record = _run_way(workload, way, settings, rates, say)
        rates = dict(record.rates)
        yield record


def _run_way(
    workload: Workload,
    way: Way,
    settings: Settings,
    known_rates: Mapping[str, float],
    say: Callable[[str], None],
) -> WayRecord:
    rates: dict[str, float] = dict(known_rates)
    served: dict[str, list[Served]] = {}
    measure = partial(_measure, way=way, arrival=settings.arrival, say=say)
    probe = _probe(workload)
    arguments = {**settings.engine_args, **way.engine_args}
    engine_of_way = CacheCraftEngine(settings.model, config=way.made_config(), **arguments)
    with engine_of_way as engine, PeakMemory() as peak:
        asyncio.run(prefill_s(engine, probe))  # the first prefill pays for what torch makes once
        before_s = asyncio.run(prefill_s(engine, probe))
        if SATURATED not in rates:
            rates[SATURATED] = settings.overload * _capacity(workload, probe, before_s)
        warm_up_s = _warm_up(engine, workload, way)
        say(f"  warmed up in {warm_up_s:.0f} s, {rates[SATURATED]:.2f} requests/s arrive")
        served[SATURATED] = measure(engine, workload.saturated, rates[SATURATED])
        if way.name == BASELINE:
            rates[MODERATE] = settings.moderate * len(workload.saturated) / makespan_s(served[SATURATED])
        if workload.moderate:
            served[MODERATE] = measure(engine, workload.moderate, rates[MODERATE])
        after_s = asyncio.run(prefill_s(engine, probe))
        store = {name: value for name, value in engine.stats().items() if isinstance(value, int | float)}
    return WayRecord(
        way=way.name,
        probe_before_s=before_s,
        probe_after_s=after_s,
        warm_up_s=warm_up_s,
        peak_engine_bytes=peak.engine_bytes,
        peak_driver_bytes=peak.driver_bytes,
        rates=rates,
        served=served,
        store=store,
    )


def _probe(workload: Workload) -> ReplayRequest:
    """The request of median length, with few of its passages."""
    by_length = sorted(workload.saturated, key=lambda request: request.num_tokens)
    median = by_length[len(by_length) // 2]
    unused = sum(passage.num_tokens for passage in median.passages[PROBE_PASSAGES:])
    return replace(median, passages=median.passages[:PROBE_PASSAGES], num_tokens=median.num_tokens - unused)


def _capacity(workload: Workload, probe: ReplayRequest, probe_s: float) -> float:
    """Requests per second that full prefill can serve, were all tokens as fast as the probe's."""
    mean_tokens = sum(request.num_tokens for request in workload.saturated) / len(workload.saturated)
    return probe.num_tokens / probe_s / mean_tokens


def _warm_up(engine: CacheCraftEngine, workload: Workload, way: Way) -> float:
    began = time.perf_counter()
    if way.num_neighbours:
        _warm_neighbours(engine, workload, way.num_neighbours)
    elif way.has_store:
        asyncio.run(warm(engine, workload.fill, way))
    if way.warms_up:
        asyncio.run(warm(engine, workload.warm_up, way))
    return time.perf_counter() - began


def _warm_neighbours(engine: CacheCraftEngine, workload: Workload, num_neighbours: int) -> None:
    """The passages of the traffic before the measured part, each behind its nearest neighbours."""
    earlier = (*workload.fill, *workload.warm_up)
    chunks = {chunk.text: chunk for request in earlier for chunk in request.chunks()}
    engine.warm(list(chunks.values()), system=workload.warm_up[0].system, neighbours=num_neighbours)


def _measure(
    engine: CacheCraftEngine,
    requests: Sequence[ReplayRequest],
    requests_per_s: float,
    *,
    way: Way,
    arrival: str,
    say: Callable[[str], None],
) -> list[Served]:
    times_s = arrivals(arrival, [request.time_s for request in requests], requests_per_s)
    served = asyncio.run(serve(engine, requests, times_s, way))
    rate = len(served) / makespan_s(served)
    say(f"  {len(served)} requests at {requests_per_s:.2f} a second: {rate:.3f} served a second")
    return served
