"""What holds for all tests."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# A busy machine is no fault of the code: examples are not timed. Without a parent of its own the
# profile inherits all else from the one that is in force, such as Hypothesis's "ci".
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="module")
def one_faiss_thread() -> Iterator[None]:
    """For tests with many small searches: on a busy machine faiss's threads wait for each other in each."""
    faiss = pytest.importorskip("faiss")
    num_threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(num_threads)


@pytest.fixture(scope="session")
def run_python() -> Callable[..., dict[str, Any]]:
    """Runs a script in a process of its own, as an engine needs one; what it prints behind `RESULT `.
    Keywords are variables of its environment, where that does not set them."""
    return _run_python


def _run_python(script: Path, *arguments: str, **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**environment, **os.environ},
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return result
    raise AssertionError(f"{script.name} died:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")


class RedisServer:
    """A `redis-server` that keeps nothing unless told to, reachable by a socket in a folder of its own."""

    def __init__(self, *options: str) -> None:
        self._folder = tempfile.mkdtemp(prefix="redis-")
        self._options = options
        self.url = f"unix://{self._folder}/socket"
        self.start()

    def start(self) -> None:
        """Start and wait until it answers."""
        command = ["redis-server", "--port", "0", "--dir", self._folder, "--save", "", "--appendonly", "no"]
        command += ["--unixsocket", f"{self._folder}/socket", *self._options]
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


@pytest.fixture(scope="session")
def make_redis() -> Iterator[Callable[..., RedisServer]]:
    """Starts servers that a test may stop; takes the server's options."""
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server; `apt-get install redis-server` provides it")
    pytest.importorskip("redis", reason="no redis-py; `pip install redis` provides it")
    servers: list[RedisServer] = []

    def make(*options: str) -> RedisServer:
        servers.append(RedisServer(*options))
        return servers[-1]

    yield make
    for server in servers:
        server.remove()


@pytest.fixture(scope="session")
def redis_server(make_redis: Callable[..., RedisServer]) -> RedisServer:
    """A server that tests share; not to be stopped."""
    return make_redis()


@pytest.fixture(scope="session")
def redis_cluster_url(make_redis: Callable[..., RedisServer]) -> str:
    """A cluster of one node, which has all slots."""
    import redis

    port = _free_port()
    make_redis("--port", str(port), "--bind", "127.0.0.1", "--cluster-enabled", "yes")
    with redis.Redis(port=port) as client:
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        deadline_s = time.monotonic() + 30
        while client.cluster("INFO")["cluster_state"] != "ok":
            assert time.monotonic() < deadline_s, "the cluster did not form"
            threading.Event().wait(0.02)
    return f"redis+cluster://127.0.0.1:{port}"


def _free_port() -> int:
    """A port free now, low enough for a cluster's second port 10,000 above."""
    # Workers of pytest-xdist begin apart: what is free for one is free for all until a server takes it.
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for port in range(20_000 + 1_000 * (worker % 20), 50_000, 7):
        with socket.socket() as probe, socket.socket() as bus_probe:
            try:
                probe.bind(("127.0.0.1", port))
                bus_probe.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
            return port
    raise RuntimeError("no port is free")
