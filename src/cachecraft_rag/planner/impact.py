"""How much a chunk's KV depends on what stood before it, and what to recompute: Cache-Craft eq. 11-12."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from cachecraft_rag.chunks import AttentionProfile, ChunkKey, RecordMeta

Overlap = Callable[[RecordMeta, Sequence[ChunkKey]], float]
MIN_CCI = 0.5
MAX_CCI = 1.0


def cci(profile: AttentionProfile | None) -> float:
    """Cache context impact, sigmoid(a / b), in [0.5, 1] (Cache-Craft eq. 11).

    a is `inter_mean` and b `intra_mean`; a / b is not negative, hence the lower bound. The upper
    bound stands for "nothing is known, so nothing is trusted": no profile, or one that is not finite.
    """
    if profile is None or not math.isfinite(profile.inter_mean + profile.intra_mean):
        return MAX_CCI
    if profile.intra_mean == 0.0:
        return MAX_CCI if profile.inter_mean > 0.0 else MIN_CCI
    return 1.0 / (1.0 + math.exp(-profile.inter_mean / profile.intra_mean))


def impact(profile: AttentionProfile | None) -> float:
    """CCI stretched to [0, 1]: 2 * CCI - 1, on which cut-offs such as 0.3 and 0.7 make sense."""
    return 2.0 * cci(profile) - 1.0


def cfo(record: RecordMeta, new_prefix: Sequence[ChunkKey], alpha: float, overlap: Overlap) -> float:
    """Cache fix overhead: the share of the chunk's tokens to recompute, in [0, 1].

    CFO = alpha * CCI * (1 - beta'), clamped (Cache-Craft eq. 12); a larger `alpha` recomputes more.

    Args:
        overlap: beta', in the form of the paper or repaired; see `planner.overlap`.

    Raises:
        PlanError: the record's profile does not fit its prefix.
    """
    overhead = alpha * cci(record.profile) * (1.0 - overlap(record, new_prefix))
    return min(1.0, max(0.0, overhead))
