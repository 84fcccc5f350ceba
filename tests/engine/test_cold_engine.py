"""KV outlives the engine: other processes answer from disk and Redis, and forget what was invalidated."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

SCRIPT = """
import json, sys
from cachecraft_rag import CacheCraftConfig, CacheCraftEngine, Chunk

texts = {"a": "The river flows from the hills through three towns to the sea.",
         "b": "The queen answered the letter of the captain in June."}
chunks = [Chunk(texts[name], doc_id=name) for name in "ab"]
prompt = f"{texts['a']}\\n\\n{texts['b']}\\n\\nWho wrote it?"

def ask(engine):
    out = engine.complete(prompt, chunks=chunks, max_tokens=8, ignore_eos=True, read_prefix_cache=False)
    return {"token_ids": out.token_ids, "tiers": [c.tier for c in out.report.chunks],
            "decisions": [str(c.decision) for c in out.report.chunks], "check": engine.check()}

model, config = json.loads(sys.argv[1])
config = CacheCraftConfig(self_test=False, host_store_bytes=1 << 26, cold_wait_s=1.0, **config)
settings = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 26}
with CacheCraftEngine(model, config=config, **settings) as engine:
    engine.start()
    for line in sys.stdin:
        action, *arguments = json.loads(line)
        answer = {"ask": lambda: ask(engine), "flush": engine.flush, "invalidate": engine.invalidate,
                  "invalidate_chunk": engine.invalidate_chunk,
                  "prefetch": lambda: engine.prefetch(chunks)}[action](*arguments)
        print("RESULT " + json.dumps(answer), flush=True)
"""


class EngineProcess:
    """An engine in a process of its own, which does what it is told."""

    def __init__(self, model: Path, **config: Any) -> None:
        arguments = [sys.executable, "-c", SCRIPT, json.dumps([str(model), config])]
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115  (closed with the process)
        self._process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        self._errors.close()

    def __call__(self, action: str, *arguments: str) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([action, *arguments]) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
        self._errors.seek(0)
        raise AssertionError(f"the engine died:\n{self._errors.read()[-6000:]}")

    def ask(self) -> dict[str, Any]:
        answer: dict[str, Any] = self("ask")
        assert answer.pop("check") == []
        return answer


def on_disk(folder: Path) -> dict[str, Any]:
    return {"disk_store_dir": str(folder), "disk_store_bytes": 1 << 26}


def test_engines_share_kv_through_disk_and_redis(tiny_model: Path, redis_server: Any, tmp_path: Path) -> None:
    """A second process on the same folder answers its first request from disk, a third on another folder from
    Redis, with the same answers; and what it used is on its own disk from then on."""
    redis = {"redis_url": redis_server.url, "redis_store_bytes": 1 << 26}
    with EngineProcess(tiny_model, **on_disk(tmp_path / "one"), **redis) as first:
        answer = first.ask()
    with EngineProcess(tiny_model, **on_disk(tmp_path / "one"), **redis) as second:
        from_disk = second.ask()
    with EngineProcess(tiny_model, **on_disk(tmp_path / "two"), **redis) as third:
        from_redis = third.ask()
        third("flush")
    with EngineProcess(tiny_model, **on_disk(tmp_path / "two")) as fourth:
        promoted = fourth.ask()
    assert [each["tiers"] for each in (answer, from_disk, from_redis, promoted)] == [
        ["", ""],
        ["disk"] * 2,
        ["redis"] * 2,
        ["disk"] * 2,
    ]
    assert from_disk["decisions"] == from_redis["decisions"] == ["exact", "exact"]
    assert answer["token_ids"] == from_disk["token_ids"] == from_redis["token_ids"] == promoted["token_ids"]


def test_invalidating_in_one_process_binds_the_others(tiny_model: Path, tmp_path: Path) -> None:
    """When it returns, the other process neither uses what it has in memory, nor finds it on disk."""
    folder = on_disk(tmp_path / "shared")
    with EngineProcess(tiny_model, **folder) as one, EngineProcess(tiny_model, **folder) as other:
        answer = one.ask()
        one("flush")
        other("prefetch")
        assert other.ask()["decisions"] == ["exact", "exact"]
        assert one("invalidate", "b") == 1
        after = other.ask()
        assert after["decisions"] == ["exact", "computed"]
        assert other.ask()["decisions"] == ["exact", "exact"]
        one("invalidate_chunk", "The queen answered the letter of the captain in June.")
        last = other.ask()
    assert last["decisions"] == ["exact", "computed"]
    assert last["token_ids"] == after["token_ids"] == answer["token_ids"]
