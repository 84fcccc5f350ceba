"""Answers of a model with windowed layers after NaN was left in the attention kernel's scratch memory.

    python scratch_cell.py '{"model": "gemma3", ..., "divided": false}'

With `"divided": true` vLLM divides a context over threads, as it does unless told otherwise.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from typing import Any

import torch
from cell import make, prompts_of
from workload import ask

DIVIDED = "VLLM_CPU_ATTN_SPLIT_KV"
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 4, 2, 32, 32
"""Of the tiny models, in blocks as the engine has them."""
NUM_TOKENS = 1024
NUM_TRIES = 20
"""Which thread takes which part is chance, and each has its own memory."""


def leave_nan_in_scratch_memory() -> bool:
    """One step of decoding with a query that is not a number; whether the answer is none either."""
    from vllm import _custom_ops as ops

    num_blocks = NUM_TOKENS // BLOCK_SIZE
    kv_cache = torch.zeros(num_blocks, NUM_KV_HEADS, 2 * BLOCK_SIZE, HEAD_SIZE)
    key_cache, value_cache = kv_cache.chunk(2, dim=2)
    shape = {
        "seq_lens": torch.tensor([NUM_TOKENS], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 1], dtype=torch.int32),
        "causal": True,
    }
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_SIZE,
        dtype=torch.float32,
        sliding_window_size=-1,
        isa="vec",
        enable_kv_split=True,
        **shape,
    )
    output = torch.zeros(1, NUM_HEADS, HEAD_SIZE)
    ops.cpu_attention_with_kv_cache(
        query=torch.full((1, NUM_HEADS, HEAD_SIZE), math.nan),
        key_cache=key_cache,
        value_cache=value_cache,
        output=output,
        scale=1.0,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=torch.arange(num_blocks, dtype=torch.int32)[None],
        softcap=0.0,
        scheduler_metadata=metadata,
        s_aux=None,
        **shape,
    )
    return bool(output.isnan().all())


async def measure(cell: dict[str, Any]) -> dict[str, Any]:
    backend = make(cell, 8192)
    if cell["divided"]:
        os.environ[DIVIDED] = "1"
    await backend.start()
    longest = max(prompts_of(cell), key=lambda prompt: len(prompt.token_ids))
    left_nan, is_finite = [], []
    for _ in range(NUM_TRIES):
        left_nan.append(leave_nan_in_scratch_memory())
        answer = await ask(backend, longest, full=True)
        is_finite.append(all(math.isfinite(value) for step in answer.logprobs for value in step.values()))
    await backend.shutdown()
    return {
        "left_nan": all(left_nan),
        "num_tries": len(is_finite),
        "num_finite": sum(is_finite),
        "num_threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    print("RESULT " + json.dumps(asyncio.run(measure(json.loads(sys.argv[1])))), flush=True)
