"""The arithmetic of a soak, and when it fails."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.soak_parts.figures import (
    MEMORY,
    MIN_JUDGED_QUESTIONS,
    Criterion,
    Outcome,
    Sample,
    fit_slope,
    hit_rate_of_fifth,
    judge,
    memory_slope,
)

SAMPLE = Sample(
    num_questions=0,
    time_s=0.0,
    driver_bytes=400_000_000,
    engine_bytes=600_000_000,
    stored_bytes=0,
    free_bytes=0,
    num_records=10,
    num_chunks=100,
    num_chunk_hits=50,
    num_prompt_tokens=1_000,
    num_reused_tokens=400,
    num_faults=0,
)


def samples(bytes_per_question: float = 0.0, hits: int = 50, last_hits: int = 50) -> list[Sample]:
    """100 of 10,000 questions; `last_hits` of 100 in the last fifth."""
    return [
        replace(
            SAMPLE,
            num_questions=100 * number,
            engine_bytes=600_000_000 + round(100 * number * bytes_per_question),
            num_chunk_hits=hits if number <= 80 else last_hits,
        )
        for number in range(1, 101)
    ]


def outcome(**changed: object) -> Outcome:
    clean = Outcome(
        samples=samples(),
        gaps=(0.0, 1e-6),
        num_checked_with_stored=1,
        num_aborted=3,
        num_stale=0,
        leaks={"num_pinned": 0},
    )
    return replace(clean, **changed)  # type: ignore[arg-type]


def failed(judged: Outcome) -> list[str]:
    return [each.name for each in judge(judged) if each.has_passed is False]


def test_slope_of_a_line_is_exact() -> None:
    slope = fit_slope([1, 2, 3, 4], [5, 7, 9, 11])
    assert slope.value == pytest.approx(2)
    assert slope.error == pytest.approx(0, abs=1e-12)


def test_slope_and_its_error_agree_with_numpy() -> None:
    rng = random.Random(1)
    x = [float(number) for number in range(30)]
    y = [0.3 * each + rng.gauss(0, 2) for each in x]
    (value, _), covariance = np.polyfit(x, y, 1, cov=True)
    slope = fit_slope(x, y)
    assert slope.value == pytest.approx(value)
    assert slope.error == pytest.approx(covariance[0, 0] ** 0.5)


@pytest.mark.parametrize(("x", "y"), [([1, 2], [1, 2]), ([1, 1, 1], [1, 2, 3])])
def test_slope_without_enough_points_is_refused(x: list[float], y: list[float]) -> None:
    with pytest.raises(ValueError, match="need more"):
        fit_slope(x, y)


def test_memory_slope_looks_at_the_last_half_only() -> None:
    """What fills the store in the first half is no leak; a constant is none either."""
    filling = [replace(each, engine_bytes=each.engine_bytes - 10**8) for each in samples()[:50]]
    assert memory_slope(filling + samples()[50:]).value == pytest.approx(0, abs=1e-9)
    assert memory_slope(samples(bytes_per_question=2_000)).value == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("name", ["free_bytes", "stored_bytes"])
def test_memory_of_records_or_that_nobody_uses_is_no_leak(name: str) -> None:
    growing = samples(bytes_per_question=5_000)
    accounted = [replace(each, **{name: each.engine_bytes - 600_000_000}) for each in growing]
    assert failed(outcome(samples=growing)) == [MEMORY]
    assert failed(outcome(samples=accounted)) == []


def test_hit_rate_of_a_fifth_has_no_sample_of_its_neighbours() -> None:
    course = samples(hits=50, last_hits=20)
    assert hit_rate_of_fifth(course, 3) == pytest.approx(0.5)
    assert hit_rate_of_fifth(course, 4) == pytest.approx(0.2)


def test_clean_run_passes() -> None:
    assert failed(outcome()) == []


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"samples": samples(bytes_per_question=1_200)}, MEMORY),
        ({"samples": samples(last_hits=46)}, "hit rate, last fifth against second"),
        ({"leaks": {"num_pinned": 1}}, "leaks"),
        ({"leaks": {"lost_blocks": -1}}, "leaks"),
        ({"faults": ["a record without bytes"]}, "check()"),
        ({"gaps": (0.0, 0.01)}, "spot checks against full compute"),
        ({"gaps": (0.0, float("nan"))}, "spot checks against full compute"),
        ({"num_checked_with_stored": 0}, "spot checks against full compute"),
        ({"num_stale": 1}, "chunks of replaced versions reused"),
        ({"errors": ["ask 3: boom"]}, "failed requests"),
    ],
)
def test_each_fault_fails_its_own_criterion(changed: dict[str, object], name: str) -> None:
    assert failed(outcome(**changed)) == [name]


def test_growth_that_noise_may_hide_fails() -> None:
    """Flat has to be shown: a slope under the limit whose error reaches over it is none."""
    noisy = [
        replace(each, engine_bytes=each.engine_bytes + (number % 2) * 40_000_000)
        for number, each in enumerate(samples())
    ]
    assert failed(outcome(samples=noisy)) == [MEMORY]


def test_better_hit_rate_at_the_end_passes() -> None:
    assert failed(outcome(samples=samples(last_hits=70))) == []


def test_short_run_is_not_judged_by_its_course() -> None:
    short = [each for each in samples(last_hits=0) if each.num_questions < MIN_JUDGED_QUESTIONS]
    unjudged = [each for each in judge(outcome(samples=short)) if each.has_passed is None]
    assert len(unjudged) == 2
    assert all(isinstance(each, Criterion) and "needs" in each.aim for each in unjudged)
