"""One rank's record out of a cold tier."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from cachecraft_rag.store.codecs import Array
from cachecraft_rag.store.record_format import KV, Expected, RecordDamagedError, decode, entry_of
from cachecraft_rag.store.tiers import BlobTier

logger = logging.getLogger(__name__)

TOKEN_SCORES = "token_scores"
"""Name of the section with the profile's scores, float32 (num_tokens,)."""


@dataclass(frozen=True, slots=True, eq=False)
class ColdRecord:
    """One rank's KV of a variant, read and checked; arrays may be views of `blob`, read from `tier`."""

    kv: Array
    token_scores: Array | None
    tier: str
    blob: bytes = field(repr=False)


def load_record(tier_name: str, tier: BlobTier, expected: Expected) -> ColdRecord | None:
    """The expected record; None if the tier does not have it.

    A damaged one is dropped, one that belongs to another manifest is left alone.

    Raises:
        TierError: the tier could not be asked.
    """
    blob = tier.get(expected.blob_name)
    if blob is None:
        return None
    try:
        stored = decode(blob, expected)
        scores = stored.array(TOKEN_SCORES) if TOKEN_SCORES in expected.arrays else None
        return ColdRecord(stored.array(KV), scores, tier_name, blob)
    except RecordDamagedError as error:
        if not _is_of_another_write(blob, expected):
            logger.warning("%s: dropped from %s: %s", expected.blob_name, tier_name, error)
            tier.discard(expected.blob_name, blob)
    return None


def _is_of_another_write(blob: bytes, expected: Expected) -> bool:
    """Whether the blob is sound, but not the one that the manifest lists: that of the other write may still
    be to come, or lie in another tier."""
    try:
        decode(blob, Expected(variant=expected.variant, rank=expected.rank, num_ranks=expected.num_ranks))
    except RecordDamagedError:
        return False
    return entry_of([blob]) != expected.entry
