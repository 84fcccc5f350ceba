"""How much of the chunks that a cached chunk once saw stands before it again: Cache-Craft eq. 6-8.

Prefixes are sequences of chunk keys in prompt order; of a repeated key the first occurrence counts.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Sequence

from cachecraft_rag.chunks import ChunkKey, RecordMeta
from cachecraft_rag.errors import PlanError


def beta(record: RecordMeta, new_prefix: Sequence[ChunkKey]) -> float:
    """Overlap of the record's old prefix with `new_prefix`, in [0, 1] (Cache-Craft eq. 6).

    The share of the chunk's attention to its old prefix that went to chunks which are in the new
    prefix too. Three departures from the paper:

    - A record with no chunk before it is 0/0. It overlaps fully with an empty new prefix and not at
      all with any other; both known re-implementations say 1, which reuses it unrepaired for ever.
    - The share is multiplied by |S_old ∩ S_new| / |S_new|: a new prefix that merely contains the old
      one also holds chunks that this KV has never seen.
    - Without a profile, or when no attention went to the old prefix, nothing is known: 0.

    Raises:
        PlanError: the profile does not give one `inter_by_prefix` per chunk of the old prefix.
    """
    if not record.prefix_chunks:
        return 0.0 if new_prefix else 1.0
    if record.profile is None or not new_prefix:
        return 0.0
    inter = _inter_by_key(record.prefix_chunks, record.profile.inter_by_prefix)
    total = sum(inter.values())
    if not 0.0 < total < float("inf"):
        return 0.0
    new_keys = set(new_prefix)
    common = [weight for key, weight in inter.items() if key in new_keys]
    return sum(common) / total * len(common) / len(new_keys)


def paper_beta(record: RecordMeta, new_prefix: Sequence[ChunkKey]) -> float:
    """Cache-Craft eq. 6 without our departures: a record with no chunk before it, or whose attention to
    its prefix was never measured, is 0/0 and counts as 1, as both known re-implementations have it.

    Raises:
        PlanError: as `beta`.
    """
    if record.profile is None:
        return 1.0 if not record.prefix_chunks else 0.0
    inter = _inter_by_key(record.prefix_chunks, record.profile.inter_by_prefix)
    total = sum(inter.values())
    if not total:
        return 1.0
    if not 0.0 < total < float("inf"):
        return 0.0
    new_keys = set(new_prefix)
    return sum(weight for key, weight in inter.items() if key in new_keys) / total


def paper_beta_prime(record: RecordMeta, new_prefix: Sequence[ChunkKey]) -> float:
    """Cache-Craft eq. 8 over `paper_beta`. Raises as `beta`."""
    return paper_beta(record, new_prefix) * (1.0 - gamma(record.prefix_chunks, new_prefix))


def gamma(old_prefix: Sequence[ChunkKey], new_prefix: Sequence[ChunkKey]) -> float:
    """Disorder of the common chunks, in [0, 1]: normalised Kendall tau distance (Cache-Craft eq. 7).

    Discordant pairs over all pairs of the chunks that are in both prefixes; 0 for fewer than two.
    """
    new_rank = {key: rank for rank, key in enumerate(dict.fromkeys(new_prefix))}
    ranks = [new_rank[key] for key in dict.fromkeys(old_prefix) if key in new_rank]
    num_pairs = len(ranks) * (len(ranks) - 1) // 2
    return _num_inversions(ranks) / num_pairs if num_pairs else 0.0


def beta_prime(record: RecordMeta, new_prefix: Sequence[ChunkKey]) -> float:
    """beta' = beta * (1 - gamma), in [0, 1] (Cache-Craft eq. 8).

    Raises:
        PlanError: as `beta`.
    """
    overlap = beta(record, new_prefix)
    return overlap * (1.0 - gamma(record.prefix_chunks, new_prefix)) if overlap else 0.0


def _inter_by_key(keys: Sequence[ChunkKey], inter: Sequence[float]) -> dict[ChunkKey, float]:
    if len(inter) != len(keys):
        raise PlanError(
            f"inter_by_prefix has {len(inter)} values for {len(keys)} prefix chunks: "
            "a profile needs one per chunk; drop the record"
        )
    first: dict[ChunkKey, float] = {}
    for key, weight in zip(keys, inter, strict=True):
        first.setdefault(key, weight)
    return first


def _num_inversions(ranks: Sequence[int]) -> int:
    seen: list[int] = []
    inversions = 0
    for rank in ranks:
        inversions += len(seen) - bisect(seen, rank)
        insort(seen, rank)
    return inversions
