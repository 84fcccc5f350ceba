"""Where the tiers under measurement lie: a scratch folder, and a Redis server of its own."""

from __future__ import annotations

import importlib.util
import itertools
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cachecraft_rag.store.tiers import BlobTier, MemoryTier
from cachecraft_rag.store.tiers.disk import DiskTier

PATIENT_S = 10.0
"""Longer than in service: a fault by a deadline would be counted as a fast answer."""

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Places:
    """`redis_url` is empty where there is no server, and `no_redis` says why."""

    folder: Path
    redis_url: str = ""
    no_redis: str = ""

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("memory", "disk", "redis") if self.redis_url else ("memory", "disk")

    @property
    def shared_kinds(self) -> tuple[str, ...]:
        return self.kinds[1:]

    def open(self, kind: str, budget_bytes: int) -> BlobTier:
        """An empty tier."""
        name = f"tier-{next(_numbers)}"
        if kind == "memory":
            return MemoryTier(budget_bytes)
        if kind == "disk":
            return DiskTier(self.folder / name, budget_bytes, timeout_s=PATIENT_S)
        from cachecraft_rag.store.tiers.redis import RedisTier

        return RedisTier(self.redis_url, budget_bytes, prefix=name, timeout_s=PATIENT_S)


@contextmanager
def open_places(parent: Path | None) -> Iterator[Places]:
    """Scratch places, removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="store-bench-", dir=parent))
    why = _no_redis()
    try:
        if why:
            yield Places(folder, no_redis=why)
        else:
            with _redis_server(folder) as url:
                yield Places(folder, url)
    finally:
        shutil.rmtree(folder)


def _no_redis() -> str:
    if shutil.which("redis-server") is None:
        return "no redis-server was found; `apt-get install redis-server` provides it"
    if importlib.util.find_spec("redis") is None:
        return "no redis-py was found; `pip install redis` provides it"
    return ""


@contextmanager
def _redis_server(folder: Path) -> Iterator[str]:
    socket = folder / "redis.socket"
    command = ["redis-server", "--port", "0", "--unixsocket", str(socket), "--dir", str(folder)]
    command += ["--save", "", "--appendonly", "no"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if not any("ready to accept connections" in line.lower() for line in process.stdout):
                raise RuntimeError(f"{command} ended before it was ready")
            yield f"unix://{socket}"
        finally:
            process.kill()
