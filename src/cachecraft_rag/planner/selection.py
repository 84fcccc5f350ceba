"""Which tokens of a chunk are recomputed, given a score for each (Cache-Craft eq. 14)."""

from __future__ import annotations

import numpy as np

from cachecraft_rag.chunks import Span
from cachecraft_rag.errors import PlanError


def select_tokens(
    scores: np.ndarray | None, num_tokens_to_select: int, granularity: int, offset: int = 0
) -> tuple[Span, ...]:
    """Spans of the best-scored tokens: sorted, merged and relative to the chunk, plus `offset`.

    Tokens are taken in runs of `granularity`, aligned inside the chunk (the last may be shorter), by
    the run's mean score, ties by position, until the budget is met: at most one run over it. The
    same arguments give the same spans.

    Args:
        scores: float (num_tokens,), higher is taken first and NaN last; None takes the first tokens.
        num_tokens_to_select: the budget; with scores, at most their number.
        granularity: length of a run, at least 1; runs share their attention reads.
        offset: position of the chunk's first token.

    Raises:
        PlanError: the budget or the granularity is out of its range.
    """
    _check(scores, num_tokens_to_select, granularity)
    if num_tokens_to_select == 0:
        return ()
    if scores is None:
        return (Span(offset, offset + num_tokens_to_select),)
    chosen = _choose_runs(scores, num_tokens_to_select, granularity)
    edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False)) * granularity
    bounds = (np.minimum(edges, len(scores)) + offset).tolist()
    return tuple(map(Span, bounds[::2], bounds[1::2]))


def _choose_runs(scores: np.ndarray, budget: int, granularity: int) -> np.ndarray:
    """Bool (num_runs,), true for the runs that are taken."""
    starts = np.arange(0, len(scores), granularity)
    lengths = np.diff(starts, append=len(scores))
    means = np.add.reduceat(scores, starts, dtype=np.float64) / lengths
    # A partition would be faster, but it breaks ties by chance and sorts NaN to the top.
    order = np.argsort(-means, kind="stable")
    num_runs = int(np.searchsorted(np.cumsum(lengths[order]), budget)) + 1
    chosen = np.zeros(len(starts), dtype=np.bool_)
    chosen[order[:num_runs]] = True
    return chosen


def _check(scores: np.ndarray | None, budget: int, granularity: int) -> None:
    if granularity < 1:
        raise PlanError(f"granularity is {granularity}: runs need at least one token")
    if budget < 0:
        raise PlanError(f"num_tokens_to_select is {budget}: it must not be negative")
    if scores is not None and budget > len(scores):
        raise PlanError(f"num_tokens_to_select is {budget}, more than the {len(scores)} scored tokens")
