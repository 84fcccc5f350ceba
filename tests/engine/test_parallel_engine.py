"""An engine of several workers: each captures, keeps and loads the KV of its own heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

pytestmark = pytest.mark.engine

RunEngine = Callable[..., Any]
TWO_RANKS = {
    "engine_args": {"tensor_parallel_size": 2},
    "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
}


def test_ranks_share_one_store(
    run_engine: RunEngine, tiny_model: Path, make_redis: Callable[..., Any], tmp_path: Path
) -> None:
    """Repairing all of it equals full compute. A second process answers its first request from Redis, where
    every rank wrote its share, but for the chunk of which one rank finds nothing: all ranks compute that."""
    server = make_redis()

    def engine(folder: str) -> Any:
        shared = {"redis_url": server.url, "redis_store_bytes": 1 << 26}
        return run_engine(tiny_model, disk_store_dir=str(tmp_path / folder), **shared, **TWO_RANKS)

    with engine("one") as one:
        answer = one.ask()
        moved = one.ask("ba", reuse="off", store=False)
        repaired = one.ask("ba", reuse="recompute_all", store=False)
        naive = one.ask("ba", reuse="naive", store=False)
    assert answer["decisions"] == ["computed"] * 2
    assert repaired["num_recomputed"] > 0 and repaired["token_ids"] == moved["token_ids"]
    assert naive["decisions"] == ["reused"] * 2 and naive["num_recomputed"] == 0
    lose_share_of_a_rank(server.url)
    with engine("two") as two:
        in_part = two.ask()
        again = two.ask()
    assert sorted(in_part["tiers"]) == ["", "redis"]
    assert again["decisions"] == ["exact"] * 2
    assert in_part["token_ids"] == again["token_ids"] == answer["token_ids"]


def lose_share_of_a_rank(url: str) -> None:
    """Delete the smaller of the blobs that rank 1 wrote, behind the back of the tier's books. Were the larger
    one missing, too little would be left to reuse."""
    with redis.Redis.from_url(url) as client:
        blobs = [key for key in client.scan_iter("*") if key.endswith(b"/1of2")]
        assert len(blobs) == 2
        assert client.delete(min(blobs, key=client.strlen)) == 1
