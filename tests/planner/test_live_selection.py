"""What follows from the workers' measurements: one budget over all candidates, by the method's scores."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.chunks import Span
from cachecraft_rag.errors import PlanError
from cachecraft_rag.planner.live import NEED_WEIGHT, Candidate, LiveMethod, LiveSelection
from cachecraft_rag.planner.selection import select_spans

SCORES = st.sampled_from([0.0, 0.25, 0.5, 1.0, math.nan])


def selection_of(*candidates, method=LiveMethod.QUESTION, num_tokens=4, granularity=1):
    return LiveSelection(method, num_tokens, granularity, candidates)


def candidate(start, *need):
    return Candidate(Span(start, start + len(need)), np.array(need, np.float32))


def positions(spans):
    return [position for span in spans for position in span.positions()]


def need_at(selection):
    """Position → stored need, zero where it was never measured."""
    return {
        position: 0.0 if c.need is None else float(c.need[position - c.span.start])
        for c in selection.candidates
        for position in c.span.positions()
    }


def assert_budget_follows(left, before):
    """The same share of the candidates that are left, rounded up to whole tokens."""
    share = Fraction(before.num_tokens * left.num_candidates, before.num_candidates)
    assert left.num_tokens == math.ceil(share)


def share_of_total(scores):
    total = scores.sum(dtype=np.float64)
    return scores / total if total > 0 else scores


@st.composite
def selections(draw):
    """Candidates, some without a stored need, and a measurement of all of them."""
    candidates, position = [], draw(st.integers(0, 5))
    for length in draw(st.lists(st.integers(1, 20), min_size=1, max_size=5)):
        need = draw(st.none() | st.lists(SCORES, min_size=length, max_size=length))
        array = None if need is None else np.array(need, np.float32)
        candidates.append(Candidate(Span(position, position + length), array))
        position += length + draw(st.integers(0, 3))
    selection = selection_of(
        *candidates,
        method=draw(st.sampled_from(LiveMethod)),
        num_tokens=draw(st.integers(0, 120)),
        granularity=draw(st.integers(1, 9)),
    )
    num = selection.num_candidates
    return selection, np.array(draw(st.lists(SCORES, min_size=num, max_size=num)))


@given(selections(), st.integers(-5, 120), st.booleans())
def test_the_budget_is_respected(case, num_tokens, is_measured):
    """Never more than one run over it, never a token that is no candidate, whatever was measured."""
    selection, measured = case
    chosen = positions(selection.choose(measured if is_measured else None, num_tokens))
    budget = min(max(0, num_tokens), selection.num_candidates)
    assert budget <= len(chosen) < budget + selection.granularity
    assert set(chosen) <= set(positions(selection.spans))


@given(selections(), st.integers(0, 60), st.booleans())
def test_the_choice_is_deterministic(case, num_tokens, is_measured):
    """All ranks must choose the same tokens; neither need nor measurement is changed by choosing."""
    selection, measured = case
    given_scores = measured if is_measured else None
    before, need = measured.copy(), need_at(selection)
    assert selection.choose(given_scores, num_tokens) == selection.choose(given_scores, num_tokens)
    np.testing.assert_array_equal(measured, before)
    np.testing.assert_equal(need_at(selection), need)


@given(selections(), st.integers(0, 120))
def test_clipping_keeps_what_lies_behind_with_its_need(case, start):
    """The candidates from `start` on stay as they were, each token with its own need."""
    selection, _ = case
    clipped = selection.clip(start)
    expected = {p: need for p, need in need_at(selection).items() if p >= start}
    np.testing.assert_equal(need_at(clipped), expected)
    assert all(len(span) for span in clipped.spans)
    assert (clipped.method, clipped.granularity) == (selection.method, selection.granularity)
    assert_budget_follows(clipped, selection)


@given(selections(), st.integers(0, 60), st.integers(1, 30))
def test_candidates_that_are_computed_anyway_are_left_out(case, start, length):
    """Whole candidates go, those that merely touch at an edge stay."""
    selection, _ = case
    computed = Span(start, start + length)
    left = selection.without([computed])
    expected = [span for span in selection.spans if set(span.positions()).isdisjoint(computed.positions())]
    assert list(left.spans) == expected
    assert_budget_follows(left, selection)
    assert (left.method, left.granularity) == (selection.method, selection.granularity)


@pytest.mark.parametrize(
    ("start", "num_left"),
    [(0, 7), (5, 7), (6, 7), (7, 6), (9, 5), (12, 3), (15, 0)],
    ids=["before", "at the first", "ceil 6.3", "ceil 5.6", "ceil 4.2", "ceil 2.1", "behind"],
)
def test_the_budget_shrinks_with_the_candidates(start, num_left):
    """7 tokens for 10 candidates are .7 for each: a local hit must not make the rest cost more."""
    selection = selection_of(candidate(5, *range(10)), num_tokens=7)
    assert selection.clip(start).num_tokens == num_left


def test_the_budget_stays_while_no_candidate_goes():
    """Also one that is larger than what it can be spent on."""
    selection = selection_of(candidate(5, 1, 2), num_tokens=40)
    assert selection.clip(5).num_tokens == selection.without([Span(0, 5)]).num_tokens == 40
    assert selection.without([]).spans == selection.spans


@pytest.mark.parametrize("method", [LiveMethod.QUESTION, LiveMethod.DEVIATION])
@given(case=selections(), num_tokens=st.integers(0, 60))
def test_what_was_measured_decides_alone(method, case, num_tokens):
    """For these methods stored need has no say."""
    drawn, measured = case
    selection = selection_of(*drawn.candidates, method=method, granularity=drawn.granularity)
    budget = min(num_tokens, selection.num_candidates)
    expected = select_spans(selection.spans, measured, budget, selection.granularity)
    assert selection.choose(measured, num_tokens) == expected


@pytest.mark.parametrize("method", LiveMethod)
@given(case=selections(), num_tokens=st.integers(0, 60))
def test_without_a_measurement_stored_need_decides(method, case, num_tokens):
    """A pass that could not be measured costs the method, not the repair."""
    drawn, _ = case
    selection = selection_of(*drawn.candidates, method=method, granularity=drawn.granularity)
    budget = min(num_tokens, selection.num_candidates)
    need = np.array(list(need_at(selection).values()))
    assert selection.choose(None, num_tokens) == select_spans(
        selection.spans, need, budget, selection.granularity
    )


@given(case=selections(), num_tokens=st.integers(0, 60))
def test_focus_adds_weighted_shares(case, num_tokens):
    """Of the question's attention, and of the stored need, which weighs more."""
    drawn, measured = case
    selection = selection_of(*drawn.candidates, method=LiveMethod.FOCUS, granularity=drawn.granularity)
    budget = min(num_tokens, selection.num_candidates)
    need = np.array(list(need_at(selection).values()))
    mixed = share_of_total(measured) + NEED_WEIGHT * share_of_total(need)
    expected = select_spans(selection.spans, mixed, budget, selection.granularity)
    assert selection.choose(measured, num_tokens) == expected


