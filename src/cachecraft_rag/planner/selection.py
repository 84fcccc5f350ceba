"""Which tokens of a chunk are recomputed, given a score for each (Cache-Craft eq. 14)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

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
    return select_spans((Span(offset, offset + len(scores)),), scores, num_tokens_to_select, granularity)


def select_spans(
    candidates: Sequence[Span], scores: np.ndarray, num_tokens_to_select: int, granularity: int
) -> tuple[Span, ...]:
    """`select_tokens` under one budget over several ascending, disjoint stretches.

    Args:
        scores: float, one per candidate token, in order.

    Raises:
        PlanError: as `select_tokens`, or there is not one score per candidate token.
    """
    _check(scores, num_tokens_to_select, granularity)
    if sum(map(len, candidates)) != len(scores):
        raise PlanError(f"{len(scores)} scores for {sum(map(len, candidates))} candidate tokens")
    if num_tokens_to_select == 0:
        return ()
    chosen = positions_of(candidates)[_choose_runs(candidates, scores, num_tokens_to_select, granularity)]
    breaks = np.flatnonzero(np.diff(chosen) != 1)
    starts = chosen[np.concatenate(([0], breaks + 1))].tolist()
    lasts = chosen[np.concatenate((breaks, [len(chosen) - 1]))].tolist()
    return tuple(Span(first, last + 1) for first, last in zip(starts, lasts, strict=True))


def positions_of(spans: Sequence[Span]) -> np.ndarray:
    """int64, all positions of `spans`, one span after the other."""
    bounds = np.array([(span.start, span.end) for span in spans], np.int64).reshape(-1, 2)
    lengths = bounds[:, 1] - bounds[:, 0]
    ends = np.cumsum(lengths)
    # An array for each span was simpler, but spans may be a thousand single tokens.
    positions: np.ndarray = np.repeat(bounds[:, 1] - ends, lengths) + np.arange(lengths.sum())
    return positions


def _choose_runs(candidates: Sequence[Span], scores: np.ndarray, budget: int, granularity: int) -> np.ndarray:
    """Bool (len(scores),), true for the tokens of the runs that are taken."""
    bounds = np.cumsum([0, *map(len, candidates)])
    starts = np.concatenate([np.arange(a, b, granularity) for a, b in pairwise(bounds.tolist())])
    lengths = np.diff(starts, append=len(scores))
    means = np.add.reduceat(scores, starts, dtype=np.float64) / lengths
    # A partition would be faster, but it breaks ties by chance and sorts NaN to the top.
    order = np.argsort(-means, kind="stable")
    num_runs = int(np.searchsorted(np.cumsum(lengths[order]), budget)) + 1
    is_taken = np.zeros(len(starts), dtype=np.bool_)
    is_taken[order[:num_runs]] = True
    return np.repeat(is_taken, lengths)


def _check(scores: np.ndarray | None, budget: int, granularity: int) -> None:
    if granularity < 1:
        raise PlanError(f"granularity is {granularity}: runs need at least one token")
    if budget < 0:
        raise PlanError(f"num_tokens_to_select is {budget}: it must not be negative")
    if scores is not None and budget > len(scores):
        raise PlanError(f"num_tokens_to_select is {budget}, more than the {len(scores)} scored tokens")
