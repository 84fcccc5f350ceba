"""Selection under one budget over several stretches of a prompt."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.chunks import Span
from cachecraft_rag.errors import PlanError
from cachecraft_rag.planner.selection import select_spans, select_tokens


@st.composite
def selections(draw, max_stretches=5):
    """Stretches with or without gaps, scores with ties and NaN, a budget within them, a granularity."""
    candidates, position = [], 0
    for length in draw(st.lists(st.integers(1, 25), min_size=1, max_size=max_stretches)):
        start = position + draw(st.integers(0, 4))
        candidates.append(Span(start, start + length))
        position = start + length
    num_tokens = sum(map(len, candidates))
    score = st.sampled_from([0.0, 0.25, 0.5, 1.0, math.nan])
    scores = draw(st.lists(score, min_size=num_tokens, max_size=num_tokens))
    budget = draw(st.integers(0, num_tokens))
    return tuple(candidates), np.array(scores, np.float32), budget, draw(st.integers(1, 12))


def positions(spans):
    return [position for span in spans for position in span.positions()]


def runs_of(candidates, granularity):
    """The runs that selection may take, each within one stretch."""
    return [
        range(start, min(start + granularity, span.end))
        for span in candidates
        for start in range(span.start, span.end, granularity)
    ]


@given(selections())
def test_one_budget_is_met_with_less_than_one_run_over(case):
    """The overshoot is that of a single run, however many stretches there are."""
    candidates, scores, budget, granularity = case
    spans = select_spans(candidates, scores, budget, granularity)
    assert budget <= len(positions(spans)) < budget + granularity
    assert all(left.end < right.start for left, right in pairwise(spans))


@given(selections())
def test_runs_never_cross_a_stretch(case):
    """What is taken is a union of whole runs, cut where a stretch ends and starting anew in the next."""
    candidates, scores, budget, granularity = case
    taken = set(positions(select_spans(candidates, scores, budget, granularity)))
    runs = runs_of(candidates, granularity)
    assert taken <= set(positions(candidates))
    assert all(taken.issuperset(run) or taken.isdisjoint(run) for run in runs)


@given(selections())
def test_the_best_runs_of_all_stretches_are_taken(case):
    """Agrees with a plain sort by falling mean score, NaN last, then position."""
    candidates, scores, budget, granularity = case
    score_at = dict(zip(positions(candidates), scores.astype(np.float64), strict=True))

    def rank(run):
        mean = sum(score_at[position] for position in run) / len(run)
        return (True, 0.0, run.start) if math.isnan(mean) else (False, -mean, run.start)

    expected: set[int] = set()
    for run in sorted(runs_of(candidates, granularity), key=rank):
        if len(expected) < budget:
            expected.update(run)
    assert positions(select_spans(candidates, scores, budget, granularity)) == sorted(expected)


@given(selections(max_stretches=1))
def test_one_stretch_is_a_chunk_of_its_own(case):
    """The global budget over a single stretch is `select_tokens`."""
    (span,), scores, budget, granularity = case
    expected = select_tokens(scores, budget, granularity, offset=span.start)
    assert select_spans((span,), scores, budget, granularity) == expected


@given(selections())
def test_the_scores_are_left_alone(case):
    """They may be a stored profile's, and the same call gives the same spans."""
    candidates, scores, budget, granularity = case
    before = scores.copy()
    first = select_spans(candidates, scores, budget, granularity)
    np.testing.assert_array_equal(scores, before)
    assert select_spans(candidates, scores, budget, granularity) == first


def test_a_better_stretch_takes_the_whole_budget():
    """There is no share per stretch: the second one has the three best tokens."""
    scores = np.array([0.5, 0.5, 0.5, 0.6, 0.7, 0.8])
    assert select_spans((Span(0, 3), Span(10, 13)), scores, 3, 1) == (Span(10, 13),)


def test_ties_go_to_the_earlier_position():
    """Also across stretches; chosen tokens of touching stretches become one span."""
    scores = np.ones(6)
    assert select_spans((Span(0, 3), Span(10, 13)), scores, 4, 1) == (Span(0, 3), Span(10, 11))
    assert select_spans((Span(0, 3), Span(3, 6)), scores, 4, 1) == (Span(0, 4),)


@pytest.mark.parametrize("num_scores", [3, 5])
def test_there_must_be_one_score_per_candidate(num_scores):
    """Scores of other tokens are a fault upstream, not something to cut to size."""
    with pytest.raises(PlanError, match=f"{num_scores} scores for 4 candidate tokens"):
        select_spans((Span(0, 2), Span(5, 7)), np.zeros(num_scores), 2, 1)


def test_no_candidates_give_nothing():
    """With nothing to choose from nothing is chosen, and nothing may be asked for."""
    assert select_spans((), np.zeros(0), 0, 1) == ()
    with pytest.raises(PlanError):
        select_spans((), np.zeros(0), 1, 1)
