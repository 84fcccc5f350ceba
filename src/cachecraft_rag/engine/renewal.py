"""How an engine is told what a document consists of now."""

from __future__ import annotations

from collections.abc import Sequence

from cachecraft_rag.chunks import Chunk
from cachecraft_rag.engine.api import ChatEngine


def renew(
    engine: ChatEngine,
    doc_id: str,
    version: str | None,
    chunks: Sequence[Chunk],
    *,
    tenant: str | None = None,
) -> int:
    """Make `chunks` all that the document consists of: KV of what it no longer has is dropped.

    Where nothing is left of it, or no KV can be stored that would have to be sorted out, the document is
    invalidated. To replace it would start the engine, which takes a minute that an ingestion job should
    not pay for an empty memory.

    Args:
        version: of `chunks`; not used where the document is invalidated.

    Returns:
        The number of records dropped.

    Raises:
        CacheCraftError: as `CacheCraftEngine.replace` and `invalidate`.
    """
    if chunks and _may_hold_kv(engine):
        return engine.replace(doc_id, version, chunks, tenant=tenant)
    return engine.invalidate(doc_id, tenant=tenant)


def _may_hold_kv(engine: ChatEngine) -> bool:
    """An engine that has not started holds KV only in tiers that outlive a process; a fake has none."""
    config = getattr(engine, "config", None)
    return engine.is_started or (config is not None and config.has_cold_tiers)
