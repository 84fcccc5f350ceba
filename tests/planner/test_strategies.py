"""Which variant each strategy takes, and how much of it it repairs."""

from __future__ import annotations

import pytest

from cachecraft_rag.errors import InvalidRequestError
from cachecraft_rag.planner.impact import cfo
from cachecraft_rag.planner.strategies import STRATEGIES, StrategyOptions, get_strategy

OPTIONS = StrategyOptions(alpha=0.6)


def assert_chooses(variants, new_prefix, record):
    for strategy in STRATEGIES.values():
        for order in (variants, variants[::-1]):
            assert strategy.choose(order, new_prefix, OPTIONS).record is record


def test_unknown_names_list_the_known_ones():
    """The message tells what to write instead."""
    with pytest.raises(InvalidRequestError, match="'cachcraft': choose one of cachecraft, naive, recomp"):
        get_strategy("cachcraft")


def test_lowest_overhead_is_chosen(make_record):
    """The variant that saw the new prefix beats a newer one that did not."""
    seen = make_record(record_id=1, prefix="ab", inter=(0.7, 0.3))
    unseen = make_record(record_id=2, prefix="xy", inter=(0.7, 0.3))
    assert_chooses([seen, unseen], "ab", seen)


def test_exact_history_comes_before_low_overhead(make_record):
    """KV computed behind approximate KV is second choice, however well it fits."""
    approximate = make_record(record_id=2, prefix="ab", inter=(0.7, 0.3), prefix_is_exact=False)
    exact = make_record(record_id=1, prefix="xy", inter=(0.7, 0.3))
    assert_chooses([approximate, exact], "ab", exact)


def test_the_newest_of_equals_is_chosen(make_record):
    """Ties do not depend on the order in which the index lists variants."""
    older, newer = (make_record(record_id=i, prefix="xy", inter=(0.7, 0.3)) for i in (3, 4))
    assert_chooses([older, newer], "ab", newer)


def test_cachecraft_repairs_the_fix_overhead(make_record):
    """Without a ratio the share is Cache-Craft's own."""
    record = make_record(prefix="ab", inter=(0.7, 0.3))
    choice = get_strategy("cachecraft").choose([record], "ax", OPTIONS)
    assert choice.share == cfo(record, "ax", 0.6) > 0.0


@pytest.mark.parametrize(("name", "expected"), [("naive", 0.0), ("cachecraft", 0.25), ("recompute_all", 1.0)])
def test_a_ratio_replaces_the_share_between_the_ends(make_record, name, expected):
    """naive and recompute_all are the two ends of the scale and stay there."""
    record = make_record(prefix="ab", inter=(0.7, 0.3))
    options = StrategyOptions(alpha=0.6, recompute_ratio=0.25)
    assert get_strategy(name).choose([record], "ax", options).share == expected
