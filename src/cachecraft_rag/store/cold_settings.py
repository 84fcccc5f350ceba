"""Which cold tiers there are, as plain data that travels to vLLM's processes, and how they are opened."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from cachecraft_rag.errors import StoreError
from cachecraft_rag.store.journal import Journal
from cachecraft_rag.store.tiers import BlobTier, GuardedTier

logger = logging.getLogger(__name__)

DISK, REDIS = "disk", "redis"


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdSettings:
    """Attributes as in `CacheCraftConfig`, where None has become a value.

    Attributes:
        namespace: fingerprint of the model and its KV.
        disk_dir: folder of the disk tier and its journal; unused if `disk_bytes` is 0.
        redis_url: empty if there is no Redis tier.
        codec: how KV is stored, a name of `codecs`.
        ttl_s: seconds after which a variant is not found any more.
        wait_s: longest that a request waits for cold records.
    """

    namespace: str
    disk_dir: str = ""
    disk_bytes: int = 0
    redis_url: str = ""
    redis_bytes: int = 0
    codec: str = "raw"
    ttl_s: float | None = None
    wait_s: float = 0.05

    @property
    def has_tiers(self) -> bool:
        return bool(self.disk_bytes or self.redis_url)

    @property
    def name(self) -> str:
        """The namespace, short enough for a file's name or a key of Redis."""
        return blake2b(self.namespace.encode(), digest_size=8).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ColdSettings:
        return cls(**data)


def open_tiers(settings: ColdSettings) -> dict[str, BlobTier]:
    """The tiers that can be opened, the fastest first. One that cannot is left out, with a warning: a
    fault in the cache is no reason not to answer."""
    tiers: dict[str, BlobTier] = {}
    for name, opener in ((DISK, _open_disk), (REDIS, _open_redis)):
        try:
            tier = opener(settings)
        except StoreError as error:
            logger.warning("the %s tier is left out: %s", name, error)
            continue
        if tier is not None:
            tiers[name] = GuardedTier(tier)
    return tiers


def _open_disk(settings: ColdSettings) -> BlobTier | None:
    if not settings.disk_bytes:
        return None
    from cachecraft_rag.store.tiers.disk import DiskTier

    return DiskTier(Path(settings.disk_dir) / "blobs", settings.disk_bytes)


def _open_redis(settings: ColdSettings) -> BlobTier | None:
    if not settings.redis_url:
        return None
    from cachecraft_rag.store.tiers.redis import RedisTier

    return RedisTier(settings.redis_url, settings.redis_bytes)


def open_journal(settings: ColdSettings) -> Journal:
    """The journal of those who share the tiers: in Redis if there is one, else in the disk tier's folder.

    Raises:
        JournalError: it cannot be opened; then the tiers must not be used either.
    """
    if settings.redis_url:
        from cachecraft_rag.store.journal.redis import RedisJournal

        return RedisJournal(settings.redis_url, prefix=f"cachecraft:{settings.name}")
    from cachecraft_rag.store.journal.sqlite import SqliteJournal

    return SqliteJournal(Path(settings.disk_dir) / f"journal-{settings.name}")
