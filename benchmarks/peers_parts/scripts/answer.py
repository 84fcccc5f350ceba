"""Answers a job with vLLM and one KV connector. Imported by the scripts beside it; they stand alone, as
they run in environments without this project."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any


def read_job() -> dict[str, Any]:
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    return job


def write_result(warm_up: list[dict[str, Any]], measured: list[dict[str, Any]]) -> None:
    Path(sys.argv[2]).write_text(json.dumps({"warm_up": warm_up, "measured": measured}))


def answer(job: dict[str, Any], kv_transfer: dict[str, Any] | None = None, **engine_args: Any) -> None:
    """Answer all requests of the job, one after the other, and write the result."""
    asyncio.run(_answer(job, kv_transfer, engine_args))


async def _answer(job: dict[str, Any], kv_transfer: dict[str, Any] | None, engine_args: Any) -> None:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = {**job["engine_args"], "model": job["model"], "disable_log_stats": True, **engine_args}
    if kv_transfer is not None:
        arguments["kv_transfer_config"] = KVTransferConfig(**kv_transfer)
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    try:
        parts = [
            [await _ask(engine, asked, f"{part}-{index}") for index, asked in enumerate(job[part])]
            for part in ("warm_up", "measured")
        ]
    finally:
        engine.shutdown()
    write_result(*parts)


async def _ask(engine: Any, asked: dict[str, Any], name: str) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        temperature=0.0, max_tokens=asked["max_tokens"], output_kind=RequestOutputKind.CUMULATIVE
    )
    prompt = TokensPrompt(prompt_token_ids=asked["prompt_token_ids"])
    began, ttft_s, last = time.perf_counter(), -1.0, None
    async for output in engine.generate(prompt, sampling, name):
        if ttft_s < 0 and output.outputs[0].token_ids:
            ttft_s = time.perf_counter() - began
        last = output
    assert last is not None
    return {
        "ttft_s": ttft_s,
        "token_ids": list(last.outputs[0].token_ids),
        "text": last.outputs[0].text,
        "num_prompt": len(asked["prompt_token_ids"]),
        "num_saved": last.num_cached_tokens or 0,
    }
