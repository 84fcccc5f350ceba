"""Faults planted in every hook of the connector: what each costs, and that the engine lives on.

python faults_cell.py MODELS_FOLDER      prints one JSON line
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from cell import control, model_folder, started
from workload import Answer, Prompt, ask, logprob_gap, mixed_prompts

CELL = {
    "model": "llama",
    "dtype": "float32",
    "eager": True,
    "in_process": True,
    "tensor_parallel_size": 1,
}


def planted(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("planted fault")


@contextmanager
def fault(target: str) -> Iterator[None]:
    with mock.patch(target, planted):
        yield


async def finish_reason(backend: Any, prompt: Prompt, **options: Any) -> str:
    """How a request ends that cannot be answered with reuse on."""
    try:
        answer = await ask(backend, prompt, **options)
    except Exception as error:
        return type(error).__name__
    return "error" if len(answer.token_ids) == 0 else "answered"


def outcome(answer: Answer, full: Answer) -> dict[str, Any]:
    return {
        "gap": logprob_gap(answer, full),
        "decision": answer.report.decision,
        "reason": answer.report.reason,
        "chunks": [chunk.decision for chunk in answer.report.chunks],
        "repaired": sum(c.num_computed_tokens for c in answer.report.chunks),
    }


async def measure(root: str) -> dict[str, Any]:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    cell = {**CELL, "root": root}
    model_folder(cell)
    backend = await started(cell, 256)
    records = get_kv_transfer_group().worker_side._records
    prompts = [p for p in mixed_prompts(40, 2048, 500, seed=9) if len(set(p.spans)) >= 2]
    side = "cachecraft_rag.vllm_connector."
    result: dict[str, Any] = {}

    async def stored(prompt: Prompt) -> tuple[Prompt, Answer]:
        """The prompt's chunks in the store, and the full answer to the same chunks moved."""
        await control(backend, "purge", tenant="t")
        await ask(backend, prompt, full=True)
        moved = prompt.moved([11, 12, 13])
        return moved, await ask(backend, moved, full=True, store=False)

    moved, full = await stored(prompts[0])
    records.clear()
    result["lost_record"] = outcome(await ask(backend, moved, strategy="naive", store=False), full)
    result["after_lost_record"] = outcome(await ask(backend, moved, strategy="naive", store=False), full)

    moved, full = await stored(prompts[1])
    with fault(side + "scheduler_side.build_plan"):
        result["plan"] = outcome(await ask(backend, moved, store=False), full)

    moved, full = await stored(prompts[2])
    with fault(side + "compat.run_recompute_pass"):
        result["pass"] = {"ends": await finish_reason(backend, moved, salt="s", store=False)}
    result["after_pass"] = outcome(await ask(backend, moved, full=True, salt="s", store=False), full)

    moved, full = await stored(prompts[3])
    with fault(side + "orders.LoadJob"):
        result["job"] = {"ends": await finish_reason(backend, moved, salt="j", store=False)}
    result["after_job"] = outcome(await ask(backend, moved, full=True, salt="j", store=False), full)

    for name, target in (
        ("capture", "capture._match_rows"),
        ("open_record", "worker_side.WorkerSide._new_record_sink"),
        ("reserve", "record_keeper.RecordMeta"),
    ):
        await control(backend, "purge", tenant="t")
        with fault(side + target):
            answer = await ask(backend, moved, full=True, max_tokens=24)
            clean = await ask(backend, moved, full=True, store=False, max_tokens=24)
            result[name] = outcome(answer, clean)
        stats = await control(backend, "stats")
        result[name]["num_records"] = stats["num_records"]

    await control(backend, "purge", tenant="t")
    with fault(side + "worker_side.measure_profile"):
        result["profile"] = outcome(await ask(backend, moved, full=True), full)
    result["profile"]["num_records"] = (await control(backend, "stats"))["num_records"]
    result["without_profile"] = outcome(await ask(backend, moved.moved([7]), store=False), full)

    for _ in range(20):  # abandoned records are given up after a number of steps
        await ask(backend, moved, full=True, store=False, max_tokens=2)
    stats = await control(backend, "stats")
    result["leaks"] = {name: stats[name] for name in ("num_pinned", "num_reserved", "num_running")}
    result["check"] = await control(backend, "check")
    await backend.shutdown()
    return result


if __name__ == "__main__":
    print("RESULT " + json.dumps(asyncio.run(measure(sys.argv[1]))), flush=True)
