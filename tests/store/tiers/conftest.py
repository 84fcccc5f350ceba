"""Every kind of tier, and a Redis server of the tests' own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cachecraft_rag.store.tiers import BlobTier, GuardedTier, MemoryTier
from cachecraft_rag.store.tiers.disk import DiskTier

BLOB_BYTES = 128 * 1024
ENTRY_BYTES = 512
DISK_INDEX_BYTES = 825_000
PATIENT_S = 10.0
"""A busy machine is no fault of the tier."""


@pytest.fixture
def own_redis(make_redis: Callable[..., Any]) -> Any:
    """A server that a test may stop."""
    return make_redis()


prefixes = (f"test-{number}" for number in itertools.count())


class TierMaker:
    """Makes tiers of one kind; `again` opens what `new` made last once more, as another process would."""

    def __init__(self, kind: str, redis_url: str, tmp_path: Path) -> None:
        self.kind = kind
        self.is_shared = kind not in ("memory", "guarded")
        self._redis_url = redis_url
        self._tmp_path = tmp_path
        self._opened: list[BlobTier] = []
        self._place = ""
        self._budget_bytes = 0

    def new(self, num_blobs: int = 8) -> BlobTier:
        """An empty tier with room for so many blobs of `BLOB_BYTES`, and a quarter to spare."""
        room_bytes = num_blobs * (BLOB_BYTES + ENTRY_BYTES) + BLOB_BYTES // 4
        self._budget_bytes = room_bytes + DISK_INDEX_BYTES * (self.kind == "disk")
        self._place = next(prefixes)
        return self.again()

    def again(self) -> BlobTier:
        tier = self._open()
        self._opened.append(tier)
        return tier

    def close(self) -> None:
        for tier in self._opened:
            tier.close()

    def _open(self) -> BlobTier:
        if self.kind == "memory":
            return MemoryTier(self._budget_bytes)
        if self.kind == "guarded":
            return GuardedTier(MemoryTier(self._budget_bytes))
        if self.kind == "disk":
            return DiskTier(self._tmp_path / self._place, self._budget_bytes, timeout_s=PATIENT_S)
        from cachecraft_rag.store.tiers.redis import RedisTier

        return RedisTier(self._redis_url, self._budget_bytes, prefix=self._place, timeout_s=PATIENT_S)


@pytest.fixture(params=["memory", "guarded", "disk", "redis", "redis-cluster"])
def tiers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TierMaker]:
    redis_url = ""
    if request.param == "redis":
        redis_url = request.getfixturevalue("redis_server").url
    elif request.param == "redis-cluster":
        redis_url = request.getfixturevalue("redis_cluster_url")
    maker = TierMaker(request.param, redis_url, tmp_path)
    yield maker
    maker.close()


@pytest.fixture
def make_disk_tier(tmp_path: Path) -> Iterator[Callable[..., DiskTier]]:
    """Opens a tier in `tmp_path / "tier"`; what a test leaves open is closed."""
    opened: list[DiskTier] = []

    def make(budget_bytes: int = 8 * 2**20, *, timeout_s: float = PATIENT_S) -> DiskTier:
        opened.append(DiskTier(tmp_path / "tier", budget_bytes, timeout_s=timeout_s))
        return opened[-1]

    yield make
    for tier in opened:
        tier.close()
