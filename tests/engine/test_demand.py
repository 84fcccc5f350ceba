"""Counts with exponential decay: equal to their formula, and bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.engine.demand import DecayedCounts
from cachecraft_rag.errors import ConfigurationError

KEYS = "abcde"
# Between two requests for chunks, in half-lives.
gaps = st.floats(0, 20, allow_nan=False)
requests = st.lists(st.tuples(st.sampled_from(KEYS), gaps), max_size=40)


def counted(
    half_life_s: float, max_keys: int, asked: list[tuple[str, float]]
) -> tuple[DecayedCounts[str], float]:
    counts: DecayedCounts[str] = DecayedCounts(half_life_s, max_keys)
    now_s = 0.0
    for key, gap in asked:
        now_s += gap * half_life_s
        counts.add(key, now_s)
    return counts, now_s


@given(requests, st.sampled_from([0.5, 60.0, 86_400.0]))
def test_counts_equal_their_formula(asked: list[tuple[str, float]], half_life_s: float) -> None:
    """The sum over all requests of 2 to the minus age in half-lives."""
    counts, now_s = counted(half_life_s, len(KEYS), asked)
    times, at_s = [], 0.0
    for key, gap in asked:
        at_s += gap * half_life_s
        times.append((key, at_s))
    for key in KEYS:
        expected = sum(2.0 ** ((t - now_s) / half_life_s) for name, t in times if name == key)
        assert counts.count(key, now_s) == pytest.approx(expected, rel=1e-9)
        assert counts.count(key, now_s + half_life_s) == pytest.approx(expected / 2, rel=1e-9)


@given(requests, st.integers(1, 4))
def test_the_keys_asked_for_last_are_counted(asked: list[tuple[str, float]], max_keys: int) -> None:
    """Never more than so many, and each key that goes is named once as it goes."""
    counts: DecayedCounts[str] = DecayedCounts(60.0, max_keys)
    held: set[str] = set()
    for turn, (key, _) in enumerate(asked):
        gone = counts.add(key, float(turn))
        held = (held | {key}) - {gone}
        assert len(counts) <= max_keys and held == set(counts)
    latest = list(dict.fromkeys(key for key, _ in reversed(asked)))[:max_keys]
    assert set(counts) == set(latest)


@given(requests, st.floats(0.01, 3))
def test_most_wanted_are_in_order_and_above_the_limit(
    asked: list[tuple[str, float]], at_least: float
) -> None:
    """All of them, and no other; keys at the very limit may fall on either side."""
    counts, now_s = counted(60.0, len(KEYS), asked)
    wanted = counts.most_wanted(at_least, now_s)
    found = [counts.count(key, now_s) for key in wanted]
    assert found == sorted(found, reverse=True) and all(count >= at_least * (1 - 1e-9) for count in found)
    left = set(counts) - set(wanted)
    assert all(counts.count(key, now_s) <= at_least * (1 + 1e-9) for key in left)


def test_what_is_discarded_begins_anew() -> None:
    """Also a key that was not counted may be discarded."""
    counts, now_s = counted(60.0, 5, [("a", 0.0), ("a", 0.0)])
    counts.discard("a")
    counts.discard("b")
    assert counts.count("a", now_s) == 0.0
    counts.add("a", now_s)
    assert counts.count("a", now_s) == 1.0


@pytest.mark.parametrize(("half_life_s", "max_keys"), [(0.0, 1), (float("inf"), 1), (1.0, 0)])
def test_arguments_are_checked(half_life_s: float, max_keys: int) -> None:
    """The message names what is wrong."""
    with pytest.raises(ConfigurationError, match="must be"):
        DecayedCounts(half_life_s, max_keys)
