"""Which variant each strategy takes, and how much of it it repairs."""

from __future__ import annotations

import pytest

from cachecraft_rag.errors import InvalidRequestError
from cachecraft_rag.planner.impact import cfo
from cachecraft_rag.planner.overlap import beta_prime, paper_beta_prime
from cachecraft_rag.planner.strategies import STRATEGIES, StrategyOptions, get_strategy

OPTIONS = StrategyOptions(alpha=0.6, share=0.4)
BY_OVERLAP = sorted(STRATEGIES.keys() - {"cachecraft"})


def assert_chooses(variants, new_prefix, record, names=tuple(STRATEGIES)):
    for strategy in map(get_strategy, names):
        for order in (variants, variants[::-1]):
            assert strategy.choose(order, new_prefix, OPTIONS).record is record


def share_of(name, record, new_prefix, options=OPTIONS):
    return get_strategy(name).choose([record], new_prefix, options).share


def test_unknown_names_list_the_known_ones():
    """The message tells what to write instead."""
    known = "cacheblend, cachecraft, epic, focus, naive, question, recompute_all"
    with pytest.raises(InvalidRequestError, match=f"'cachcraft': choose one of {known}"):
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


def test_overlap_ranks_before_context(make_record):
    """One chunk that stands there again is worth more than two that do not."""
    fitting = make_record(record_id=1, prefix="a", inter=(1.0,))
    longer = make_record(record_id=2, prefix="xy", inter=(0.5, 0.5))
    assert_chooses([fitting, longer], "ab", fitting, BY_OVERLAP)


def test_of_variants_without_overlap_the_one_with_most_context_is_chosen(make_record):
    """KV that never saw another chunk is the worst to move, even if it is the newest."""
    longer = make_record(record_id=1, prefix="xy", inter=(0.5, 0.5))
    shorter = make_record(record_id=2, prefix="x", inter=(1.0,))
    bare = make_record(record_id=3, prefix="", inter=())
    assert_chooses([bare, shorter, longer], "ab", longer, BY_OVERLAP)


def test_the_published_formula_prefers_a_variant_that_stood_first(make_record):
    """Its overlap is 0/0, which counts as 1: hole 4 of the paper, kept for the comparison."""
    bare = make_record(record_id=1, prefix="", inter=(), mean_ratio=(0.0, 0.4))
    fitting = make_record(record_id=2, prefix="ax", inter=(0.9, 0.1))
    assert_chooses([bare, fitting], "ab", bare, ["cachecraft"])
    assert_chooses([bare, fitting], "ab", fitting, BY_OVERLAP)
    assert share_of("cachecraft", bare, "ab") == 0.0


def test_cachecraft_repairs_the_fix_overhead(make_record):
    """Without a ratio the share is Cache-Craft's own, whatever share the request names."""
    record = make_record(prefix="ab", inter=(0.7, 0.3))
    assert share_of("cachecraft", record, "ax") == cfo(record, "ax", 0.6, paper_beta_prime) > 0.0


@pytest.mark.parametrize("name", ["question", "cacheblend", "epic"])
def test_strategies_without_a_formula_repair_the_share_of_the_request(make_record, name):
    """However well the variant fits."""
    record = make_record(prefix="ab", inter=(0.7, 0.3))
    assert share_of(name, record, "ab") == share_of(name, record, "xy") == 0.4


def test_focus_repairs_what_the_chunk_has_not_seen(make_record):
    """The whole share behind strangers, nothing behind its old neighbours, less in between."""
    record = make_record(prefix="ab", inter=(0.7, 0.3))
    assert share_of("focus", record, "xy") == 0.4
    assert share_of("focus", record, "ab") == pytest.approx(0.0)
    assert share_of("focus", record, "ax") == pytest.approx(0.4 * (1 - beta_prime(record, "ax")))


@pytest.mark.parametrize("name", sorted(STRATEGIES.keys() - {"naive", "recompute_all"}))
def test_a_ratio_replaces_the_share(make_record, name):
    """A fixed ratio goes before every formula, also for a variant that needs nothing."""
    record = make_record(prefix="ab", inter=(0.7, 0.3))
    options = StrategyOptions(alpha=0.6, share=0.4, recompute_ratio=0.25)
    assert share_of(name, record, "ab", options) == share_of(name, record, "xy", options) == 0.25


@pytest.mark.parametrize(("name", "expected"), [("naive", 0.0), ("recompute_all", 1.0)])
def test_the_ends_of_the_scale_stay_where_they_are(make_record, name, expected):
    """Neither a ratio nor a share moves naive and recompute_all."""
    record = make_record(prefix="ab", inter=(0.7, 0.3))
    assert share_of(name, record, "ax", StrategyOptions(0.6, 0.4, 0.25)) == expected
    assert share_of(name, record, "ax") == expected
