"""Every kind of tier, and a Redis server of the tests' own."""

from __future__ import annotations

import itertools
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cachecraft_rag.store.tiers import BlobTier, GuardedTier, MemoryTier
from cachecraft_rag.store.tiers.disk import DiskTier

BLOB_BYTES = 128 * 1024
ENTRY_BYTES = 512
DISK_INDEX_BYTES = 825_000
PATIENT_S = 10.0
"""A busy machine is no fault of the tier."""


class RedisServer:
    """A `redis-server` that keeps nothing, reachable by a socket in a folder of its own."""

    def __init__(self, *options: str) -> None:
        self._folder = tempfile.mkdtemp(prefix="redis-")
        self._options = options
        self.url = f"unix://{self._folder}/socket"
        self.start()

    def start(self) -> None:
        """Start, empty, and wait until it answers."""
        command = ["redis-server", "--save", "", "--appendonly", "no", "--dir", self._folder]
        command += ["--unixsocket", f"{self._folder}/socket", *(self._options or ("--port", "0"))]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if "ready to accept connections" in line.lower():
                return
        raise RuntimeError(f"{command} ended before it was ready")

    def freeze(self) -> None:
        """Let it hold its connections and answer nothing."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self._folder)


def free_port() -> int:
    """A port free now, low enough for a cluster's second port 10,000 above."""
    for port in range(20_000, 50_000, 7):
        with socket.socket() as probe, socket.socket() as bus_probe:
            try:
                probe.bind(("127.0.0.1", port))
                bus_probe.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
            return port
    raise RuntimeError("no port is free")


@pytest.fixture(scope="session")
def need_redis() -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server; `apt-get install redis-server` provides it")
    pytest.importorskip("redis", reason="no redis-py; `pip install redis` provides it")


@pytest.fixture(scope="session")
def redis_server(need_redis: None) -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.remove()


@pytest.fixture
def own_redis(need_redis: None) -> Iterator[RedisServer]:
    """A server that a test may stop."""
    server = RedisServer()
    yield server
    server.remove()


@pytest.fixture(scope="session")
def redis_cluster_url(need_redis: None) -> Iterator[str]:
    """A cluster of one node, which has all slots."""
    import redis

    port = free_port()
    server = RedisServer("--port", str(port), "--bind", "127.0.0.1", "--cluster-enabled", "yes")
    with redis.Redis(port=port) as client:
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        deadline_s = time.monotonic() + 30
        while client.cluster("INFO")["cluster_state"] != "ok":
            assert time.monotonic() < deadline_s, "the cluster did not form"
            threading.Event().wait(0.02)
    yield f"redis+cluster://127.0.0.1:{port}"
    server.remove()


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
