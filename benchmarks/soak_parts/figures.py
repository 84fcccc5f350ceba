"""The figures of a soak and what they must be: plain arithmetic over its samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MEMORY = "memory beside the store, MB per 1,000 requests"
MAX_SLOPE_MB = 1.0
"""MB per 1,000 requests, error included: one KB a request."""
MAX_DECAY = 0.03
MAX_GAP = 1e-3
"""Float32 log-probabilities closer than this are the same. At a step where the chosen tokens differ they
are compared too, so that only a tie can pass."""
MIN_JUDGED_QUESTIONS = 5_000
"""With fewer, memory still follows the filling of what vLLM keeps for each shape of batch."""
WIDTH_IN_ERRORS = 2.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The state after so many questions, when none runs; the counts of questions are since the sample before.

    Attributes:
        driver_bytes: resident memory of this process, and `engine_bytes` of vLLM's processes together.
        stored_bytes: of it, the store's records, which come and go within their budget.
        free_bytes: of it, what the workers' C allocator holds and nobody uses.
        num_faults: sentences of `check()`, asked while requests ran.
    """

    num_questions: int
    time_s: float
    driver_bytes: int
    engine_bytes: int
    stored_bytes: int
    free_bytes: int
    num_records: int
    num_chunks: int
    num_chunk_hits: int
    num_prompt_tokens: int
    num_reused_tokens: int
    num_faults: int

    @property
    def used_bytes(self) -> int:
        return self.driver_bytes + self.engine_bytes - self.stored_bytes - self.free_bytes

    @property
    def hit_rate(self) -> float:
        return _share(self.num_chunk_hits, self.num_chunks)

    @property
    def reused_share(self) -> float:
        return _share(self.num_reused_tokens, self.num_prompt_tokens)


@dataclass(frozen=True, slots=True)
class Slope:
    """Of a straight line through points, with the standard error of it."""

    value: float
    error: float


@dataclass(frozen=True, slots=True)
class Criterion:
    """`has_passed` is None where the run is too short to tell."""

    name: str
    figure: str
    aim: str
    has_passed: bool | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that a run gave.

    Attributes:
        gaps: log-probability gap to full compute of each spot check.
        num_checked_with_stored: of them, those whose recompute pass took a chunk from the store.
        num_stale: chunks whose stored KV was used after a replace of their version had returned.
        leaks: what should be zero when nothing runs.
        faults: all sentences of `check()`.
        errors: what failed requests said.
    """

    samples: Sequence[Sample]
    gaps: Sequence[float]
    num_checked_with_stored: int
    num_aborted: int
    num_stale: int
    leaks: Mapping[str, int]
    faults: Sequence[str] = ()
    errors: Sequence[str] = ()
    counts: Mapping[str, int] = field(default_factory=dict)


def fit_slope(x: Sequence[float], y: Sequence[float]) -> Slope:
    """Least squares. Raises ValueError for fewer than three points, or all at one x."""
    count = len(x)
    if count < 3 or len(set(x)) < 2:
        raise ValueError(f"{count} points at {len(set(x))} places: a slope and its error need more")
    mean_x, mean_y = sum(x) / count, sum(y) / count
    spread = sum((each - mean_x) ** 2 for each in x)
    value = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    residuals = (b - mean_y - value * (a - mean_x) for a, b in zip(x, y, strict=True))
    variance = sum(residual**2 for residual in residuals) / (count - 2)
    return Slope(value, math.sqrt(variance / spread))


def memory_slope(samples: Sequence[Sample], attribute: str = "used_bytes") -> Slope:
    """MB per 1,000 questions over the last half."""
    half = samples[len(samples) // 2 :]
    return fit_slope(
        [each.num_questions / 1_000 for each in half], [getattr(each, attribute) / 1e6 for each in half]
    )


def hit_rate_of_fifth(samples: Sequence[Sample], fifth: int) -> float:
    """Of the samples in one fifth of the run, counted from 0."""
    last = samples[-1].num_questions
    chosen = [each for each in samples if fifth * last < 5 * each.num_questions <= (fifth + 1) * last]
    return _share(sum(each.num_chunk_hits for each in chosen), sum(each.num_chunks for each in chosen))


def judge(outcome: Outcome) -> list[Criterion]:
    is_long = outcome.samples[-1].num_questions >= MIN_JUDGED_QUESTIONS and len(outcome.samples) >= 10
    return [
        *(_judge_course(outcome.samples) if is_long else _unjudged()),
        _none_of("leaks", {name: count for name, count in outcome.leaks.items() if count}),
        _none_of("check()", outcome.faults),
        _judge_answers(outcome),
        Criterion("chunks of replaced versions reused", str(outcome.num_stale), "0", not outcome.num_stale),
        _none_of("failed requests", outcome.errors),
    ]


def _judge_course(samples: Sequence[Sample]) -> list[Criterion]:
    slope = memory_slope(samples)
    second, last = hit_rate_of_fifth(samples, 1), hit_rate_of_fifth(samples, 4)
    return [
        Criterion(
            MEMORY,
            f"{slope.value:+.2f} ± {slope.error:.2f}",
            f"with {WIDTH_IN_ERRORS:.0f} errors ≤ {MAX_SLOPE_MB}",
            slope.value + WIDTH_IN_ERRORS * slope.error <= MAX_SLOPE_MB,
        ),
        Criterion(
            "hit rate, last fifth against second",
            f"{last:.1%} against {second:.1%}",
            f"at most {MAX_DECAY:.0%} less",
            last >= second - MAX_DECAY,
        ),
    ]


def _unjudged() -> list[Criterion]:
    names = (MEMORY, "hit rate, last fifth against second")
    return [Criterion(name, "", f"needs {MIN_JUDGED_QUESTIONS:,} requests", None) for name in names]


def _judge_answers(outcome: Outcome) -> Criterion:
    # Written so that a NaN counts as differing.
    num_differing = sum(not gap <= MAX_GAP for gap in outcome.gaps)
    figure = (
        f"{num_differing} of {len(outcome.gaps)} differ, largest gap {max(outcome.gaps, default=0.0):.1e}; "
        f"{outcome.num_checked_with_stored} had stored chunks"
    )
    is_told = num_differing == 0 and outcome.num_checked_with_stored > 0
    return Criterion("spot checks against full compute", figure, f"gaps ≤ {MAX_GAP}", is_told)


def _none_of(name: str, found: Mapping[str, int] | Sequence[str]) -> Criterion:
    return Criterion(name, str(found)[:200] if found else "0", "0", not found)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
