"""The circuit breaker over a tier whose faults the test decides."""

from __future__ import annotations

import pytest

from cachecraft_rag.store.tiers import GuardedTier, MemoryTier, TierError
from cachecraft_rag.store.tiers.base import Blob


class BrittleTier(MemoryTier):
    """A memory tier that fails while `fault` is set, and counts how often it was asked."""

    fault: BaseException | None = None
    num_calls = 0

    def _answer(self) -> None:
        self.num_calls += 1
        if self.fault:
            raise self.fault

    def get(self, name: str) -> bytes | None:
        self._answer()
        return super().get(name)

    def put(self, name: str, value: Blob) -> bool:
        self._answer()
        return super().put(name, value)

    def flush(self) -> None:
        self._answer()
        super().flush()

    def check(self, repair: bool = False) -> list[str]:
        self._answer()
        return super().check(repair)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def tier() -> BrittleTier:
    tier = BrittleTier(10_000)
    tier.put("a", b"v")
    tier.num_calls = 0
    return tier


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def guard(tier: BrittleTier, clock: Clock) -> GuardedTier:
    return GuardedTier(tier, clock, max_faults=3, min_pause_s=1.0, max_pause_s=5.0)


def broken(guard: GuardedTier, tier: BrittleTier) -> None:
    """Three faults in a row: the breaker is open."""
    tier.fault = TierError("disk full")
    for _ in range(3):
        fail(guard)
    tier.num_calls = 0


def fail(guard: GuardedTier) -> None:
    with pytest.raises(TierError):
        guard.get("a")


def assert_not_asked(guard: GuardedTier, tier: BrittleTier) -> None:
    before = tier.num_calls
    fail(guard)
    assert tier.num_calls == before


def assert_asked_in_vain(guard: GuardedTier, tier: BrittleTier) -> None:
    before = tier.num_calls
    fail(guard)
    assert tier.num_calls == before + 1


def test_put_never_raises(guard: GuardedTier, tier: BrittleTier) -> None:
    """At a fault the value is not taken."""
    tier.fault = TierError("gone")
    assert not guard.put("b", b"v")
    assert guard.stats().last_fault == "gone"


def test_faults_in_a_row_open_it(guard: GuardedTier, tier: BrittleTier) -> None:
    """After three the medium is left alone, calls are counted, and the last fault is told."""
    broken(guard, tier)
    assert_not_asked(guard, tier)
    assert not guard.put("b", b"v")
    stats = guard.stats()
    assert (stats.num_skips, stats.last_fault) == (2, "disk full")
    assert (stats.num_blobs, guard.stats().num_skips) == (0, 2)


def test_a_success_between_faults_keeps_it_closed(guard: GuardedTier, tier: BrittleTier) -> None:
    """Only faults in a row count."""
    for _ in range(3):
        tier.fault = TierError("shaky")
        fail(guard)
        fail(guard)
        tier.fault = None
        assert guard.get("a") == b"v"
    assert guard.stats().num_skips == 0


def test_an_answer_that_would_look_complete_is_not_made_up(guard: GuardedTier, tier: BrittleTier) -> None:
    """While it is open, all but putting and counting raises, with the last fault; check says it.

    A blob that cannot be asked for is not one that is not there.
    """
    broken(guard, tier)
    calls = (
        lambda: guard.get("a"),
        lambda: guard.delete(["a"]),
        lambda: guard.discard("a", b"v"),
        guard.names,
        guard.flush,
    )
    for call in calls:
        with pytest.raises(TierError, match="disk full"):
            call()
    (sentence,) = guard.check()
    assert "disk full" in sentence
    assert tier.num_calls == 0


def test_one_trial_closes_it(guard: GuardedTier, tier: BrittleTier, clock: Clock) -> None:
    """After the pause one call is let through; if it goes well all are."""
    broken(guard, tier)
    tier.fault = None
    clock.now_s += 0.9
    assert_not_asked(guard, tier)
    clock.now_s += 0.2
    assert guard.get("a") == b"v"
    assert guard.get("a") == b"v"
    assert tier.num_calls == 2


def test_failed_trials_double_the_pause_up_to_a_limit(
    guard: GuardedTier, tier: BrittleTier, clock: Clock
) -> None:
    """Pauses of 1, 2, 4, 5 and 5 s, with one call at the end of each; after a recovery 1 s again."""
    broken(guard, tier)
    for pause_s in (1, 2, 4, 5, 5):
        clock.now_s += pause_s - 0.01
        assert_not_asked(guard, tier)
        clock.now_s += 0.02
        assert_asked_in_vain(guard, tier)
    clock.now_s += 5
    tier.fault = None
    assert guard.get("a") == b"v"
    broken(guard, tier)
    clock.now_s += 1.01
    assert_asked_in_vain(guard, tier)


def test_only_one_call_is_the_trial(guard: GuardedTier, tier: BrittleTier, clock: Clock) -> None:
    """Calls that come while the trial runs do not ask the medium."""
    broken(guard, tier)
    clock.now_s += 2
    inner: list[str] = []

    class NestedError(TierError):
        def __str__(self) -> str:
            try:
                guard.get("a")
            except TierError as fault:
                inner.append(str(fault))
            return "slow"

    tier.fault = NestedError()
    fail(guard)
    assert [fault.split(" s after")[0] for fault in inner] == ["the tier is not asked for 1"]
    assert tier.num_calls == 1


def test_an_error_that_is_not_the_mediums_passes_and_frees_the_trial(
    guard: GuardedTier, tier: BrittleTier, clock: Clock
) -> None:
    """A mistake of the caller is not hidden, and does not keep the breaker open for ever."""
    broken(guard, tier)
    clock.now_s += 2
    tier.fault = TypeError("not bytes")
    with pytest.raises(TypeError):
        guard.get("a")
    tier.fault = None
    assert guard.get("a") == b"v"


def test_counts_pass_through(guard: GuardedTier, tier: BrittleTier) -> None:
    """A healthy tier's own counts and faults are told as they are."""
    guard.get("a")
    guard.get("none")
    stats = guard.stats()
    assert (stats.num_blobs, stats.num_hits, stats.num_misses) == (1, 1, 1)
    assert guard.check() == []
    guard.close()
    fail(guard)
