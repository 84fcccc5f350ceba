"""Cutting a recompute pass into pieces that the runner can take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cachecraft_rag.chunks import Span


def cut_runs(runs: Sequence[Span], max_tokens: int, max_sequences: int) -> Iterator[list[Span]]:
    """Pieces of at most `max_tokens` tokens and `max_sequences` runs, in position order.

    Earlier positions never depend on later ones, so pieces may run one after the other. Long runs
    are cut where a piece is full.
    """
    piece: list[Span] = []
    room = max_tokens
    for run in runs:
        start = run.start
        while start < run.end:
            if room == 0 or len(piece) == max_sequences:
                yield piece
                piece, room = [], max_tokens
            stop = min(run.end, start + room)
            piece.append(Span(start, stop))
            room -= stop - start
            start = stop
    if piece:
        yield piece


def merge_spans(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Union of spans as ascending, disjoint, non-empty, non-touching spans."""
    merged: list[Span] = []
    for span in sorted(span for span in spans if len(span)):
        if merged and span.start <= merged[-1].end:
            merged[-1] = Span(merged[-1].start, max(merged[-1].end, span.end))
        else:
            merged.append(span)
    return tuple(merged)
