"""Which plans are not worth carrying out."""

from __future__ import annotations

import pytest

from cachecraft_rag.chunks import ChunkKey, Span
from cachecraft_rag.events import ChunkDecision, Reason
from cachecraft_rag.planner.limits import PlanLimits, missing_share, overhead_share, refuse
from cachecraft_rag.planner.live import Candidate, LiveMethod, LiveSelection
from cachecraft_rag.planner.plan import ChunkPlan, ReusePlan


def moved(start: int, end: int, *recompute: Span) -> ChunkPlan:
    """A chunk whose KV was computed behind other text."""
    decision = ChunkDecision.REPAIRED if recompute else ChunkDecision.REUSED
    return ChunkPlan(
        Span(start, end), ChunkKey("k"), decision, Reason.OTHER_PREFIX, 1, start + 5, tuple(recompute)
    )


def exact(start: int, end: int) -> ChunkPlan:
    return ChunkPlan(Span(start, end), ChunkKey("k"), ChunkDecision.EXACT, Reason.SAME_PREFIX, 1, start)


def missing(start: int, end: int) -> ChunkPlan:
    return ChunkPlan(Span(start, end), ChunkKey("k"), ChunkDecision.COMPUTED, Reason.NOT_CACHED)


def plan_of(*chunks: ChunkPlan, live: LiveSelection | None = None) -> ReusePlan:
    """A prompt of 100 tokens: 10 of system text, chunks up to 90, the question."""
    return ReusePlan(100, 90, chunks, "naive", live)


def choosing(num_tokens: int, span: Span) -> LiveSelection:
    return LiveSelection(LiveMethod.QUESTION, num_tokens, 1, (Candidate(span, None),))


def assert_turns_at(share: float, plan: ReusePlan, field: str, reason: Reason) -> None:
    """`plan` is carried out at a limit of `share`, and refused just below it."""
    assert refuse(plan, PlanLimits(**{field: share})) is None
    assert refuse(plan, PlanLimits(**{field: share - 0.01})) is reason


def test_missing_tokens_are_counted_over_chunks() -> None:
    """30 of 80 chunk tokens have no KV; text that is no chunk does not count."""
    plan = plan_of(moved(10, 60), missing(60, 90))
    assert missing_share(plan) == pytest.approx(30 / 80)
    assert_turns_at(30 / 80, plan, "max_missing_share", Reason.TOO_MANY_MISSING)


def test_overhead_is_what_is_computed_ahead_of_the_forward() -> None:
    """System text, missing chunk and recomputed tokens count; the question does not."""
    plan = plan_of(moved(10, 60, Span(20, 25)), missing(60, 90))
    assert overhead_share(plan) == pytest.approx((10 + 5 + 30) / 100)
    assert_turns_at(0.45, plan, "max_overhead_share", Reason.OVERHEAD_TOO_HIGH)


def test_budget_of_the_workers_is_overhead() -> None:
    """Tokens that the workers are to choose count as recomputed, as far as there are candidates."""
    span = Span(10, 90)
    assert overhead_share(plan_of(moved(10, 90), live=choosing(30, span))) == pytest.approx(0.4)
    assert overhead_share(plan_of(moved(10, 90), live=choosing(500, span))) == pytest.approx(0.9)


def test_missing_chunks_are_named_before_the_overhead() -> None:
    """A plan that breaks both limits is refused for what is missing."""
    assert refuse(plan_of(moved(10, 20), missing(20, 90)), PlanLimits(0.1, 0.1)) is Reason.TOO_MANY_MISSING


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(),
        plan_of(missing(10, 90)),
        plan_of(exact(10, 20), missing(20, 90)),
        plan_of(moved(10, 90, Span(10, 90))),
    ],
    ids=["no chunks", "nothing cached", "exact", "all recomputed"],
)
def test_plans_that_approximate_nothing_pass(plan: ReusePlan) -> None:
    """The strictest limits refuse only what would make the answer approximate."""
    assert refuse(plan, PlanLimits(0.0, 0.0)) is None


def test_defaults_refuse_nothing() -> None:
    """A share is never above 1."""
    assert refuse(plan_of(moved(10, 11, Span(10, 11)), moved(11, 12), missing(12, 90)), PlanLimits()) is None