def test_focus_takes_both_into_account():
    """Attention .6 .3 .1 0 and need 0 0 .75 .25: the question's first token is behind both needy ones."""
    selection = selection_of(candidate(5, 0, 0), candidate(9, 30, 10), method=LiveMethod.FOCUS)
    measured = np.array([6.0, 3.0, 1.0, 0.0])
    order = [positions(selection.choose(measured, n)) for n in (1, 2, 3)]
    assert order == [[9], [9, 10], [5, 9, 10]]


@pytest.mark.parametrize(("factor", "expected"), [(0.99, [0, 2]), (1.01, [1, 2])], ids=["less", "more"])
def test_a_share_of_the_need_outweighs_one_of_the_attention(factor, expected):
    """A token with half of the attention loses to one with more than half / weight of the need."""
    share = factor * 0.5 / NEED_WEIGHT
    selection = selection_of(candidate(0, 0.0, share, 1.0 - share), method=LiveMethod.FOCUS)
    assert positions(selection.choose(np.array([0.5, 0.0, 0.5]), 2)) == expected


@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e6])
def test_focus_does_not_depend_on_the_scale_of_either(factor):
    """Attention is summed over layers and heads, need is not: only shares can be compared."""
    need = np.array([5, 1, 3, 1], np.float32) * np.float32(factor)
    selection = selection_of(Candidate(Span(0, 4), need), method=LiveMethod.FOCUS)
    # Attention alone would take 1 and 3, need alone 0 and 2.
    measured = np.array([0.05, 0.7, 0.05, 0.2])
    assert selection.choose(measured, 2) == (Span(0, 2),)
    assert selection.choose(measured * 1e3, 2) == selection.choose(measured / 1e3, 2) == (Span(0, 2),)


@pytest.mark.parametrize(
    ("measured", "need", "expected"),
    [
        ([0, 0, 0, 0], [1, 2, 4, 3], [2, 3]),
        ([1, 2, 4, 3], [0, 0, 0, 0], [2, 3]),
        ([0, 0, 0, 0], [0, 0, 0, 0], [0, 1]),
        ([math.nan, 1, 2, 3], [9, 0, 0, 0], [2, 3]),
    ],
    ids=["no attention", "no need", "neither", "NaN"],
)
def test_focus_copes_with_totals_that_are_no_divisor(measured, need, expected):
    """A total of zero leaves the choice to the other; a token whose score is NaN comes last."""
    selection = selection_of(candidate(0, *need), method=LiveMethod.FOCUS)
    assert positions(selection.choose(np.array(measured, dtype=float), 2)) == expected


def test_need_that_was_never_measured_counts_as_none():
    """A record without a profile competes by the question alone."""
    selection = selection_of(Candidate(Span(0, 2), None), candidate(4, 1, 9), method=LiveMethod.FOCUS)
    assert selection.choose(None, 2) == (Span(4, 6),)
    assert selection.choose(np.array([8.0, 0.0, 1.0, 1.0]), 2) == (Span(0, 1), Span(5, 6))


def test_a_measurement_of_other_tokens_is_refused():
    """One value per candidate, or the rows were mixed up."""
    with pytest.raises(PlanError, match="3 scores for 2 candidate tokens"):
        selection_of(candidate(0, 1, 1)).choose(np.zeros(3), 1)


def test_nothing_left_to_choose_from():
    """All candidates may lie in vLLM's own prefix hit."""
    empty = selection_of(candidate(3, 1, 2)).clip(5)
    assert (empty.candidates, empty.num_candidates) == ((), 0)
    assert empty.choose(np.zeros(0), 4) == empty.choose(None, 4) == ()
