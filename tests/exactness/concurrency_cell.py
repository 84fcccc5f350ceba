"""200 mixed requests, first each alone, then eight in flight with aborts and preemptions.

    python concurrency_cell.py MODELS_FOLDER      prints one JSON line

Both rounds start from the same stored chunks, each in a tenant of its own, so that a request has the
same plan alone and among others.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from typing import Any

from cell import control, model_folder
from workload import Answer, Prompt, ask, join, logprob_gap, tie_gap

NUM_REQUESTS = 200
NUM_IN_FLIGHT = 8
NUM_ABORTS = 20
MOST_ABORTS = 1500
MAX_TOKENS = 48
VOCAB_SIZE = 2048


async def start(root: str) -> Any:
    from cachecraft_rag.config import CacheCraftConfig
    from cachecraft_rag.engine.backends import make_backend, make_vllm_config

    cell = {"model": "llama", "root": root}
    vllm_config, reason = make_vllm_config(
        str(model_folder(cell)),
        {
            "dtype": "float32",
            "max_model_len": 1024,
            # Prompts take several steps, and eight of them outgrow the blocks while they decode.
            "max_num_batched_tokens": 192,
            "num_gpu_blocks_override": 60,
            "max_num_seqs": 16,
        },
        CacheCraftConfig(max_variants_per_chunk=1, host_store_bytes=1 << 30),
        in_process=False,
    )
    assert not reason, reason
    backend = make_backend(vllm_config, in_process=False)
    await backend.start()
    await backend.collective_rpc("cachecraft_attach")
    return backend


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, VOCAB_SIZE) for _ in range(count)]


def make_pool() -> list[list[int]]:
    rng = random.Random(1)
    return [words(rng, rng.randint(30, 110)) for _ in range(12)]


def make_requests(pool: list[list[int]]) -> list[tuple[Prompt, dict[str, Any]]]:
    """Hits in any order, repeats, chunks never seen before, no chunk at all, and every strategy.

    Neighbours share a system prompt of three blocks, which the second finds in vLLM's own prefix
    cache, often in the very step that computes it. Two words of its own behind it keep a request's
    chunks out of that cache: else a request's plan would depend on what ran before.
    """
    rng = random.Random(2)
    requests = []
    lead: list[int] = []
    for index in range(NUM_REQUESTS):
        if index % 2 == 0:
            lead = words(rng, 96)
        chunks = [rng.choice(pool) for _ in range(rng.randint(0, 4))]
        chunks += [words(rng, rng.randint(20, 60)) for _ in range(rng.random() < 0.4)]
        rng.shuffle(chunks)
        own = [10 + index, 300 + index]
        parts: list[tuple[list[int], bool]] = [(lead + own, False)]
        parts += [(chunk, True) for chunk in chunks]
        parts.append((words(rng, rng.randint(1, 40)), False))
        strategy = rng.choice(["cachecraft", "naive", "recompute_all", "cachecraft"])
        options = {"strategy": strategy, "full": rng.random() < 0.1, "store": rng.random() < 0.9}
        requests.append((join(parts), options))
    return requests


async def fill_store(backend: Any, pool: list[list[int]], tenant: str) -> None:
    for chunk in pool:
        await ask(backend, join([(chunk, True), ([5], False)]), tenant=tenant, full=True)


async def alone(backend: Any, requests: list[Any], tenant: str) -> list[Answer]:
    return [
        await ask(backend, prompt, tenant=tenant, salt=tenant, max_tokens=MAX_TOKENS, **options)
        for prompt, options in requests
    ]


async def together(backend: Any, requests: list[Any], tenant: str) -> list[Answer]:
    gate = asyncio.Semaphore(NUM_IN_FLIGHT)

    async def one(prompt: Prompt, options: dict[str, Any]) -> Answer:
        async with gate:
            return await ask(backend, prompt, tenant=tenant, salt=tenant, max_tokens=MAX_TOKENS, **options)

    answers = asyncio.gather(*(one(prompt, options) for prompt, options in requests))
    await abort_some(backend, requests, tenant)
    return list(await answers)


async def abort_some(backend: Any, requests: list[Any], tenant: str) -> None:
    """Abort requests until enough were caught in the very step of their load.

    How long after its start that step comes depends on the machine and on what else is in flight, so
    the delays spread evenly over the orders of magnitude.
    """
    rng = random.Random(3)
    with_chunks = [prompt for prompt, _ in requests if prompt.spans]
    for attempt in range(MOST_ABORTS):
        prompt = rng.choice(with_chunks)
        task = asyncio.ensure_future(
            ask(backend, prompt, tenant=tenant, strategy="recompute_all", store=False, max_tokens=8)
        )
        await asyncio.sleep(10 ** rng.uniform(-3, -0.5))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if attempt % 10 == 9:
            stats = await control(backend, "stats")
            if stats["num_aborted_in_load"] >= NUM_ABORTS:
                return


async def measure(root: str) -> dict[str, Any]:
    backend = await start(root)
    pool = make_pool()
    requests = make_requests(pool)
    for tenant in ("alone", "together"):
        await fill_store(backend, pool, tenant)
    expected = await alone(backend, requests, "alone")
    before = await control(backend, "stats")
    got = await together(backend, requests, "together")
    stats = await control(backend, "stats")
    differing = [
        {"index": index, "tie": tie, "gap": logprob_gap(a, b)}
        for index, (a, b) in enumerate(zip(expected, got, strict=True))
        if (tie := tie_gap(a, b)) is not None
    ]
    result = {
        "num_answers": len(got),
        "differing": differing,
        "same_decisions": sum(
            [c.decision for c in a.report.chunks] == [c.decision for c in b.report.chunks]
            for a, b in zip(expected, got, strict=True)
        ),
        "moved_chunks": stats["num_moved_chunks"] - before["num_moved_chunks"],
        "preemptions": stats["num_readmitted"] - before["num_readmitted"],
        "aborts_in_load": stats["num_aborted_in_load"],
        "leaks": {name: stats[name] for name in ("num_pinned", "num_reserved", "num_running")},
        "lost_blocks": before["num_free_blocks"] - stats["num_free_blocks"],
        "check": await control(backend, "check"),
        "num_records": stats["num_records"],
        "worker_records": (await backend.collective_rpc("cachecraft_stats"))[0]["num_records"],
    }
    await backend.shutdown()
    return result


if __name__ == "__main__":
    print("RESULT " + json.dumps(asyncio.run(measure(sys.argv[1]))), flush=True)
