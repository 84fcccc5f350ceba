"""Slow tiers: blobs (bytes) by name, in memory, on disk or in Redis, behind one contract.

`DiskTier` is in `tiers.disk` and `RedisTier` in `tiers.redis`: each needs a library of its own.
"""

from __future__ import annotations

from cachecraft_rag.store.tiers.base import BlobTier, TierError, TierStats
from cachecraft_rag.store.tiers.guard import GuardedTier
from cachecraft_rag.store.tiers.memory import MemoryTier

__all__ = ["BlobTier", "GuardedTier", "MemoryTier", "TierError", "TierStats"]
