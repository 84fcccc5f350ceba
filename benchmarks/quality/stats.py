"""Means with bootstrap intervals over cells, a cell being one model on one set.

Cells count alike, however many items they have. A resample draws items anew within each cell.
Percentile intervals after Efron and Tibshirani, An Introduction to the Bootstrap (1993), ch. 13.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NUM_RESAMPLES = 2000
CONFIDENCE = 0.95
_SEED = 7


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self:.4f}"

    def __format__(self, spec: str) -> str:
        """`spec` is that of each of the three numbers; without one it is `str`."""
        spec = spec or ".4f"
        return f"{self.mean:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"

    @property
    def reading(self) -> str:
        """What the interval of a difference says, without a judgement."""
        if self.low > 0:
            return "above 0"
        return "below 0" if self.high < 0 else "includes 0"


def bootstrap_mean(cells: Sequence[Sequence[float]]) -> Estimate:
    """Mean over the cells' means, and its interval. For paired data pass the pairs' differences.

    The same values give the same interval.

    Raises:
        ValueError: there is no cell, or one without values.
    """
    arrays = [np.asarray(cell, dtype=np.float64) for cell in cells]
    if not arrays or any(array.size == 0 for array in arrays):
        raise ValueError("a bootstrap needs at least one cell, and values in each")
    means = np.mean([_resampled_means(array, index) for index, array in enumerate(arrays)], axis=0)
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(means, [tail, 100 - tail])
    return Estimate(float(np.mean([array.mean() for array in arrays])), float(low), float(high))


def _resampled_means(values: np.ndarray, cell: int) -> np.ndarray:
    """float64 (NUM_RESAMPLES,); cells draw independently of each other."""
    rng = np.random.default_rng([_SEED, cell])
    drawn = values[rng.integers(values.size, size=(NUM_RESAMPLES, values.size))]
    return np.asarray(drawn.mean(axis=1))
