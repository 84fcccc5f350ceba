"""Requests through a cluster, and the figures that come of it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from benchmarks.cluster_sim.assumptions import Assumptions
from benchmarks.cluster_sim.caches import TokenCache
from benchmarks.cluster_sim.engine import Engine, Outcome
from benchmarks.cluster_sim.ways import Caches, Way
from benchmarks.cluster_sim.workload import SimRequest


@dataclass(frozen=True, slots=True)
class ClusterRow:
    """One way on one cluster at one rate of arrivals.

    Hit rates are shares of all prompt tokens. `computed_share` is that of the tokens computed.
    """

    machine: str
    num_engines: int
    way: str
    offered_per_s: float
    done_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    latency_p99_s: float
    prefix_hits: float
    host_hits: float
    shared_hits: float
    computed_share: float


def simulate(
    requests: Sequence[SimRequest], assumed: Assumptions, way: Way, num_engines: int
) -> list[Outcome]:
    """Every request's outcome. A conversation stays with one engine, as gateways with affinity have it."""
    shared = TokenCache(assumed.shared_tokens)
    engines = [Engine(n, assumed, Caches.make(way, assumed, shared)) for n in range(num_engines)]
    outcomes: list[Outcome] = []
    ends: list[tuple[float, int]] = []
    arrivals = iter(sorted(requests, key=lambda request: request.time_s))
    coming = next(arrivals, None)
    while coming is not None or ends:
        if coming is not None and (not ends or coming.time_s <= ends[0][0]):
            now_s, engine = coming.time_s, engines[coming.session % num_engines]
            engine.submit(coming)
            coming = next(arrivals, None)
        else:
            now_s, number = heapq.heappop(ends)
            engine = engines[number]
            outcomes += engine.end_step(now_s)
        if not engine.is_busy and engine.has_work:
            heapq.heappush(ends, (now_s + engine.begin_step(), engine.number))
    return outcomes


def full_capacity(requests: Sequence[SimRequest], assumed: Assumptions, num_engines: int) -> float:
    """Requests per second that full compute could prefill, decoding left out."""
    caches = Caches.make(Way("full", has_prefix_cache=False), assumed, TokenCache(0))
    work = sum(caches.plan(request).work for request in requests)
    return num_engines * assumed.prefill_tokens_per_s * len(requests) / work


def measure(
    requests: Sequence[SimRequest], assumed: Assumptions, way: Way, num_engines: int, num_warm_up: int = 0
) -> ClusterRow:
    """Figures of all requests but the first `num_warm_up`, which fill the caches."""
    outcomes = sorted(simulate(requests, assumed, way, num_engines), key=lambda o: o.request.time_s)
    counted = outcomes[num_warm_up:]
    ttft_s = [outcome.ttft_s for outcome in counted]
    first_s = counted[0].request.time_s
    last_s = max(outcome.request.time_s + outcome.end_s for outcome in counted)
    jobs = [outcome.job for outcome in counted]
    total = sum(job.num_tokens for job in jobs)
    return ClusterRow(
        machine=assumed.name,
        num_engines=num_engines,
        way=way.name,
        offered_per_s=(len(counted) - 1) / (counted[-1].request.time_s - first_s),
        done_per_s=len(counted) / (last_s - first_s),
        ttft_p50_s=float(np.percentile(ttft_s, 50)),
        ttft_p99_s=float(np.percentile(ttft_s, 99)),
        latency_p99_s=float(np.percentile([outcome.end_s for outcome in counted], 99)),
        prefix_hits=sum(job.num_prefix_tokens for job in jobs) / total,
        host_hits=sum(job.num_host_tokens for job in jobs) / total,
        shared_hits=sum(job.num_shared_tokens for job in jobs) / total,
        computed_share=sum(job.num_computed for job in jobs) / total,
    )
