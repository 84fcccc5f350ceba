"""Bootstrap intervals."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.quality.stats import Estimate, bootstrap_mean


def test_cells_count_alike_whatever_their_size() -> None:
    """The mean is that of the cells' means, not of all values."""
    assert bootstrap_mean([[0.0] * 90, [1.0] * 10]).mean == pytest.approx(0.5)


def test_interval_agrees_with_the_normal_approximation() -> None:
    """For 400 values the percentile interval is close to mean ± 1.96 standard errors."""
    values = np.random.default_rng(0).normal(3.0, 2.0, 400)
    estimate = bootstrap_mean([values.tolist()])
    half_width = 1.96 * values.std() / 20
    assert estimate.low == pytest.approx(values.mean() - half_width, abs=0.03)
    assert estimate.high == pytest.approx(values.mean() + half_width, abs=0.03)


def test_cells_are_drawn_independently() -> None:
    """Two cells with the same values have a narrower interval than one, by the square root of 2."""
    values = np.random.default_rng(1).normal(0.0, 1.0, 300).tolist()
    one, two = bootstrap_mean([values]), bootstrap_mean([values, values])
    assert (two.high - two.low) / (one.high - one.low) == pytest.approx(0.5**0.5, abs=0.06)


def test_same_values_give_the_same_interval() -> None:
    """The seed is fixed, so that a report written again is the same."""
    assert bootstrap_mean([[1.0, 2.0, 5.0]]) == bootstrap_mean([[1.0, 2.0, 5.0]])


@pytest.mark.parametrize("cells", [[], [[]], [[1.0], []]])
def test_nothing_measured_is_an_error(cells: list[list[float]]) -> None:
    """An empty cell has no mean."""
    with pytest.raises(ValueError, match="at least one cell"):
        bootstrap_mean(cells)


@pytest.mark.parametrize(
    ("low", "high", "reading"),
    [(-0.2, -0.1, "below 0"), (0.1, 0.2, "above 0"), (-0.1, 0.1, "includes 0"), (0.0, 0.1, "includes 0")],
)
def test_reading_says_where_the_interval_lies(low: float, high: float, reading: str) -> None:
    """An interval that touches zero includes it."""
    assert Estimate((low + high) / 2, low, high).reading == reading
