"""Sends requests through the asynchronous engine, at given times or as fast as it takes them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.engine_replay_parts.served import Served, served_from
from benchmarks.engine_replay_parts.ways import Way
from benchmarks.engine_replay_parts.workload import ReplayRequest

from cachecraft_rag.engine.api import ChatEngine

MAX_WARMING = 8
"""Requests at once while the caches are warmed: later ones are to find what earlier ones left."""


async def serve(
    engine: ChatEngine, requests: Sequence[ReplayRequest], arrivals_s: Sequence[float], way: Way
) -> list[Served]:
    """Answers in the order of the requests. Nobody waits for an answer before sending the next."""
    began = time.perf_counter()
    sent = (
        _answered(engine, request, began, arrival_s, way.options)
        for request, arrival_s in zip(way.sent(requests), arrivals_s, strict=True)
    )
    return list(await asyncio.gather(*sent))


async def warm(engine: ChatEngine, requests: Sequence[ReplayRequest], way: Way) -> None:
    """Send requests `MAX_WARMING` at a time, in their order; the answers are thrown away."""
    slots = asyncio.Semaphore(MAX_WARMING)

    async def one(request: ReplayRequest) -> None:
        async with slots:
            await engine.achat(
                request.messages(), chunks=request.chunks(), max_tokens=request.max_tokens, **way.options
            )

    await asyncio.gather(*map(one, way.sent(requests)))


async def prefill_s(engine: ChatEngine, request: ReplayRequest) -> float:
    """Seconds of a full prefill of one request, nothing cached: how fast the machine is now."""
    options = {"reuse": "off", "store": False, "read_prefix_cache": False, "max_tokens": 1}
    began = time.perf_counter()
    await engine.achat(request.messages(), **options)
    return time.perf_counter() - began


async def _answered(
    engine: ChatEngine, request: ReplayRequest, began: float, arrival_s: float, options: Any
) -> Served:
    await asyncio.sleep(max(0.0, began + arrival_s - time.perf_counter()))
    arrived = began + arrival_s
    ttft_s, completion = -1.0, None
    stream = engine.astream_chat(
        request.messages(),
        chunks=request.chunks(),
        max_tokens=request.max_tokens,
        ignore_eos=request.ignore_eos,
        **options,
    )
    async for delta in stream:
        if ttft_s < 0 and delta.token_ids:
            ttft_s = time.perf_counter() - arrived
        completion = delta.completion or completion
    assert completion is not None  # the last piece carries it
    return served_from(
        completion.report,
        text=completion.text,
        num_output=len(completion.token_ids),
        arrival_s=arrival_s,
        ttft_s=ttft_s,
        latency_s=time.perf_counter() - arrived,
    )
