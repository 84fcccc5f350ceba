"""The state machines behind feedback, over all sequences of samples; and the measures they live on."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.chunks import ChunkKey
from cachecraft_rag.engine.breaker import (
    NUM_WATCHED_SAMPLES,
    SCALE_RANGE,
    Breaker,
    BudgetController,
    ChunkState,
    ChunkWard,
)
from cachecraft_rag.engine.quality import first_token_kl, rouge_l_f1

A, B = ChunkKey("a"), ChunkKey("b")
qualities = st.lists(st.floats(0, 1), max_size=80)


@given(qualities)
def test_breaker_opens_only_on_a_full_window_of_poor_mean(samples: list[float]) -> None:
    """It opens exactly when the mean of the last samples since it closed falls below the threshold."""
    breaker, since = Breaker(0.5, window=6, num_good_to_close=3), []
    for quality in samples:
        was_open = breaker.is_open
        breaker.add(quality)
        since = [] if was_open else [*since, quality]
        if not was_open:
            last = since[-6:]
            assert breaker.is_open == (len(last) == 6 and sum(last) / 6 < 0.5)


@given(qualities)
def test_open_breaker_closes_on_good_samples_in_a_row(samples: list[float]) -> None:
    """It closes exactly at the third good sample in a row."""
    breaker = Breaker(0.5, window=1, num_good_to_close=3)
    breaker.add(0.0)
    num_good = 0
    for quality in samples:
        num_good = num_good + 1 if quality >= 0.5 else 0
        breaker.add(quality)
        assert breaker.is_open == (num_good < 3)
        if not breaker.is_open:
            return


@given(qualities)
def test_scale_stays_in_its_range(samples: list[float]) -> None:
    """Whatever is measured, the budget is at most halved or doubled."""
    controller = BudgetController(0.9)
    for quality in samples:
        controller.add(quality)
        assert SCALE_RANGE[0] <= controller.scale <= SCALE_RANGE[1]


def test_scale_follows_the_formula() -> None:
    """One step is scale * (1 + 0.1 * (target - measured)); below the target more is recomputed."""
    low, high = BudgetController(0.9), BudgetController(0.9)
    low.add(0.5)
    high.add(1.0)
    assert low.scale == pytest.approx(1.04) and high.scale == pytest.approx(0.99)


@given(st.lists(st.sampled_from(["clean", "blamed", "restored"]), max_size=60))
def test_chunk_is_quarantined_only_on_a_second_blame(events: list[str]) -> None:
    """A chunk is quarantined by a blame that comes while it is under suspicion or on probation, and
    leaves quarantine by being stored anew alone."""
    ward = ChunkWard()
    for event in events:
        before = ward.state(A)
        if event == "restored":
            ward.restored(A)
        else:
            ward.add([A], A if event == "blamed" else None)
        after = ward.state(A)
        if after is ChunkState.QUARANTINED and before is not after:
            assert event == "blamed" and before in (ChunkState.SUSPECT, ChunkState.PROBATION)
        if before is ChunkState.QUARANTINED and after is not before:
            assert event == "restored" and after is ChunkState.PROBATION


@pytest.mark.parametrize("is_on_probation", [False, True])
def test_clean_samples_clear_a_chunk(is_on_probation: bool) -> None:
    """A suspected or re-cached chunk is clear after some samples without blame, not before."""
    ward = ChunkWard()
    ward.add([A], A)
    if is_on_probation:
        ward.add([A], A)
        ward.restored(A)
    for _ in range(NUM_WATCHED_SAMPLES):
        assert ward.needs_sample([A])
        ward.add([A, B], None)
    assert ward.state(A) is ChunkState.CLEAR and ward.num_releases == is_on_probation


def test_ward_is_bounded_and_keeps_the_quarantined() -> None:
    """Beyond its bound the ward forgets suspects before it forgets a quarantined chunk."""
    ward = ChunkWard(max_chunks=3)
    for _ in range(2):
        ward.add([A], A)
    for index in range(10):
        key = ChunkKey(str(index))
        ward.add([key], key)
    assert ward.keys_in(ChunkState.QUARANTINED) == (A,)
    assert ward.keys_in(ChunkState.SUSPECT) == (ChunkKey("8"), ChunkKey("9"))


@pytest.mark.parametrize(
    ("answer", "reference", "f1"),
    [
        ("The cat sat", "the cat sat.", 1.0),
        ("the cat ran home", "the cat sat", 4 / 7),
        ("红色的花", "红的花", 6 / 7),
        ("", "", 1.0),
        ("", "word", 0.0),
    ],
)
def test_rouge_l(answer: str, reference: str, f1: float) -> None:
    """F1 of the longest common subsequence, worked out by hand."""
    assert rouge_l_f1(answer, reference) == pytest.approx(f1)


def logs(**probabilities: float) -> dict[int, float]:
    return {ord(name): math.log(p) for name, p in probabilities.items()}


def test_kl_of_whole_distributions_is_the_kl() -> None:
    """With every token in both lists it is the textbook sum."""
    full, reuse = logs(a=0.75, b=0.25), logs(a=0.5, b=0.5)
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert first_token_kl(full, reuse) == pytest.approx(expected, abs=1e-6)
    assert first_token_kl(full, full) == 0.0


def test_kl_of_lists_without_a_common_token_is_large() -> None:
    """Top lists that share nothing are far apart, not equal; so are values that are no numbers."""
    assert first_token_kl(logs(a=0.9, b=0.05), logs(c=0.9, d=0.01)) > 2.0
    assert first_token_kl(logs(a=0.9), {ord("a"): math.nan}) == math.inf
