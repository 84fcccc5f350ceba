"""What a plan says of its tokens, and the broken plans that validation refuses."""

from __future__ import annotations

import pickle

import pytest

from cachecraft_rag.chunks import ChunkKey, Span
from cachecraft_rag.errors import PlanError
from cachecraft_rag.events import ChunkDecision, Reason
from cachecraft_rag.planner.plan import ChunkPlan, Load, ReusePlan


def cached(start, end, *recompute, decision=ChunkDecision.REPAIRED, record_id=9):
    spans = tuple(Span(*pair) for pair in recompute)
    key = ChunkKey("k")
    return ChunkPlan(Span(start, end), key, decision, Reason.OTHER_PREFIX, record_id, 0, spans)


def computed(start, end, *recompute):
    spans = tuple(Span(*pair) for pair in recompute)
    key = ChunkKey("k")
    return ChunkPlan(Span(start, end), key, ChunkDecision.COMPUTED, Reason.NOT_CACHED, recompute=spans)


def make_plan(*chunks, num_tokens=50, context_end=40):
    return ReusePlan(num_tokens, context_end, chunks, "cachecraft")


@pytest.fixture
def mixed_plan():
    """Text [0,5), an exact chunk [5,10), a missing one [10,20), a repaired one [20,40), text."""
    return make_plan(
        cached(5, 10, decision=ChunkDecision.EXACT, record_id=1),
        computed(10, 20),
        cached(20, 40, (20, 22), (30, 35), record_id=2),
    )


def test_kept_and_recomputed_positions(mixed_plan):
    """Everything in the context that is not kept is recomputed, in merged spans."""
    mixed_plan.validate()
    assert mixed_plan.kept == (Span(5, 10), Span(22, 30), Span(35, 40))
    assert mixed_plan.recompute == (Span(0, 5), Span(10, 22), Span(30, 35))


def test_counts_add_up_to_the_prompt(mixed_plan):
    """18 kept, 7 cached tokens recomputed, and the 25 others had no KV."""
    counts = (mixed_plan.num_kept, mixed_plan.num_recomputed, mixed_plan.num_computed)
    assert counts == (18, 7, 25)
    assert [mixed_plan.count_kept(chunk) for chunk in mixed_plan.chunks] == [5, 0, 13]


def test_loads_name_the_chunks_that_keep_tokens(mixed_plan):
    """One load per chunk; a fully recomputed chunk needs none."""
    assert mixed_plan.loads == (Load(1, Span(5, 10)), Load(2, Span(20, 40)))
    assert make_plan(cached(20, 40, (20, 40))).loads == ()


def test_exactness_ends_at_the_first_approximate_token(mixed_plan):
    """Token 22 is the first kept one of a chunk that was moved; exact chunks do not count."""
    assert mixed_plan.exact_until == 22
    assert not mixed_plan.is_exact


@pytest.mark.parametrize(
    "chunk",
    [computed(20, 40), cached(20, 40, (20, 40)), cached(20, 40, decision=ChunkDecision.EXACT)],
)
def test_plans_without_approximate_tokens_are_exact(chunk):
    """Computed, fully recomputed and exact chunks all equal a full prefill."""
    plan = make_plan(chunk)
    assert plan.exact_until == plan.num_tokens
    assert plan.is_exact


def test_only_computed_chunks_leave_the_store_alone(mixed_plan):
    """Even a fully recomputed chunk goes through the store's path."""
    assert mixed_plan.uses_store
    assert make_plan(cached(20, 40, (20, 40))).uses_store
    assert not make_plan(computed(20, 40)).uses_store


def test_the_last_token_of_the_prompt_is_never_kept():
    """A chunk that ends the prompt is loaded up to the token before."""
    plan = make_plan(cached(20, 50, decision=ChunkDecision.REUSED), context_end=49)
    plan.validate()
    assert plan.loads == (Load(9, Span(20, 49)),)
    assert (plan.num_kept, plan.num_recomputed, plan.num_computed) == (29, 1, 20)


def test_plans_survive_pickling(mixed_plan):
    """Plans travel to the workers between processes."""
    copy = pickle.loads(pickle.dumps(mixed_plan))
    assert copy == mixed_plan
    assert (copy.kept, copy.recompute) == (mixed_plan.kept, mixed_plan.recompute)


@pytest.mark.parametrize(
    ("chunks", "sizes", "message"),
    [
        ([], {"context_end": 50}, "context_end is 50"),
        ([], {"num_tokens": 0, "context_end": 0}, "context_end is 0"),
        ([computed(20, 30), computed(29, 40)], {}, "starts before 30"),
        ([computed(30, 40), computed(20, 30)], {}, "starts before 40"),
        ([computed(30, 60)], {}, "they end at 60"),
        ([computed(20, 30, (20, 21))], {}, "no record"),
        ([cached(20, 30, record_id=None)], {}, "have a record"),
        ([cached(20, 30, decision=ChunkDecision.COMPUTED)], {}, "have a record"),
        ([cached(20, 30, (19, 21))], {}, "starts before 20"),
        ([cached(20, 30, (29, 31))], {}, "they end at 31"),
        ([cached(20, 30, (25, 27), (21, 22))], {}, "starts before 27"),
        ([cached(20, 50, (45, 50))], {"context_end": 49}, "they end at 50"),
    ],
)
def test_broken_plans_are_refused(chunks, sizes, message):
    """Every rule of validation has a plan that breaks only it."""
    plan = make_plan(*chunks, **sizes)
    with pytest.raises(PlanError, match=message):
        plan.validate()


@pytest.mark.parametrize(
    ("field", "spans"),
    [
        ("recompute", (Span(0, 5),)),
        ("recompute", (Span(0, 6), Span(10, 22), Span(30, 35))),
        ("kept", (Span(5, 10), Span(5, 10), Span(22, 30), Span(35, 40))),
        ("kept", (Span(5, 10), Span(22, 30), Span(35, 41))),
        ("kept", (Span(5, 10), Span(22, 30), Span(35, 40), Span(44, 45))),
    ],
)
def test_a_context_not_covered_exactly_once_is_refused(mixed_plan, field, spans):
    """Gaps, overlaps and spans past the context, as a faulty derivation would leave them."""
    object.__setattr__(mixed_plan, field, spans)
    with pytest.raises(PlanError):
        mixed_plan.validate()
