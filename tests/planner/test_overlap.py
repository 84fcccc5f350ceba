"""Cache-Craft eq. 6-8 against examples worked by hand, and the departures from the paper."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.errors import PlanError
from cachecraft_rag.planner.overlap import beta, beta_prime, gamma, paper_beta, paper_beta_prime


def test_beta_is_the_share_of_attention_to_common_chunks(make_record):
    """Of .6 + .3 + .1 the common chunks a and b hold .9, and they are all of the new prefix."""
    record = make_record(prefix="abx", inter=(0.6, 0.3, 0.1))
    assert beta(record, "ab") == pytest.approx(0.9)


def test_unseen_chunks_in_the_new_prefix_lower_beta(make_record):
    """A new prefix that contains the old one is not the old one: 2 of 4 chunks were seen."""
    record = make_record(prefix="ab", inter=(0.6, 0.4))
    assert beta(record, "ab") == pytest.approx(1.0)
    assert beta(record, "axby") == pytest.approx(0.5)


def test_disjoint_prefixes_do_not_overlap(make_record):
    """No common chunk, no overlap; nor is there any with an empty new prefix."""
    record = make_record(prefix="ab", inter=(0.6, 0.4))
    assert beta_prime(record, "xy") == 0.0
    assert beta_prime(record, "") == 0.0


@pytest.mark.parametrize("inter", [None, ()])
def test_a_first_position_variant_fits_only_the_first_position(make_record, inter):
    """0/0 counts as full overlap only where no chunk stands before the chunk now either."""
    record = make_record(prefix="", inter=inter)
    assert beta_prime(record, "") == 1.0
    assert beta_prime(record, "a") == 0.0


@pytest.mark.parametrize("inter", [None, (0.0, 0.0), (math.nan, 0.1), (math.inf, 0.1)])
def test_nothing_known_is_no_overlap(make_record, inter):
    """Without a usable attention profile even the identical prefix is not trusted."""
    assert beta_prime(make_record(prefix="ab", inter=inter), "ab") == 0.0


def test_first_occurrence_of_a_repeated_key_counts(make_record):
    """The second a in either prefix changes neither the weights nor the order."""
    record = make_record(prefix="aba", inter=(0.6, 0.4, 5.0))
    assert beta(record, "aa") == pytest.approx(0.6)
    assert gamma("aba", "aab") == 0.0


def test_a_profile_must_match_its_prefix(make_record):
    """One value for two chunks is a damaged record, not a reason to guess."""
    with pytest.raises(PlanError, match="1 values for 2 prefix chunks"):
        beta(make_record(prefix="ab", inter=(0.6,)), "ab")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("abc", "abc", 0.0),
        ("abc", "cba", 1.0),
        ("abc", "acb", 1 / 3),
        ("abcd", "bxda", 2 / 3),
        ("abc", "xay", 0.0),
        ("", "ab", 0.0),
    ],
)
def test_gamma_is_the_share_of_discordant_pairs(old, new, expected):
    """Pairs among the common chunks only; fewer than two chunks have no order."""
    assert gamma(old, new) == pytest.approx(expected)


@given(st.permutations("abcdefgh"), st.permutations("abcdefghij"))
def test_gamma_equals_counting_pairs(old, new):
    """The sorted-insertion count agrees with the definition of Kendall's tau distance."""
    pairs = list(combinations(old, 2))
    discordant = sum(new.index(left) > new.index(right) for left, right in pairs)
    assert gamma(old, new) == pytest.approx(discordant / len(pairs))


def test_beta_prime_discounts_disorder(make_record):
    """All chunks are there, one of three pairs is swapped: 1 * (1 - 1/3)."""
    record = make_record(prefix="abc", inter=(0.2, 0.3, 0.5))
    assert beta_prime(record, "acb") == pytest.approx(2 / 3)


@pytest.mark.parametrize("new_prefix", ["", "a", "xyz"])
@pytest.mark.parametrize("inter", [None, ()])
def test_a_first_position_variant_fits_everywhere_in_the_paper(make_record, inter, new_prefix):
    """0/0 counts as 1 there, as both known re-implementations have it."""
    assert paper_beta_prime(make_record(prefix="", inter=inter), new_prefix) == 1.0


@pytest.mark.parametrize(
    ("inter", "expected"), [(None, 0.0), ((0.0, 0.0), 1.0), ((math.nan, 0.1), 0.0), ((math.inf, 0.1), 0.0)]
)
def test_the_paper_without_a_usable_profile(make_record, inter, expected):
    """No attention to the prefix is 0/0 again; what was not or not properly measured is no overlap."""
    assert paper_beta(make_record(prefix="ab", inter=inter), "xy") == expected


def test_unseen_chunks_in_the_new_prefix_do_not_lower_the_published_beta(make_record):
    """Only the share of attention counts: .6 of it went to chunk a, in whatever company it is now."""
    record = make_record(prefix="aba", inter=(0.6, 0.4, 5.0))
    assert paper_beta(record, "a") == paper_beta(record, "axyz") == pytest.approx(0.6)
    assert paper_beta(record, "xyz") == paper_beta(record, "") == 0.0


@given(data=st.data(), old=st.text("abcd", min_size=1, max_size=4), new=st.text("abcdxy", max_size=6))
def test_ours_never_trusts_more_than_the_paper(make_record, data, old, new):
    """Every departure lowers the overlap; both stay in [0, 1]."""
    inter = data.draw(st.lists(st.floats(0, 9), min_size=len(old), max_size=len(old)))
    record = make_record(prefix=old, inter=inter)
    assert 0.0 <= beta(record, new) <= paper_beta(record, new) <= 1.0 + 1e-9
    assert 0.0 <= beta_prime(record, new) <= paper_beta_prime(record, new) <= 1.0 + 1e-9


def test_the_published_beta_needs_a_matching_profile_too(make_record):
    """One value for two chunks is a damaged record here as well."""
    with pytest.raises(PlanError, match="1 values for 2 prefix chunks"):
        paper_beta(make_record(prefix="ab", inter=(0.6,)), "ab")
