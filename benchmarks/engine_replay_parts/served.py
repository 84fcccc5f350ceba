"""What became of one request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from cachecraft_rag.events import ChunkDecision, ReuseReport

PREFIX_CACHE = "prefix_cache"
COMPUTED = "computed"


@dataclass(frozen=True, slots=True)
class Served:
    """Seconds count from the arrival, and so hold the time that a request waits to be sent.

    Attributes:
        arrival_s: since the first arrival.
        num_prefix: prompt tokens from vLLM's prefix cache.
        num_exact: tokens of chunks reused behind the text they were computed behind, beyond the former.
        num_moved: tokens of chunks reused behind other text and not repaired, with their separators.
        num_computed: tokens that had no cached KV.
        num_probe: tokens computed to choose which to recompute.
        num_found: tokens of chunks that were in the store, beyond the prefix cache, repaired or not.
        tiers: accesses to chunks by where the KV came from; "computed" is a miss.
        tier_tokens: the same in tokens.
    """

    arrival_s: float
    ttft_s: float
    latency_s: float
    text: str
    num_output: int
    num_prompt: int
    num_prefix: int
    num_exact: int
    num_moved: int
    num_recomputed: int
    num_computed: int
    num_probe: int
    num_found: int
    decision: str
    reason: str
    load_s: float
    select_s: float
    recompute_s: float
    tiers: Mapping[str, int]
    tier_tokens: Mapping[str, int]

    @property
    def num_prefill(self) -> int:
        """Prompt tokens that the model computed, those computed twice counted twice."""
        return self.num_computed + self.num_recomputed + self.num_probe


def served_from(
    report: ReuseReport, *, text: str, num_output: int, arrival_s: float, ttft_s: float, latency_s: float
) -> Served:
    """The record of one answer, its figures taken from the engine's own report."""
    tiers: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    exact = found = 0
    for chunk in report.chunks:
        end = chunk.start + chunk.num_tokens
        in_prefix = max(0, min(end, report.num_prefix_tokens) - chunk.start)
        source = chunk.tier or COMPUTED
        tiers[source] += 1
        tokens[PREFIX_CACHE] += in_prefix
        tokens[source] += chunk.num_tokens - in_prefix
        found += 0 if source in (COMPUTED, PREFIX_CACHE) else chunk.num_tokens - in_prefix
        if chunk.decision is ChunkDecision.EXACT:
            exact += chunk.num_reused_tokens - in_prefix
    return Served(
        arrival_s=arrival_s,
        ttft_s=ttft_s,
        latency_s=latency_s,
        text=text,
        num_output=num_output,
        num_prompt=report.num_prompt_tokens,
        num_prefix=report.num_prefix_tokens,
        num_exact=exact,
        num_moved=report.num_reused_tokens - report.num_prefix_tokens - exact,
        num_recomputed=report.num_recomputed_tokens,
        num_computed=report.num_computed_tokens,
        num_probe=report.num_probe_tokens,
        num_found=found,
        decision=report.decision.value,
        reason=report.reason.value,
        load_s=report.load_s,
        select_s=report.select_s,
        recompute_s=report.recompute_s,
        tiers=dict(tiers),
        tier_tokens={tier: count for tier, count in tokens.items() if count},
    )
