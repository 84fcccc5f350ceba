"""Where the chunk store lies and how much it may take, when the user does not say."""

from __future__ import annotations

from pathlib import Path

from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.store.cold_settings import ColdSettings

_FREE_SHARE = 4
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = Path("/sys/fs/cgroup/memory.current")


def free_host_bytes() -> int:
    """Bytes of memory this process tree can still get, a container's limit included."""
    import psutil

    free = int(psutil.virtual_memory().available)
    limit, used = _read_bytes(_CGROUP_LIMIT), _read_bytes(_CGROUP_USED)
    if limit is not None and used is not None:
        free = min(free, max(0, limit - used))
    return free


def choose_host_store_bytes(configured: int | None) -> int:
    """The configured size, else a quarter of the free memory."""
    return free_host_bytes() // _FREE_SHARE if configured is None else configured


def cold_settings(config: CacheCraftConfig, namespace: str) -> ColdSettings:
    """The disk and Redis tiers of an engine whose KV has this namespace."""
    from cachecraft_rag.models import cache_dir

    return ColdSettings(
        namespace=namespace,
        disk_dir=config.disk_store_dir or str(cache_dir() / "store"),
        disk_bytes=config.disk_store_bytes,
        redis_url=config.redis_url or "",
        redis_bytes=config.redis_store_bytes,
        codec=config.cold_codec,
        ttl_s=config.record_ttl_s,
        wait_s=config.cold_wait_s,
    )


def _read_bytes(path: Path) -> int | None:
    """The number in a cgroup file; None where there is no such file or no limit ("max")."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
