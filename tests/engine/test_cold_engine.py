"""KV outlives the engine: other processes answer from disk and Redis, and forget what was invalidated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

RunEngine = Callable[..., Any]


def on_disk(folder: Path) -> dict[str, Any]:
    return {"disk_store_dir": str(folder), "disk_store_bytes": 1 << 26}


def test_engines_share_kv_through_disk_and_redis(
    run_engine: RunEngine, tiny_model: Path, redis_server: Any, tmp_path: Path
) -> None:
    """A second process on the same folder answers its first request from disk, a third on another folder from
    Redis, with the same answers; and what it used is on its own disk from then on."""
    redis = {"redis_url": redis_server.url, "redis_store_bytes": 1 << 26}
    with run_engine(tiny_model, **on_disk(tmp_path / "one"), **redis) as first:
        answer = first.ask()
    with run_engine(tiny_model, **on_disk(tmp_path / "one"), **redis) as second:
        from_disk = second.ask()
    with run_engine(tiny_model, **on_disk(tmp_path / "two"), **redis) as third:
        from_redis = third.ask()
        third("flush")
    with run_engine(tiny_model, **on_disk(tmp_path / "two")) as fourth:
        promoted = fourth.ask()
    assert [each["tiers"] for each in (answer, from_disk, from_redis, promoted)] == [
        ["", ""],
        ["disk"] * 2,
        ["redis"] * 2,
        ["disk"] * 2,
    ]
    assert from_disk["decisions"] == from_redis["decisions"] == ["exact", "exact"]
    assert answer["token_ids"] == from_disk["token_ids"] == from_redis["token_ids"] == promoted["token_ids"]


def test_invalidating_in_one_process_binds_the_others(
    run_engine: RunEngine, tiny_model: Path, tmp_path: Path
) -> None:
    """When it returns, the other process neither uses what it has in memory, nor finds it on disk."""
    folder = on_disk(tmp_path / "shared")
    with run_engine(tiny_model, **folder) as one, run_engine(tiny_model, **folder) as other:
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
