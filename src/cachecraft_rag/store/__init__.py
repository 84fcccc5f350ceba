"""Chunk stores: the scheduler side's books over the KV that the workers hold."""

from __future__ import annotations

from cachecraft_rag.store.base import ChunkStore, Refusal, Reservation, StoreStats, TenantStats
from cachecraft_rag.store.host import HostChunkStore
from cachecraft_rag.store.null import NullChunkStore

__all__ = [
    "ChunkStore",
    "HostChunkStore",
    "NullChunkStore",
    "Refusal",
    "Reservation",
    "StoreStats",
    "TenantStats",
]
