"""What one sample shows: how good the reused answer is, and whether one chunk's stored KV spoilt it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cachecraft_rag.chunks import ChunkKey
from cachecraft_rag.engine.quality import rouge_l_f1
from cachecraft_rag.engine.shadow import Sample, Shadow, completion_kl, reused_chunks

LEAST_SHARE_OF_KL = 0.5
"""A chunk is to blame if computing it, and copying it anew, each leave at most this much of the KL."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one sample showed.

    Attributes:
        quality: ROUGE-L F1 of the reused answer against full compute's, in [0, 1].
        agrees: whether the two texts are the same.
        first_token_kl: KL(full || reuse) of the first token, in nats.
        keys: chunks whose stored KV the reused answer used.
        blamed: the one of them whose stored KV made the difference, None if none did.
    """

    quality: float
    agrees: bool
    first_token_kl: float
    keys: tuple[ChunkKey, ...]
    blamed: ChunkKey | None = None


async def examine(shadow: Shadow, sample: Sample, max_kl: float) -> Verdict:
    """Ask a sample in full and with reuse; above `max_kl` nats also look for the chunk to blame."""
    full, reuse = await shadow.full(sample), await shadow.reuse(sample)
    kl, keys = completion_kl(full, reuse), reused_chunks(reuse)
    return Verdict(
        quality=rouge_l_f1(reuse.text, full.text),
        agrees=reuse.text == full.text,
        first_token_kl=kl,
        keys=tuple(keys.values()),
        blamed=await _find_culprit(shadow, sample, kl, keys) if kl > max_kl else None,
    )


async def _find_culprit(
    shadow: Shadow, sample: Sample, kl: float, keys: Mapping[int, ChunkKey]
) -> ChunkKey | None:
    """The chunk whose stored KV is worse than a copy made now, None if caching anew would not help.

    Leaving one chunk out after the other is not enough: on clean KV, computing the last chunk, or the
    one that holds the answer, removes most of the KL too.
    """
    limit = LEAST_SHARE_OF_KL * kl
    if not keys or await shadow.kl_of_fresh_copies(sample) > limit:
        return None
    left = {index: await shadow.kl_without(sample, index) for index in keys}
    best = min(left, key=lambda index: (left[index], index))
    return keys[best] if left[best] <= limit else None
