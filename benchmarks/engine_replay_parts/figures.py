"""From records of requests to the figures of a way, and what arithmetic allows them to be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from benchmarks.engine_replay_parts.served import Served

QUANTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Figures:
    """One way under one load.

    Attributes:
        requests_per_s: completed requests over the time from the first arrival to the last completion.
        num_prefill: prompt tokens computed, recomputed and probed.
        bound_prefill: the least that the hits and the budget allow: misses + budget * reused.
        hits: share of the chunk accesses by tier; what is left was computed.
        hit_tokens: the same of the chunks' tokens.
        shares: of the prompt tokens, by what became of them.
        agreement: share of the answers that are, word for word, those of full prefill; NaN without them.
        reasons: how many requests by what was decided and why.
    """

    num_requests: int
    makespan_s: float
    requests_per_s: float
    ttft_s: tuple[float, ...]
    latency_s: tuple[float, ...]
    num_prompt: int
    num_prefill: int
    bound_prefill: float
    hits: dict[str, float]
    hit_tokens: dict[str, float]
    shares: dict[str, float]
    agreement: float
    reasons: dict[str, int]

    @property
    def computed_share(self) -> float:
        return self.num_prefill / self.num_prompt

    @property
    def over_bound(self) -> float:
        """Tokens computed over the least that hits and budget allow."""
        return self.num_prefill / self.bound_prefill


@dataclass(frozen=True, slots=True)
class Comparison:
    """One way beside the baseline, under the same load.

    Attributes:
        token_ratio: the baseline's computed tokens over this way's: the throughput that it allows,
            were a token of prefill all that costs time.
        efficiency: the ratio of throughputs over what tokens allow.
    """

    throughput_ratio: float
    token_ratio: float
    efficiency: float
    ttft_ratio: tuple[float, ...]
    latency_ratio: tuple[float, ...]


def quantiles(values: Sequence[float]) -> tuple[float, ...]:
    """P50, P95 and P99, linear between neighbours."""
    return tuple(float(value) for value in np.percentile(values, QUANTILES))


def makespan_s(served: Sequence[Served]) -> float:
    first = min(one.arrival_s for one in served)
    return max(one.arrival_s + one.latency_s for one in served) - first


def bound_prefill(served: Sequence[Served], budget: float | None) -> float:
    """misses + budget * reused, in tokens.

    Misses are all prompt tokens without cached KV, the question among them. Exact reuse needs no repair, so
    that a way can stay below.
    """
    return sum(one.num_computed + (budget or 0.0) * one.num_found for one in served)


def agreement(served: Sequence[Served], full: Sequence[Served]) -> float:
    """Share of answers with the same words in the same order, request by request; NaN if there is none."""
    if not full:
        return float("nan")
    same = [one.text.split() == other.text.split() for one, other in zip(served, full, strict=True)]
    return sum(same) / len(same)


def figures_of(served: Sequence[Served], full: Sequence[Served], budget: float | None) -> Figures:
    """Figures of one way; `full` holds the same requests answered by full prefill, or nothing."""
    num_prompt = sum(one.num_prompt for one in served)
    elapsed_s = makespan_s(served)
    parts = ("prefix", "exact", "moved", "recomputed", "computed")
    return Figures(
        num_requests=len(served),
        makespan_s=elapsed_s,
        requests_per_s=len(served) / elapsed_s,
        ttft_s=quantiles([one.ttft_s for one in served]),
        latency_s=quantiles([one.latency_s for one in served]),
        num_prompt=num_prompt,
        num_prefill=sum(one.num_prefill for one in served),
        bound_prefill=bound_prefill(served, budget),
        hits=_shares(sum((Counter(one.tiers) for one in served), Counter())),
        hit_tokens=_shares(sum((Counter(one.tier_tokens) for one in served), Counter())),
        shares={part: sum(getattr(one, f"num_{part}") for one in served) / num_prompt for part in parts},
        agreement=agreement(served, full),
        reasons=dict(Counter(f"{one.decision}: {one.reason}" for one in served).most_common()),
    )


def compare(figures: Figures, baseline: Figures) -> Comparison:
    throughput_ratio = figures.requests_per_s / baseline.requests_per_s
    token_ratio = baseline.num_prefill / figures.num_prefill
    return Comparison(
        throughput_ratio=throughput_ratio,
        token_ratio=token_ratio,
        efficiency=throughput_ratio / token_ratio,
        ttft_ratio=_ratios(figures.ttft_s, baseline.ttft_s),
        latency_ratio=_ratios(figures.latency_s, baseline.latency_s),
    )


def _ratios(values: Sequence[float], others: Sequence[float]) -> tuple[float, ...]:
    return tuple(value / other for value, other in zip(values, others, strict=True))


def _shares(counts: Counter[str]) -> dict[str, float]:
    total = counts.total()
    return {name: count / total for name, count in sorted(counts.items())} if total else {}
