"""Names of ways, and the table that is measured by default."""

from __future__ import annotations

import pytest
from benchmarks.quality.ways import BUDGETS, DEFAULT_WAYS, OUR_REGIME, OURS, RIVAL_REGIMES, Way


@pytest.mark.parametrize("way", DEFAULT_WAYS, ids=lambda way: way.name)
def test_a_name_says_all_of_a_way(way: Way) -> None:
    """Parsing a way's name gives the way."""
    assert Way.parse(way.name) == way


def test_names_of_default_ways_are_distinct() -> None:
    """Result files tell ways apart by their names."""
    names = [way.name for way in DEFAULT_WAYS]
    assert sorted(set(names)) == sorted(names)


def test_each_rival_meets_ours_at_each_budget() -> None:
    """Every rival runs at every budget, over the cache of its paper and over ours."""
    for budget in BUDGETS:
        assert Way(OURS, budget, OUR_REGIME) in DEFAULT_WAYS
        for rival, regime in RIVAL_REGIMES.items():
            assert {Way(rival, budget, regime), Way(rival, budget, OUR_REGIME)} <= set(DEFAULT_WAYS)


@pytest.mark.parametrize(
    "name", ["focus@0.15", "focus@x/alone", "focus/nowhere", "/alone", "focus/alone/4", ""]
)
def test_other_names_are_refused(name: str) -> None:
    """A misspelt way is an error before anything runs."""
    with pytest.raises(ValueError, match="is not strategy"):
        Way.parse(name)


@pytest.mark.parametrize("name", ["recompute_all/alone", "focus@1/neighbours"])
def test_exact_ways_stay_out_of_the_prefix_cache(name: str) -> None:
    """What they compute is exact: in vLLM's prefix cache it would answer the other ways."""
    assert Way.parse(name).options["read_prefix_cache"] is False


def test_approximate_ways_read_the_preamble_from_the_prefix_cache() -> None:
    """Only exact ways are kept apart, since the preamble would be computed for each request."""
    options = Way.parse("focus@0.15/neighbours/g4").options
    assert options == {"reuse": "focus", "recompute_ratio": 0.15, "granularity": 4}
