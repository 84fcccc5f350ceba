"""What a variant's manifest keeps of its record, and the record it gives back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cachecraft_rag.chunks import AttentionProfile, ChunkKey, DocumentRef, RecordMeta
from cachecraft_rag.store.record_format import Manifest


def facts_of(meta: RecordMeta) -> dict[str, Any]:
    """What the manifest keeps of a record, besides its name."""
    document, profile = meta.document, meta.profile
    return {
        "start": meta.start,
        "size_bytes": meta.size_bytes,
        "prefix_chunks": list(meta.prefix_chunks),
        "prefix_is_exact": meta.prefix_is_exact,
        "separator": list(meta.separator),
        "document": [document.doc_id, document.version] if document else None,
        "profile": [profile.inter_mean, profile.intra_mean, list(profile.inter_by_prefix)]
        if profile
        else None,
    }


def meta_of(manifest: Manifest, tenant: str) -> RecordMeta:
    """
    Raises:
        LookupError, TypeError, ValueError: the manifest's facts are not what `facts_of` makes.
    """
    facts = manifest.meta
    return RecordMeta(
        record_id=0,
        key=ChunkKey(manifest.variant.chunk_key),
        tenant=tenant,
        num_tokens=manifest.num_tokens,
        start=int(facts["start"]),
        size_bytes=int(facts["size_bytes"]),
        prefix_hash=manifest.variant.prefix_hash,
        prefix_chunks=tuple(map(ChunkKey, facts["prefix_chunks"])),
        prefix_is_exact=bool(facts["prefix_is_exact"]),
        separator=tuple(map(int, facts["separator"])),
        document=DocumentRef(*facts["document"]) if facts["document"] else None,
        profile=_profile_of(facts["profile"]),
    )


def _profile_of(facts: Sequence[Any] | None) -> AttentionProfile | None:
    import numpy as np

    if facts is None:
        return None
    inter_mean, intra_mean, inter_by_prefix = facts
    return AttentionProfile(
        float(inter_mean), float(intra_mean), tuple(map(float, inter_by_prefix)), np.zeros(0, np.float32)
    )
