"""The plan that came of a live selection, once the workers have chosen."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.chunks import ChunkKey, Span
from cachecraft_rag.events import ChunkDecision, Reason
from cachecraft_rag.planner.live import Candidate, LiveMethod, LiveSelection
from cachecraft_rag.planner.plan import ChunkPlan, ReusePlan

NUM_TOKENS, CONTEXT_END = 60, 50
EXACT, MISSING, FIRST, SECOND = Span(5, 10), Span(10, 20), Span(20, 32), Span(34, 50)
"""Text, an exact chunk, a missing one, and two of moved KV; a separator of two follows the third."""


def chunk(span, decision, reason, record_id=None, num_separator_tokens=0):
    return ChunkPlan(
        span, ChunkKey("k"), decision, reason, record_id, 0, num_separator_tokens=num_separator_tokens
    )


def live_plan():
    moved = (ChunkDecision.REPAIRED, Reason.OTHER_PREFIX)
    live = LiveSelection(
        LiveMethod.FOCUS, 9, 1, tuple(Candidate(span, np.ones(len(span))) for span in (FIRST, SECOND))
    )
    plan = ReusePlan(
        NUM_TOKENS,
        CONTEXT_END,
        (
            chunk(EXACT, ChunkDecision.EXACT, Reason.SAME_PREFIX, 1),
            chunk(MISSING, ChunkDecision.COMPUTED, Reason.NOT_CACHED),
            chunk(FIRST, *moved, 2, num_separator_tokens=2),
            chunk(SECOND, *moved, 3),
        ),
        "focus",
        live,
    )
    plan.validate()
    return plan


def spans_of(positions):
    """Positions as sorted and merged spans, as the workers report them."""
    spans: list[Span] = []
    for position in sorted(positions):
        if spans and spans[-1].end == position:
            spans[-1] = Span(spans[-1].start, position + 1)
        else:
            spans.append(Span(position, position + 1))
    return tuple(spans)


def positions(spans):
    return {position for span in spans for position in span.positions()}


@given(st.sets(st.sampled_from(sorted(positions([FIRST, SECOND])))))
def test_chosen_tokens_move_from_kept_to_recomputed(chosen):
    """The counts still add up, and every other token stays what it was."""
    plan = live_plan()
    resolved = plan.resolve(spans_of(chosen))
    resolved.validate()
    assert positions(resolved.kept) == positions(plan.kept) - chosen
    assert positions(resolved.recompute) == positions(plan.recompute) | chosen
    assert resolved.num_recomputed == len(chosen)
    assert resolved.num_computed == plan.num_computed
    assert resolved.num_kept + resolved.num_recomputed + resolved.num_computed == NUM_TOKENS


@given(st.sets(st.sampled_from(sorted(positions([FIRST, SECOND])))))
def test_decisions_tell_what_was_chosen(chosen):
    """A chunk of which nothing was chosen was reused as it is; others were repaired."""
    resolved = live_plan().resolve(spans_of(chosen))
    for part in resolved.chunks[2:]:
        is_repaired = not chosen.isdisjoint(part.span.positions())
        assert part.decision is (ChunkDecision.REPAIRED if is_repaired else ChunkDecision.REUSED)
        assert part.recompute == spans_of(chosen.intersection(part.span.positions()))


@given(st.sets(st.integers(0, NUM_TOKENS - 1)))
def test_tokens_of_no_candidate_are_ignored(chosen):
    """Text, separators, exact and missing chunks are not up for choice, whatever is reported."""
    plan = live_plan()
    inside = chosen & positions([FIRST, SECOND])
    assert plan.resolve(spans_of(chosen)) == plan.resolve(spans_of(inside))
    assert plan.resolve(spans_of(chosen)).chunks[:2] == plan.chunks[:2]


def test_nothing_chosen_is_plain_reuse():
    """The budget may all have gone into measuring."""
    resolved = live_plan().resolve(())
    assert [c.decision for c in resolved.chunks[2:]] == [ChunkDecision.REUSED] * 2
    assert resolved.kept == live_plan().kept
    assert resolved.live is None


def test_a_span_over_two_chunks_is_cut_between_them():
    """Touching tokens of neighbours are reported as one span, with the separator in between."""
    first, second = live_plan().resolve((Span(30, 36),)).chunks[2:]
    assert (first.recompute, second.recompute) == ((Span(30, 32),), (Span(34, 36),))


def test_the_separator_stays_with_a_chunk_that_is_chosen_whole():
    """It was loaded and nobody chose to compute it."""
    resolved = live_plan().resolve((FIRST,))
    resolved.validate()
    assert Span(32, 34) in resolved.kept
    assert resolved.num_recomputed == len(FIRST)


@pytest.mark.parametrize(("chosen", "expected"), [((), 20), ((Span(20, 24),), 24), ((FIRST, SECOND), 32)])
def test_exactness_follows_the_choice(chosen, expected):
    """A choice can only make more of the prompt exact, never less."""
    plan = live_plan()
    assert plan.exact_until == 20
    assert plan.resolve(chosen).exact_until == expected


def test_a_plan_without_a_live_selection_is_resolved_already():
    """What workers report is not applied to it, nor twice to the same plan."""
    resolved = live_plan().resolve((Span(20, 22),))
    assert resolved.resolve((Span(24, 30),)) is resolved
    plain = replace(live_plan(), live=None)
    assert plain.resolve((FIRST,)) is plain


def test_live_plans_survive_pickling():
    """Selections travel to the workers between processes, with their need."""
    copy = pickle.loads(pickle.dumps(live_plan()))
    assert copy == live_plan()
    assert copy.live.spans == (FIRST, SECOND)
    np.testing.assert_array_equal(copy.live.candidates[1].need, np.ones(len(SECOND)))
