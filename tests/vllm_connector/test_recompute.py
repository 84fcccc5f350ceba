"""Cutting recompute passes into pieces, and uniting spans."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.chunks import Span
from cachecraft_rag.vllm_connector.recompute import merge_spans, take_runs


@st.composite
def ascending_runs(draw: st.DrawFn) -> list[Span]:
    """Disjoint, non-empty runs in order; some touch."""
    runs, position = [], 0
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30)), max_size=12)):
        runs.append(Span(position + gap, position + gap + length))
        position += gap + length
    return runs


spans = st.builds(lambda start, length: Span(start, start + length), st.integers(0, 60), st.integers(0, 12))


def positions_of(spans: list[Span] | tuple[Span, ...]) -> list[int]:
    return [position for span in spans for position in span.positions()]


def assert_within_limits(piece: list[Span], max_tokens: int, max_sequences: int) -> None:
    assert 0 < sum(map(len, piece)) <= max_tokens
    assert len(piece) <= max_sequences
    assert all(len(span) for span in piece)


@given(ascending_runs(), st.integers(1, 40), st.integers(1, 6))
def test_pieces_cover_the_runs_in_order(runs: list[Span], max_tokens: int, max_sequences: int) -> None:
    """Taken until nothing is left, all tokens come once, in position order, within both limits."""
    pieces: list[Span] = []
    left: Sequence[Span] = runs
    while left:
        piece, left = take_runs(left, max_tokens, max_sequences)
        assert_within_limits(list(piece), max_tokens, max_sequences)
        pieces += piece
    assert positions_of(pieces) == positions_of(runs)


@given(ascending_runs(), st.integers(1, 40), st.integers(1, 6))
def test_no_more_is_left_than_must_be(runs: list[Span], max_tokens: int, max_sequences: int) -> None:
    """Where anything is left, the piece is full: each piece is a forward of its own."""
    piece, left = take_runs(runs, max_tokens, max_sequences)
    assert not left or sum(map(len, piece)) == max_tokens or len(piece) == max_sequences


def test_a_long_run_is_cut_where_the_piece_is_full() -> None:
    """The rest of a run that does not fit is left for the next piece."""
    assert take_runs([Span(0, 3), Span(5, 12)], 4, 8) == ((Span(0, 3), Span(5, 6)), (Span(6, 12),))
    assert take_runs([Span(0, 3), Span(5, 12)], 0, 8) == ((), (Span(0, 3), Span(5, 12)))


@given(st.lists(spans, max_size=12))
def test_merged_spans_hold_the_same_positions(given_spans: list[Span]) -> None:
    """The union, whatever order, overlap and empty spans came in."""
    merged = merge_spans(given_spans)
    assert positions_of(merged) == sorted(set(positions_of(given_spans)))


@given(st.lists(spans, max_size=12))
def test_merged_spans_do_not_touch(given_spans: list[Span]) -> None:
    """Between two merged spans there is at least one position, and none is empty."""
    merged = merge_spans(given_spans)
    assert all(len(span) for span in merged)
    assert all(left.end < right.start for left, right in pairwise(merged))
