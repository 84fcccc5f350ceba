"""What the stress test writes, where it lies, and who says what may be found of it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from cachecraft_rag.chunks import AttentionProfile, ChunkKey, RecordMeta
from cachecraft_rag.store.cold import ColdStore, ColdVariant
from cachecraft_rag.store.cold_record import ColdRecord
from cachecraft_rag.store.record_format import KV, ArrayForm
from cachecraft_rag.store.tiers import BlobTier, GuardedTier
from cachecraft_rag.store.tiers.disk import DiskTier

NUM_RANKS = 2
NUM_KEYS = 6
NUM_PREFIXES = 2
SHARED = "shared"
"""Tenant whose chunks everybody writes and drops at once; each other tenant has one writer."""
STALLED = "stalled"
STALLED_TOKENS = 251
"""More than any other record has: its file is known by its size."""
WATCHDOG_SPARE_S = 90.0
PATIENT_S = 60.0
"""A busy machine is no fault of the store."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`stall_s`: how long the first process has one read of the disk stalled, 0 for not at all."""

    folder: str
    disk_bytes: int
    redis_url: str
    redis_bytes: int
    state_file: str
    process: int
    num_processes: int
    num_threads: int
    duration_s: float
    stall_s: float = 0.0


def num_tokens_of(key: str) -> int:
    """One of several lengths; the shortest records are below the size from which disk values are files."""
    return STALLED_TOKENS if key == STALLED else (3, 40, 90, 150, 200, 250)[int(key[1:]) % NUM_KEYS]


def form_of(key: str) -> dict[str, ArrayForm]:
    return {KV: ArrayForm("bfloat16", (2, 2, num_tokens_of(key), 2, 32))}


def bits(size: int, *name: object) -> np.ndarray:
    """Bits that follow from a name alone."""
    seed = int.from_bytes(hashlib.blake2b(repr(name).encode(), digest_size=8).digest(), "little")
    return np.random.default_rng(seed).integers(0, 1 << 16, size, np.uint16)


def kv_of(meta: RecordMeta, rank: int) -> np.ndarray:
    form = form_of(meta.key)[KV]
    flat = bits(form.num_bytes // 2, meta.tenant, meta.key, meta.prefix_hash, rank)
    return flat.view(ml_dtypes.bfloat16).reshape(form.shape)


def scores_of(meta: RecordMeta) -> np.ndarray:
    return bits(meta.num_tokens, meta.tenant, meta.key, meta.prefix_hash, "scores").astype(np.float32)


def meta_of(tenant: str, key: str, prefix: int) -> RecordMeta:
    return RecordMeta(
        record_id=0,
        key=ChunkKey(key),
        tenant=tenant,
        num_tokens=num_tokens_of(key),
        start=prefix,
        size_bytes=1,
        prefix_hash=f"p{prefix}",
        profile=AttentionProfile(0.5, 0.5, (), np.zeros(0, np.float32)),
    )


def put(cold: ColdStore, meta: RecordMeta) -> None:
    """Both ranks' shares, then the manifest where both were taken, as the scheduler side does it."""
    parts = [cold.put_part(meta, rank, kv_of(meta, rank), scores_of(meta)) for rank in range(NUM_RANKS)]
    tiers = frozenset.intersection(*(frozenset(tiers) for _, tiers in parts))
    cold.publish(meta, [entry for entry, _ in parts], tiers)


def is_same(record: ColdRecord, meta: RecordMeta, rank: int) -> bool:
    """Bit by bit: KV that is not a number is KV too."""
    return (
        record.token_scores is not None
        and record.kv.tobytes() == kv_of(meta, rank).tobytes()
        and record.token_scores.tobytes() == scores_of(meta).tobytes()
    )


def open_cold(settings: Settings) -> ColdStore:
    """Of its own for each process, as each vLLM process has one."""
    tiers: dict[str, BlobTier] = {
        "disk": DiskTier(settings.folder, settings.disk_bytes, timeout_s=PATIENT_S),
    }
    if settings.redis_url:
        from cachecraft_rag.store.tiers.redis import RedisTier

        tiers["redis"] = RedisTier(settings.redis_url, settings.redis_bytes, timeout_s=PATIENT_S)
    return ColdStore({name: GuardedTier(tier) for name, tier in tiers.items()}, "model", NUM_RANKS)


class Presence:
    """What each tenant's writer says of its chunks, in memory that all processes share.

    An even number: the chunk was dropped, or never stored, and must not be found. An odd one: it may be
    found. Only the writer changes it, to odd before it writes and to even after it has dropped; the same
    even number before and after a look means that the chunk was gone all the while.
    """

    def __init__(self, path: str, num_writers: int) -> None:
        self._numbers = np.memmap(path, np.int64, "r+", shape=(num_writers, NUM_KEYS))
        self.num_writers = num_writers

    @staticmethod
    def create(path: Path, num_writers: int) -> None:
        path.write_bytes(bytes(8 * num_writers * NUM_KEYS))

    def number(self, writer: int, key: int) -> int:
        return int(self._numbers[writer, key])

    def may_be(self, writer: int, key: int) -> None:
        self._numbers[writer, key] |= 1

    def is_gone(self, writer: int, key: int) -> None:
        self._numbers[writer, key] += self._numbers[writer, key] & 1

    def find(self, cold: ColdStore, writer: int, key: int) -> tuple[list[ColdVariant], list[str]]:
        """The variants of a writer's chunk, and a sentence if they must not be there."""
        before = self.number(writer, key)
        variants = cold.find(f"t{writer}", ChunkKey(f"k{key}"))
        is_fault = variants and self.was_gone(before, writer, key)
        return variants, [f"found {variants[0].name}, which was dropped"] if is_fault else []

    def was_gone(self, before: int, writer: int, key: int) -> bool:
        """Whether the chunk has been gone ever since its number was `before`."""
        return before % 2 == 0 and self.number(writer, key) == before

    def all_faults(self, cold: ColdStore) -> list[str]:
        """What is found though its writer has dropped it."""
        places = ((writer, key) for writer in range(self.num_writers) for key in range(NUM_KEYS))
        return [fault for place in places for fault in self.find(cold, *place)[1]]
