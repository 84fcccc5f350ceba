"""What a plan may leave to compute: past these limits full compute is the better choice."""

from __future__ import annotations

from dataclasses import dataclass

from cachecraft_rag.events import Reason
from cachecraft_rag.planner.plan import ReusePlan


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """Limits of one request, each a share in [0, 1]; at 1.0 it refuses nothing.

    Attributes:
        max_missing_share: of the tokens of chunks, those without cached KV.
        max_overhead_share: of the tokens of the prompt, those that reuse computes ahead of the model's
            own forward: recomputed ones, missing ones, and text between chunks.
    """

    max_missing_share: float = 1.0
    max_overhead_share: float = 1.0


def refuse(plan: ReusePlan, limits: PlanLimits) -> Reason | None:
    """Why `plan` is not worth carrying out, None if it is.

    A plan that takes nothing from the store has nothing to refuse. Neither has an exact one: it costs
    nothing in quality, and what it does not load is computed once, as in a full compute.
    """
    if not plan.uses_store or plan.is_exact:
        return None
    if missing_share(plan) > limits.max_missing_share:
        return Reason.TOO_MANY_MISSING
    return Reason.OVERHEAD_TOO_HIGH if overhead_share(plan) > limits.max_overhead_share else None


def missing_share(plan: ReusePlan) -> float:
    """Share of the tokens of chunks that have no cached KV, in [0, 1]; 0 without chunks."""
    num_missing = sum(len(chunk.span) for chunk in plan.chunks if chunk.record_id is None)
    num_tokens = sum(len(chunk.span) for chunk in plan.chunks)
    return num_missing / num_tokens if num_tokens else 0.0


def overhead_share(plan: ReusePlan) -> float:
    """Share of the prompt that reuse computes ahead of the model's own forward, in [0, 1].

    Tokens stand for time: measured speed-ups of reuse follow the share of tokens computed (see the
    README's table of times). A budget that the workers spend counts in full.
    """
    num_live = min(plan.live.num_tokens, plan.live.num_candidates) if plan.live else 0
    return (sum(map(len, plan.recompute)) + num_live) / plan.num_tokens
