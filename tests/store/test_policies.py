"""Each eviction policy by its definition."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.errors import ConfigurationError, StoreError
from cachecraft_rag.store.policies import (
    DEFAULT_POLICY,
    POLICIES,
    Policy,
    Score,
    Use,
    cachecraft,
    gdsf,
    hybrid,
    lfu,
    lru,
    policy_named,
    with_ttl,
)

MINUTE_S = 60.0


def use(age: float = 0.0, *, now_s: float = 0.0, size: int = 1, cost: float = 1.0, cfo: float = 1.0) -> Use:
    return Use(age, now_s, size, cost, cfo)


def score(policy: Policy, uses: Sequence[Use], floor: float = 0.0) -> Score:
    """Score of a record that was stored by the first use and used by the others."""
    found = policy(None, uses[0], floor)
    for later in uses[1:]:
        found = policy(found, later, floor)
    return found


def at(*ages: float) -> list[Use]:
    return [use(age) for age in ages]


def assert_leaves_first(victim: Score, *others: Score) -> None:
    assert all(victim.priority < other.priority for other in others)


def test_lru_evicts_what_was_used_longest_ago() -> None:
    """However often a record was used, only its last use counts."""
    assert_leaves_first(score(lru, at(0, 1, 2)), score(lru, at(3)))


def test_lfu_evicts_what_was_used_least() -> None:
    """However long ago the uses were, while nothing has been evicted."""
    assert_leaves_first(score(lfu, at(5, 6)), score(lfu, at(0, 1, 2)))


def test_lfu_lets_old_favourites_go() -> None:
    """A record used once after the floor has risen outlives one that was used often before."""
    assert_leaves_first(score(lfu, at(0, 1, 2)), score(lfu, at(9), floor=3.0))


def test_lfu_adds_the_present_floor_to_all_uses() -> None:
    """K = F + L of the paper: uses before the last one are not forgotten."""
    before = score(lfu, at(0, 1))
    assert lfu(before, use(2), 10.0) == Score(13.0, 3.0)


@pytest.mark.parametrize(
    ("victim", "other"),
    [
        (use(size=20, cost=4), use(size=10, cost=4)),
        (use(size=10, cost=4), use(size=10, cost=5)),
    ],
)
def test_gdsf_keeps_what_saves_most_for_its_size(victim: Use, other: Use) -> None:
    """Of equally used records the larger goes first, or the one that is cheaper to compute."""
    assert_leaves_first(score(gdsf, [victim]), score(gdsf, [other]))


def test_gdsf_is_the_published_sum() -> None:
    """K = L + F * cost / size, with the floor of the last use."""
    stored = score(gdsf, [use(size=8, cost=4)])
    assert gdsf(stored, use(size=8, cost=4), 7.0) == Score(8.0, 2.0)


def test_cachecraft_counts_reuses_by_what_they_save() -> None:
    """f_r += 1 / CFO: storing counts nothing, and half a recompute counts two."""
    assert score(cachecraft, [use()]).priority == 0.0
    assert score(cachecraft, [use(), use(cfo=0.5), use(cfo=0.25)]).priority == 6.0


def test_cachecraft_survives_an_exact_use() -> None:
    """CFO 0 counts much, but not without bound: many uses of another record outweigh it."""
    exact = score(cachecraft, [use(), use(cfo=0.0)])
    assert math.isfinite(exact.priority)
    assert_leaves_first(score(cachecraft, [use(), use(cfo=0.5)]), exact)
    assert_leaves_first(exact, score(cachecraft, [use(), *[use(cfo=0.5)] * 100]))


def test_hybrid_with_a_short_half_life_is_lru() -> None:
    """Three old uses weigh less than one new."""
    policy = hybrid(0.01)
    assert_leaves_first(score(policy, at(0, 1, 2)), score(policy, at(3)))


def test_hybrid_with_a_long_half_life_is_lfu() -> None:
    """Three old uses weigh more than two new ones."""
    policy = hybrid(1e6)
    assert_leaves_first(score(policy, at(8, 9)), score(policy, at(0, 1, 2)))


def test_hybrid_halves_a_use_in_its_half_life() -> None:
    """Two uses one half-life ago weigh exactly as much as one now."""
    policy = hybrid(5.0)
    assert score(policy, at(0, 0)).priority == pytest.approx(score(policy, at(5)).priority)


ages = st.lists(st.floats(0, 200), min_size=1, max_size=8).map(sorted)


@given(ages, ages, st.floats(0.5, 50), st.floats(0, 100))
def test_hybrid_orders_by_the_decayed_sum_at_any_later_time(
    first: list[float], second: list[float], half_life: float, later: float
) -> None:
    """The priority, which knows no time, agrees with LRFU's sum whenever that is evaluated."""
    now = max(*first, *second) + later
    # In logarithms, or the sums of long ago would all be zero; relative to the last use of both.
    sums = [_log2_crf(record, now, half_life) for record in (first, second)]
    priorities = [score(hybrid(half_life), at(*record)).priority for record in (first, second)]
    assert priorities[0] - priorities[1] == pytest.approx(sums[0] - sums[1], rel=1e-9, abs=1e-9)


def _log2_crf(uses: list[float], now: float, half_life: float) -> float:
    weights = [(use_age - now) / half_life for use_age in uses]
    top = max(weights)
    return top + math.log2(math.fsum(2 ** (weight - top) for weight in weights))


@pytest.mark.parametrize("name", POLICIES)
def test_ttl_runs_from_storing_on_whatever_the_policy(name: str) -> None:
    """Uses do not prolong it, and the order of eviction is the policy's own."""
    policy = with_ttl(POLICIES[name], MINUTE_S)
    uses = [use(1, now_s=100.0), use(2, now_s=150.0)]
    found = score(policy, uses)
    assert found.expires_s == 100.0 + MINUTE_S
    assert found.priority == score(POLICIES[name], uses).priority


@pytest.mark.parametrize("name", POLICIES)
def test_records_without_ttl_never_expire(name: str) -> None:
    """A time to live is only what `with_ttl` gives."""
    assert score(policy_named(name), at(0, 1)).expires_s == math.inf


def test_the_default_is_registered() -> None:
    """It is a name like any other."""
    assert policy_named(DEFAULT_POLICY) is POLICIES[DEFAULT_POLICY]


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    """The message says what there is."""
    with pytest.raises(ConfigurationError, match=r"'mru'.*gdsf.*hybrid"):
        policy_named("mru")


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_senseless_times_are_refused(value: float) -> None:
    """Half-lives and times to live are positive."""
    with pytest.raises(ConfigurationError):
        hybrid(value)
    with pytest.raises(ConfigurationError):
        with_ttl(lru, value)


@pytest.mark.parametrize(
    "fields",
    [{"size": 0}, {"cost": -1.0}, {"cost": math.inf}, {"cost": math.nan}, {"cfo": 1.1}, {"cfo": math.nan}],
)
def test_a_use_out_of_range_is_refused(fields: dict[str, float]) -> None:
    """Anything else would put a priority into the queue that has no order."""
    with pytest.raises(StoreError):
        use(**fields)  # type: ignore[arg-type]
