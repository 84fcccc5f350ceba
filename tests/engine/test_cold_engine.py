"""KV outlives the engine: other processes answer from disk and Redis, and forget what was invalidated."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

SCRIPT = """
import json, sys
from cachecraft_rag import CacheCraftConfig, CacheCraftEngine, Chunk

order = json.loads(sys.argv[1])
texts = {"a": "The river flows from the hills through three towns to the sea.",
         "b": "The queen answered the letter of the captain in June."}
chunks = [Chunk(texts[name], doc_id=name) for name in "ab"]
prompt = f"{texts['a']}\\n\\n{texts['b']}\\n\\nWho wrote it?"
config = CacheCraftConfig(self_test=False, host_store_bytes=1 << 26, cold_wait_s=1.0, **order["config"])
settings = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 26}
with CacheCraftEngine(order["model"], config=config, **settings) as engine:
    if order.get("prefetch"):
        engine.start()
        engine.prefetch(chunks)
    out = engine.complete(prompt, chunks=chunks, max_tokens=8, ignore_eos=True)
    result = {"token_ids": out.token_ids, "tiers": [c.tier for c in out.report.chunks],
              "decisions": [str(c.decision) for c in out.report.chunks], "check": engine.check()}
    if order.get("invalidate"):
        result["dropped"] = engine.invalidate(order["invalidate"])
print("RESULT " + json.dumps(result), flush=True)
"""


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("cold-model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    """A Redis of the tests' own, on a socket in a folder of its own, which keeps nothing."""
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server; `apt-get install redis-server` provides it")
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        socket = f"{folder}/socket"
        command = ["redis-server", "--port", "0", "--unixsocket", socket, "--save", "", "--dir", folder]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        for line in server.stdout:
            if "ready to accept connections" in line.lower():
                break
        yield f"unix://{socket}"
        server.kill()
        server.communicate()


def run(model: Path, config: dict[str, Any], **order: Any) -> dict[str, Any]:
    """One engine in a process of its own: it answers once, and is closed."""
    arguments = json.dumps({"model": str(model), "config": config, **order})
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, arguments], capture_output=True, text=True, check=False
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            assert result["check"] == []
            return result
    raise AssertionError(f"the engine died:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")


def test_engines_share_kv_through_disk_and_redis(tiny_model: Path, redis_url: str, tmp_path: Path) -> None:
    """The second process answers its first request from the folder, the third, which has another folder,
    from Redis; all answers are the same. What the last invalidated is computed again by the next."""
    redis = {"redis_url": redis_url, "redis_store_bytes": 1 << 26}
    folder = {"disk_store_dir": str(tmp_path / "one"), "disk_store_bytes": 1 << 26}
    other_folder = {"disk_store_dir": str(tmp_path / "two"), "disk_store_bytes": 1 << 26}
    first = run(tiny_model, {**folder, **redis})
    second = run(tiny_model, folder)
    third = run(tiny_model, {**other_folder, **redis}, invalidate="b")
    fourth = run(tiny_model, redis, prefetch=True)
    assert [each["tiers"] for each in (first, second, third)] == [["", ""], ["disk"] * 2, ["redis"] * 2]
    assert first["token_ids"] == second["token_ids"] == third["token_ids"] == fourth["token_ids"]
    assert second["decisions"] == third["decisions"] == ["exact", "exact"]
    assert third["dropped"] == 1
    # Read ahead, it may be in host memory when the request comes.
    assert fourth["tiers"] in (["redis", ""], ["host", ""])
    assert fourth["decisions"] == ["exact", "computed"]
