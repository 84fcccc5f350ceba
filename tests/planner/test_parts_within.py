"""Cutting many spans to one stretch, against looking at every span."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.chunks import Span, parts_within
from cachecraft_rag.planner.selection import positions_of

MAX_POSITION = 60


@st.composite
def ascending(draw: st.DrawFn) -> list[Span]:
    """Disjoint spans in order; some touch and some are empty."""
    cuts = sorted(draw(st.lists(st.integers(0, MAX_POSITION), max_size=16)))
    return [Span(start, end) for start, end in zip(cuts[::2], cuts[1::2], strict=False)]


limits = st.tuples(st.integers(0, MAX_POSITION), st.integers(0, MAX_POSITION)).map(
    lambda ends: Span(min(ends), max(ends))
)


@given(ascending(), limits)
def test_parts_are_what_clipping_every_span_gives(spans: list[Span], stretch: Span) -> None:
    """In order, without empty ones."""
    clipped = (span.clip(stretch.start, stretch.end) for span in spans)
    assert parts_within(spans, stretch) == tuple(part for part in clipped if len(part))


@given(ascending())
def test_positions_are_those_of_each_span(spans: list[Span]) -> None:
    """One span after the other."""
    assert positions_of(spans).tolist() == [p for span in spans for p in span.positions()]
