"""Cutting a recompute pass into pieces that the runner, and the step, can take."""

from __future__ import annotations

from collections.abc import Sequence

from cachecraft_rag.chunks import Span


def take_runs(
    runs: Sequence[Span], max_tokens: int, max_sequences: int
) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """The first `max_tokens` tokens in at most `max_sequences` runs, and what is left.

    Earlier positions never depend on later ones, so pieces taken one after the other, in position
    order, may run in different steps. A run that does not fit is cut.
    """
    taken: list[Span] = []
    room = max_tokens
    for index, run in enumerate(runs):
        if room <= 0 or len(taken) == max_sequences:
            return tuple(taken), tuple(runs[index:])
        stop = min(run.end, run.start + room)
        taken.append(Span(run.start, stop))
        room -= stop - run.start
        if stop < run.end:
            return tuple(taken), (Span(stop, run.end), *runs[index + 1 :])
    return tuple(taken), ()


def merge_spans(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Union of spans as ascending, disjoint, non-empty, non-touching spans."""
    merged: list[Span] = []
    for span in sorted(span for span in spans if len(span)):
        if merged and span.start <= merged[-1].end:
            merged[-1] = Span(merged[-1].start, max(merged[-1].end, span.end))
        else:
            merged.append(span)
    return tuple(merged)
