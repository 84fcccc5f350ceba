"""Selection of tokens by score: the budget, the order of ties, the shape of the spans."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.chunks import Span
from cachecraft_rag.errors import PlanError
from cachecraft_rag.planner.selection import select_tokens


@st.composite
def selections(draw):
    """Scores (with ties), a budget within them and a granularity."""
    scores = draw(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, math.nan]), min_size=1, max_size=80))
    budget = draw(st.integers(0, len(scores)))
    return np.array(scores, np.float32), budget, draw(st.integers(1, 20))


def positions(spans):
    return [position for span in spans for position in span.positions()]


def assert_sorted_merged_inside(spans, num_tokens):
    assert all(len(span) for span in spans)
    assert all(left.end < right.start for left, right in pairwise(spans))
    assert not spans or spans[-1].end <= num_tokens


@given(selections())
def test_budget_is_met_with_less_than_one_run_over(case):
    """Single tokens meet it exactly; longer runs overshoot by less than a run."""
    scores, budget, granularity = case
    spans = select_tokens(scores, budget, granularity)
    assert_sorted_merged_inside(spans, len(scores))
    assert budget <= len(positions(spans)) < budget + granularity


@given(selections())
def test_selection_is_the_best_runs_with_ties_by_position(case):
    """Agrees with a plain sort of the runs by falling mean score, then position."""
    scores, budget, granularity = case
    runs = [range(s, min(s + granularity, len(scores))) for s in range(0, len(scores), granularity)]
    means = [float(np.mean(scores[run.start : run.stop], dtype=np.float64)) for run in runs]
    rank = {id(run): (math.isnan(m), -m if m == m else 0.0) for run, m in zip(runs, means, strict=True)}
    expected: set[int] = set()
    for run in sorted(runs, key=lambda run: (rank[id(run)], run.start)):
        if len(expected) < budget:
            expected.update(run)
    assert positions(select_tokens(scores, budget, granularity)) == sorted(expected)


@given(selections())
def test_selection_is_deterministic_and_leaves_scores_alone(case):
    """The same plan gives the same answer, and profiles are shared between requests."""
    scores, budget, granularity = case
    before = scores.copy()
    assert select_tokens(scores, budget, granularity) == select_tokens(scores, budget, granularity)
    np.testing.assert_array_equal(scores, before)


@given(selections(), st.integers(0, 1000))
def test_offset_shifts_every_span(case, offset):
    """Positions in the prompt are positions in the chunk plus the chunk's start."""
    scores, budget, granularity = case
    expected = tuple(span.shift(offset) for span in select_tokens(scores, budget, granularity))
    assert select_tokens(scores, budget, granularity, offset) == expected


def test_best_single_tokens_are_merged():
    """Tokens 1 and 2 touch and become one span; the tie at .5 goes to the earlier token."""
    scores = np.array([0.1, 0.9, 0.8, 0.0, 0.5, 0.5], np.float32)
    assert select_tokens(scores, 3, 1) == (Span(1, 3), Span(4, 5))


def test_a_short_last_run_is_judged_by_its_mean():
    """One token of .9 beats runs of three with a lower mean though a higher sum."""
    scores = np.array([0.5, 0.5, 0.5, 0.8, 0.8, 0.8, 0.9], np.float32)
    assert select_tokens(scores, 1, 3) == (Span(6, 7),)
    assert select_tokens(scores, 2, 3) == (Span(3, 7),)


def test_without_scores_the_first_tokens_are_taken():
    """Nothing is known, so repair goes to the chunk's head."""
    assert select_tokens(None, 4, 3) == (Span(0, 4),)
    assert select_tokens(None, 0, 3) == ()


@pytest.mark.parametrize(("budget", "granularity"), [(-1, 1), (4, 1), (1, 0)])
def test_values_out_of_range_are_refused(budget, granularity):
    """A budget below none or above all, and runs of no tokens, are broken plans."""
    with pytest.raises(PlanError):
        select_tokens(np.zeros(3, np.float32), budget, granularity)
