"""One cell of the exactness matrix, in a process of its own: prints one JSON line.

    python cell.py '{"model": "llama", "dtype": "float32", "eager": true, "in_process": true,
                     "tensor_parallel_size": 1, "num_prompts": 50, "root": "/tmp/models"}'

With `"noise_only": true` it measures how far two full prefills are apart that differ only in
`max_num_batched_tokens` (512 and 8192).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

LIVE_RATIOS = {"focus": 0.4, "cacheblend": 0.9}
"""Strategies whose tokens are chosen in the workers, which must agree. CacheBlend pays two of the three
layers of a tiny model before it chooses anything."""


def make(cell: dict[str, Any], max_num_batched_tokens: int) -> Any:
    from cachecraft_rag.config import CacheCraftConfig
    from cachecraft_rag.engine.backends import make_backend, make_vllm_config

    config = CacheCraftConfig(max_variants_per_chunk=64, host_store_bytes=3 << 30)
    vllm_config, reason = make_vllm_config(
        str(model_folder(cell)),
        {
            "dtype": cell["dtype"],
            "enforce_eager": cell["eager"],
            "tensor_parallel_size": cell["tensor_parallel_size"],
            "max_model_len": 2048,
            "max_num_batched_tokens": max_num_batched_tokens,
            "kv_cache_memory_bytes": 512 << 20,
            "seed": 0,
        },
        config,
        in_process=cell["in_process"],
    )
    assert not reason, reason
    return make_backend(vllm_config, in_process=cell["in_process"])


def model_folder(cell: dict[str, Any]) -> Path:
    if cell["model"] == "default":
        from cachecraft_rag.models import default_model

        return default_model()
    from tiny_models import tiny_model

    return tiny_model(cell["model"], Path(cell["root"]))


async def started(cell: dict[str, Any], max_num_batched_tokens: int) -> Any:
    backend = make(cell, max_num_batched_tokens)
    await backend.start()
    replies = await backend.collective_rpc("cachecraft_attach")
    assert all(reply["supported"] for reply in replies), replies
    return backend


async def control(backend: Any, action: str, **arguments: Any) -> Any:
    from cachecraft_rag.vllm_connector.messages import ControlMessage

    name = f"control-{action}-{os.urandom(4).hex()}"
    await backend.send_control(ControlMessage(name, action, arguments))
    for _ in range(500):
        reply = (await backend.collective_rpc("cachecraft_take_reply", name))[0]
        if reply is not None:
            assert "error" not in reply, reply
            return reply["result"]
    raise AssertionError(f"no reply to {action}")


def prompts_of(cell: dict[str, Any]) -> list[Any]:
    from workload import mixed_prompts

    if cell["model"] == "default":
        return mixed_prompts(cell["num_prompts"], 40_000, max_tokens=1200, seed=7, most_tokens=300)
    return mixed_prompts(cell["num_prompts"], 2048, max_tokens=1200, seed=7)


async def measure_noise(cell: dict[str, Any]) -> dict[str, Any]:
    from workload import ask, logprob_gap

    answers: list[list[Any]] = []
    for max_num_batched_tokens in (512, 8192):
        backend = await started(cell, max_num_batched_tokens)
        answers.append([await ask(backend, p, full=True, store=False) for p in prompts_of(cell)])
        await backend.shutdown()
    return {"noise": max(map(logprob_gap, *answers))}


async def measure_cell(cell: dict[str, Any]) -> dict[str, Any]:
    from workload import ask, describe_difference, logprob_gap, tie_gap

    backend = await started(cell, 8192)
    result: dict[str, Any] = {"gaps": {}, "ties": {}, "differences": [], "counts": {}}

    def compare(kind: str, answer: Any, full: Any) -> None:
        gaps = result["gaps"].setdefault(kind, [])
        gaps.append(logprob_gap(answer, full))
        if (tie := tie_gap(full, answer)) is not None:
            result["ties"].setdefault(kind, []).append(tie)
            reports = f"{answer.report.why} | {full.report.why}"
            result["differences"].append(f"{kind}, {describe_difference(answer, full)}; {reports}")

    def count(kind: str, number: int) -> None:
        result["counts"][kind] = result["counts"].get(kind, 0) + number

    for index, prompt in enumerate(prompts_of(cell)):
        full = await ask(backend, prompt, full=True)
        everything = await ask(backend, prompt, strategy="recompute_all")
        compare("recompute_all", everything, full)
        count("recomputed_tokens", everything.report.num_recomputed_tokens)
        exact = await ask(backend, prompt, exact_only=True)
        compare("exact", exact, full)
        count("exact_reused_tokens", exact.report.num_reused_tokens)
        if index % 5:
            continue
        salt = f"shared-{index}"
        moved = prompt.moved([11, 12, 13])
        reused = await ask(backend, moved, strategy="naive", salt=salt, store=False)
        count("shifted_reused_tokens", reused.report.num_reused_tokens)
        count("moved_requests", 1)
        count("approximate_requests", not all(c.decision == "exact" for c in reused.report.chunks))
        after = await ask(backend, moved, full=True, salt=salt)
        moved_full = await ask(backend, moved, full=True, store=False)
        compare("exact_after_reuse", after, moved_full)
        result["approximation"] = max(result.get("approximation", 0.0), logprob_gap(reused, moved_full))
        for strategy, ratio in LIVE_RATIOS.items():
            once = await ask(backend, moved, strategy=strategy, recompute_ratio=ratio, store=False)
            again = await ask(backend, moved, strategy=strategy, recompute_ratio=ratio, store=False)
            compare(f"{strategy}_again", again, once)
            count(f"{strategy}_tokens", once.report.num_recomputed_tokens)
        turn = moved.extended([*after.token_ids, 14, 15, 16])
        follow_up = await ask(backend, turn, full=True, salt=salt)
        compare("follow_up", follow_up, await ask(backend, turn, full=True, store=False))
        if len(prompt.token_ids) >= 64:
            count("follow_ups", 1)
            count("follow_up_prefix_hits", follow_up.report.num_reused_tokens >= 32)
        if index % 10 == 0:
            await control(backend, "purge", tenant="t")
    result["check"] = await control(backend, "check")
    stats = await control(backend, "stats")
    result["leaks"] = {name: stats[name] for name in ("num_pinned", "num_reserved", "num_running")}
    await backend.shutdown()
    return result


def main() -> None:
    cell = json.loads(sys.argv[1])
    if cell["in_process"]:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if cell["tensor_parallel_size"] > 1:
        cores = range(cell["tensor_parallel_size"])
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, cores))
    measure = measure_noise if cell.get("noise_only") else measure_cell
    print("RESULT " + json.dumps(asyncio.run(measure(cell))), flush=True)


if __name__ == "__main__":
    main()
