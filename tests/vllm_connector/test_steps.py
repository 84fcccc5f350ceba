"""What the ranks report, merged, and where positions lie in the paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np
import pytest

from cachecraft_rag.chunks import AttentionProfile, Span
from cachecraft_rag.vllm_connector.steps import JobFacts, StepFacts, slots_of

PARTS = ("inter_mean", "intra_mean", "inter_by_prefix", "token_scores")


def make_profile(value: float) -> AttentionProfile:
    """A profile whose parts are all different multiples of `value`."""
    scores = np.array([3 * value, 4 * value], dtype=np.float32)
    return AttentionProfile(value, 2 * value, (5 * value, 6 * value), scores)


def merge(*ranks: StepFacts) -> StepFacts:
    return reduce(StepFacts.merge, ranks)


def assert_profile(facts: StepFacts, record_id: int, expected: AttentionProfile) -> None:
    found = facts.completed[record_id]
    assert found is not None
    for part in PARTS:
        np.testing.assert_allclose(getattr(found, part), getattr(expected, part), rtol=1e-6)


@pytest.mark.parametrize("values", [[1.0], [1.0, 3.0], [1.0, 2.0, 6.0], [4.0, 0.0, 1.0, 3.0]])
def test_profiles_are_averaged_over_ranks(values: Sequence[float]) -> None:
    """Each rank saw its own heads; all of them count alike, however many there are."""
    merged = merge(*(StepFacts(completed={7: make_profile(value)}) for value in values))
    assert_profile(merged, 7, make_profile(sum(values) / len(values)))
    assert merged.num_ranks == len(values)


def test_merging_groups_of_ranks_weighs_them_by_size() -> None:
    """Two merged ranks and a third give the mean of three, in either order."""
    pair = merge(*(StepFacts(completed={7: make_profile(value)}) for value in (1.0, 2.0)))
    third = StepFacts(completed={7: make_profile(6.0)})
    assert_profile(pair.merge(third), 7, make_profile(3.0))
    assert_profile(third.merge(pair), 7, make_profile(3.0))


def test_a_record_that_one_rank_did_not_complete_is_broken() -> None:
    """Half a record is none: its other half would be garbage."""
    merged = merge(StepFacts(completed={1: None, 2: None}), StepFacts(completed={2: None, 3: None}))
    assert set(merged.completed) == {2}
    assert merged.broken == {1, 3}


def test_a_profile_that_one_rank_lacks_is_missing() -> None:
    """The mean of some heads is not the mean of all; the record itself is complete."""
    merged = merge(StepFacts(completed={1: make_profile(1.0)}), StepFacts(completed={1: None}))
    assert merged.completed == {1: None}
    assert not merged.broken


def test_broken_records_of_any_rank_stay_broken() -> None:
    """What one rank gave up is given up."""
    assert merge(StepFacts(broken=frozenset({1})), StepFacts(broken=frozenset({2}))).broken == {1, 2}


def test_job_facts_come_through() -> None:
    """Ranks do the same jobs; the first rank's account of them is kept."""
    first, second = JobFacts(0.1, 0.2, 300, (4,), 5), JobFacts(9.0, 9.0, 9)
    merged = merge(StepFacts(jobs={"r": first}), StepFacts(jobs={"r": second}))
    assert merged.jobs == {"r": first}


@pytest.mark.parametrize(
    ("facts", "is_worth_sending"),
    [
        (StepFacts(), False),
        (StepFacts(completed={1: None}), True),
        (StepFacts(broken=frozenset({1})), True),
        (StepFacts(jobs={"r": JobFacts(0.0, 0.0, 0)}), True),
    ],
)
def test_only_facts_that_say_something_are_true(facts: StepFacts, is_worth_sending: bool) -> None:
    """Empty facts are not sent."""
    assert bool(facts) is is_worth_sending


def test_slots_follow_the_block_table() -> None:
    """A position lies in its block of the table, at its place inside the block."""
    block_ids = np.array([9, 2, 5], dtype=np.int32)
    slots = slots_of(block_ids, 4, Span(2, 11))
    assert slots.dtype == np.int64
    assert slots.tolist() == [38, 39, 8, 9, 10, 11, 20, 21, 22]


def test_slots_beyond_int32_do_not_overflow() -> None:
    """A large paged cache has more slots than an int32 can count."""
    block_ids = np.array([2**30], dtype=np.int32)
    assert slots_of(block_ids, 16, Span(3, 4)).tolist() == [2**34 + 3]
