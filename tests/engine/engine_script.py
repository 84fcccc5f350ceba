"""An engine that does what it is told, line by line: see `EngineProcess` in the conftest beside it.

python engine_script.py '["MODEL", {CacheCraftConfig}, {vLLM engine arguments}]'
"""

from __future__ import annotations

import json
import sys
from typing import Any

from cachecraft_rag import CacheCraftConfig, CacheCraftEngine, Chunk

TEXTS = {
    "a": "The river flows from the hills through three towns to the sea.",
    "b": "The queen answered the letter of the captain in June.",
}
CHUNKS = {name: Chunk(text, doc_id=name) for name, text in TEXTS.items()}


def ask(engine: CacheCraftEngine, order: str = "ab", **options: Any) -> dict[str, Any]:
    prompt = "\n\n".join([*(TEXTS[name] for name in order), "Who wrote it?"])
    out = engine.complete(
        prompt,
        chunks=[CHUNKS[name] for name in order],
        **{"max_tokens": 8, "ignore_eos": True, "read_prefix_cache": False, **options},
    )
    return {
        "token_ids": out.token_ids,
        "tiers": [chunk.tier for chunk in out.report.chunks],
        "decisions": [str(chunk.decision) for chunk in out.report.chunks],
        "num_recomputed": out.report.num_recomputed_tokens,
        "reason": str(out.report.reason),
        "detail": out.report.detail,
        "check": engine.check(),
    }


def main() -> None:
    model, config, engine_args = json.loads(sys.argv[1])
    config = CacheCraftConfig(self_test=False, host_store_bytes=1 << 26, cold_wait_s=1.0, **config)
    settings = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 26, **engine_args}
    with CacheCraftEngine(model, config=config, **settings) as engine:
        engine.start()
        actions: dict[str, Any] = {
            "ask": lambda **options: ask(engine, **options),
            "flush": engine.flush,
            "invalidate": engine.invalidate,
            "invalidate_chunk": engine.invalidate_chunk,
            "prefetch": lambda: engine.prefetch(list(CHUNKS.values())),
        }
        for line in sys.stdin:
            action, arguments, options = json.loads(line)
            print("RESULT " + json.dumps(actions[action](*arguments, **options)), flush=True)


if __name__ == "__main__":
    main()
