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
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from workload import Answer, ask, describe_difference, logprob_gap, mixed_prompts, tie_gap

SAME = 1e-3
"""Log-probabilities closer than this are the same; two candidates closer than this are a tie."""
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
    # A script of its own finds only its own folder.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from benchmarks.tiny_models import tiny_model

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
    if cell["model"] == "default":
        return mixed_prompts(cell["num_prompts"], 40_000, max_tokens=1200, seed=7, most_tokens=300)
    return mixed_prompts(cell["num_prompts"], 2048, max_tokens=1200, seed=7)


async def measure_noise(cell: dict[str, Any]) -> dict[str, Any]:
    answers: list[list[Any]] = []
    for max_num_batched_tokens in (512, 8192):
        backend = await started(cell, max_num_batched_tokens)
        answers.append([await ask(backend, p, full=True, store=False) for p in prompts_of(cell)])
        await backend.shutdown()
    return {"noise": max(map(logprob_gap, *answers))}


@dataclass
class Comparison:
    """Pairs of answers that must be the same, by kind."""

    gaps: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    ties: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    differences: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("gaps", "ties", "differences")}

    def hold(self, kind: str, answer: Answer, other: Answer) -> None:
        gap, tie = logprob_gap(answer, other), tie_gap(other, answer)
        self.gaps[kind].append(gap)
        if tie is not None:
            self.ties[kind].append(tie)
        if gap > SAME or (tie is not None and tie > SAME):
            described = describe_difference(answer, other)
            self.differences.append(f"{kind}: {described}; {answer.report.why} | {other.report.why}")


async def measure_cell(cell: dict[str, Any]) -> dict[str, Any]:
    backend = await started(cell, 8192)
    pairs = Comparison()
    counts: Counter[str] = Counter()
    approximation = 0.0
    for index, prompt in enumerate(prompts_of(cell)):
        full = await ask(backend, prompt, full=True)
        everything = await ask(backend, prompt, strategy="recompute_all")
        pairs.hold("recompute_all", everything, full)
        counts["recomputed_tokens"] += everything.report.num_recomputed_tokens
        exact = await ask(backend, prompt, exact_only=True)
        pairs.hold("exact", exact, full)
        counts["exact_reused_tokens"] += exact.report.num_reused_tokens
        if index % 5:
            continue
        moved = partial(ask, backend, prompt.moved([11, 12, 13]))
        salt = f"shared-{index}"
        reused = await moved(strategy="naive", salt=salt, store=False)
        counts["shifted_reused_tokens"] += reused.report.num_reused_tokens
        counts["moved_requests"] += 1
        counts["approximate_requests"] += not all(c.decision == "exact" for c in reused.report.chunks)
        after = await moved(full=True, salt=salt)
        moved_full = await moved(full=True, store=False)
        pairs.hold("exact_after_reuse", after, moved_full)
        approximation = max(approximation, logprob_gap(reused, moved_full))
        for strategy, ratio in LIVE_RATIOS.items():
            live = partial(moved, strategy=strategy, recompute_ratio=ratio, store=False)
            once = await live()
            pairs.hold(f"{strategy}_again", once, await live())
            counts[f"{strategy}_tokens"] += once.report.num_recomputed_tokens
        turn = prompt.moved([11, 12, 13]).extended([*after.token_ids, 14, 15, 16])
        follow_up = await ask(backend, turn, full=True, salt=salt)
        pairs.hold("follow_up", follow_up, await ask(backend, turn, full=True, store=False))
        if len(prompt.token_ids) >= 64:
            counts["follow_ups"] += 1
            counts["follow_up_prefix_hits"] += follow_up.report.num_reused_tokens >= 32
        if index % 10 == 0:
            await control(backend, "purge", tenant="t")
    stats = await control(backend, "stats")
    check = await control(backend, "check")
    await backend.shutdown()
    leaks = {name: stats[name] for name in ("num_pinned", "num_reserved", "num_running")}
    return {
        **pairs.to_dict(),
        "counts": counts,
        "approximation": approximation,
        "check": check,
        "leaks": leaks,
    }


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
