"""Two engine processes share chunks through Redis, and a document changed in one is changed for the other.

    redis-server --port 6379 &
    python examples/two_processes.py redis://localhost:6379/0

The processes could be on two machines: all they share is the Redis server. Takes a minute on two cores.
"""

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from cachecraft_rag import CacheCraftConfig, CacheCraftEngine, Chunk, default_model

BRIDGE = "The north bridge was built in 1887 by the engineer Ada Holt. It crosses the river below the mill. "
FERRY = "The ferry leaves at nine in the morning and at four in the afternoon, except on the first of May."
OLD = Chunk(BRIDGE + "It is open to carts and to people on foot.", doc_id="bridge", version="1")
NEW = Chunk(BRIDGE + "It has been closed since the flood of last autumn.", doc_id="bridge", version="2")


def start(redis_url: str) -> None:
    """In each process: one engine, which only Redis connects with the other's."""
    global engine
    config = CacheCraftConfig(redis_url=redis_url, redis_store_bytes=1 << 30, cold_wait_s=1.0)
    sizes = {"dtype": "float32", "max_model_len": 2048, "kv_cache_memory_bytes": 1 << 28}
    engine = CacheCraftEngine(default_model(), config=config, **sizes)
    engine.start()


def ask(bridge: Chunk) -> str:
    prompt = f"{bridge.text}\n\n{FERRY}\n\nWho built the bridge?"
    chunks = [bridge, Chunk(FERRY, doc_id="ferry", version="1")]
    out = engine.chat([{"role": "user", "content": prompt}], chunks=chunks, max_tokens=12)
    engine.flush()  # so that the other process finds what was computed here
    parts = [f"{c.doc_id} v{c.version} {c.decision} {c.tier} ({c.reason})" for c in out.report.chunks]
    return f"{out.report.ttft_s:.2f} s, {', '.join(parts)}: {out.text!r}"


def change() -> int:
    return engine.replace("bridge", "2", [NEW])


def stop() -> None:
    engine.close()


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    spawn = get_context("spawn")  # vLLM is not to be forked
    one, two = (ProcessPoolExecutor(1, spawn, start, (sys.argv[1],)) for _ in range(2))
    print("one:               ", one.submit(ask, OLD).result())
    print("two:               ", two.submit(ask, OLD).result())
    print("one replaces bridge:", one.submit(change).result(), "record dropped in its memory")
    print("two, the old text: ", two.submit(ask, OLD).result())
    print("one, the new text: ", one.submit(ask, NEW).result())
    print("two, the new text: ", two.submit(ask, NEW).result())
    for each in (one, two):
        each.submit(stop).result()
