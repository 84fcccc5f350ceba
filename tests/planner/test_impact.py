"""Cache-Craft eq. 11-12 against examples worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.chunks import AttentionProfile
from cachecraft_rag.planner.impact import cci, cfo, impact
from cachecraft_rag.planner.overlap import beta_prime, paper_beta_prime


def profile(inter_mean: float, intra_mean: float) -> AttentionProfile:
    return AttentionProfile(inter_mean, intra_mean, (), np.zeros(1, np.float32))


@pytest.mark.parametrize(
    ("inter_mean", "intra_mean", "expected"),
    [
        (0.05, 0.5, 0.525),
        (0.1, 0.4, 0.562),
        (0.2, 0.3, 0.661),
        (0.3, 0.3, 0.731),
        (0.4, 0.2, 0.881),
        (0.0, 0.4, 0.5),
    ],
)
def test_cci_matches_the_worked_examples(inter_mean, intra_mean, expected):
    """Attention to the prefix over attention to itself, through a sigmoid."""
    assert cci(profile(inter_mean, intra_mean)) == pytest.approx(expected, abs=6e-4)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (None, 1.0),
        (profile(0.2, 0.0), 1.0),
        (profile(0.0, 0.0), 0.5),
        (profile(math.nan, 0.2), 1.0),
        (profile(0.2, math.inf), 1.0),
    ],
)
def test_cci_at_the_edges(known, expected):
    """What is not known or not finite is not trusted; no attention at all has no impact."""
    assert cci(known) == expected


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_impact_spans_zero_to_one(inter_mean, intra_mean):
    """CCI never falls below one half, so impact is CCI stretched to [0, 1]."""
    known = profile(inter_mean, intra_mean)
    assert 0.5 <= cci(known) <= 1.0
    assert 0.0 <= impact(known) <= 1.0


def test_impact_of_equal_attention():
    """a = b gives CCI .731 and impact .462."""
    assert impact(profile(0.3, 0.3)) == pytest.approx(0.4621, abs=1e-4)


def test_cfo_by_hand(make_record):
    """alpha .6, CCI .731, beta' = .7 of the attention * 1 of 2 chunks seen = .35."""
    record = make_record(prefix="ab", inter=(0.7, 0.3), mean_ratio=(0.3, 0.3))
    assert cfo(record, "ax", 0.6, beta_prime) == pytest.approx(0.6 * 0.7311 * 0.65, abs=1e-4)


def test_cfo_of_the_old_prefix_is_zero(make_record):
    """The same chunks in the same order need no repair by this formula."""
    record = make_record(prefix="ab", inter=(0.7, 0.3))
    assert cfo(record, "ab", 2.0, beta_prime) == 0.0


def test_cfo_is_clamped_to_the_whole_chunk(make_record):
    """A large alpha cannot ask for more than every token."""
    assert cfo(make_record(prefix="ab", inter=(0.7, 0.3)), "xy", 2.0, beta_prime) == 1.0


def test_first_position_variant_is_repaired_behind_other_chunks(make_record):
    """Hole 4 of the paper: it must not count as reusable for ever."""
    record = make_record(prefix="", inter=(), mean_ratio=(0.0, 0.4))
    assert cfo(record, "a", 0.3, beta_prime) == pytest.approx(0.15)
    assert cfo(record, "", 0.3, beta_prime) == 0.0


def test_first_position_variant_needs_nothing_by_the_published_formula(make_record):
    """0/0 counts as full overlap there, so the overhead is none behind whatever chunks."""
    record = make_record(prefix="", inter=(), mean_ratio=(0.0, 0.4))
    assert cfo(record, "a", 0.3, paper_beta_prime) == 0.0


def test_published_overhead_by_hand(make_record):
    """alpha .6, CCI .731, beta' = .7 of the attention, whatever else is in the new prefix."""
    record = make_record(prefix="ab", inter=(0.7, 0.3), mean_ratio=(0.3, 0.3))
    assert cfo(record, "ax", 0.6, paper_beta_prime) == pytest.approx(0.6 * 0.7311 * 0.3, abs=1e-4)


@pytest.mark.parametrize("overlap", [beta_prime, paper_beta_prime])
@given(alpha=st.floats(0, 2), new_prefix=st.permutations("abxy"))
def test_larger_alpha_never_recomputes_less(make_record, overlap, alpha, new_prefix):
    """The direction of the presets: faithful repairs at least as much as fast."""
    record = make_record(prefix="ab", inter=(0.7, 0.3))
    low, high = (cfo(record, new_prefix, a, overlap) for a in (alpha, alpha + 0.5))
    assert 0.0 <= low <= high <= 1.0
