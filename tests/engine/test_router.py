"""What the driver writes into the spec of a request."""

from __future__ import annotations

import pytest

from cachecraft_rag.chunks import Chunk, ChunkKey, PromptLayout, Segment, SegmentKind, Span
from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.engine.options import CallOptions
from cachecraft_rag.engine.router import FullCompute, make_spec
from cachecraft_rag.events import Reason
from cachecraft_rag.vllm_connector.messages import RequestSpec

LAYOUT = PromptLayout(
    (1, 2, 3),
    (
        Segment(Span(0, 1), SegmentKind.TEXT, "a"),
        Segment(Span(1, 3), SegmentKind.CHUNK, "b", Chunk("b", "doc"), ChunkKey("key"), "before"),
    ),
)
CONFIG = CacheCraftConfig(strategy="naive", preset="faithful", recompute_ratio=0.5, granularity=4)


def spec_for(engine_off: FullCompute | None = None, **options: object) -> RequestSpec:
    return make_spec("id", "tenant", LAYOUT, CallOptions(**options), CONFIG, engine_off)  # type: ignore[arg-type]


def test_auto_plans_with_the_configuration() -> None:
    """ "auto" takes strategy, preset, ratio and granularity from the configuration."""
    spec = spec_for()
    assert (spec.strategy, spec.alpha, spec.recompute_ratio, spec.granularity) == ("naive", 0.6, 0.5, 4)
    assert not spec.exact_only
    assert spec.full_reason is None


def test_named_strategy_and_ratio_are_obeyed() -> None:
    """What the caller names wins over the configuration, a ratio of zero too."""
    spec = spec_for(reuse="cachecraft", recompute_ratio=0.0)
    assert (spec.strategy, spec.recompute_ratio) == ("cachecraft", 0.0)


def test_exact_forbids_everything_else() -> None:
    """ "exact" is a restriction, not a strategy."""
    spec = spec_for(reuse="exact")
    assert spec.exact_only
    assert spec.strategy == "naive"


@pytest.mark.parametrize(
    ("options", "engine_off", "reason", "detail"),
    [
        ({"reuse": "off"}, None, Reason.REUSE_OFF, ""),
        ({"precision_critical": True}, None, Reason.REUSE_OFF, "precision_critical"),
        ({}, FullCompute(Reason.SELF_TEST_FAILED, "gap"), Reason.SELF_TEST_FAILED, "gap"),
        ({"reuse": "off"}, FullCompute(Reason.UNSUPPORTED_MODEL, "MLA"), Reason.UNSUPPORTED_MODEL, "MLA"),
    ],
)
def test_full_compute_has_a_reason(options, engine_off, reason, detail) -> None:
    """Each cause of full compute is named; that of the engine comes before the caller's."""
    spec = spec_for(engine_off, **options)
    assert (spec.full_reason, spec.full_detail) == (reason, detail)


def test_chunks_carry_place_key_and_document() -> None:
    """The chunk is described by its span, key, prefix and document."""
    (chunk,) = spec_for().chunks
    assert (chunk.span, chunk.key, chunk.prefix_hash) == (Span(1, 3), "key", "before")
    assert chunk.document is not None
    assert chunk.document.doc_id == "doc"


def test_spec_survives_the_way_to_the_scheduler() -> None:
    """The spec comes back from plain parameters as it was."""
    spec = spec_for(FullCompute(Reason.ENGINE_FAULT, "boom"), store=False)
    assert RequestSpec.from_params(spec.to_params()) == spec


def layout_of(*pieces: tuple[int, bool]) -> PromptLayout:
    """Segments of so many tokens, each a chunk or not."""
    segments, start = [], 0
    for index, (length, is_chunk) in enumerate(pieces):
        span = Span(start, start + length)
        chunk = Chunk("text", f"doc-{index}") if is_chunk else None
        kind = SegmentKind.CHUNK if is_chunk else SegmentKind.TEXT
        segments.append(Segment(span, kind, "text", chunk, ChunkKey(f"k{index}") if is_chunk else None))
        start = span.end
    return PromptLayout(tuple(range(start)), tuple(segments))


def separators(layout: PromptLayout) -> list[tuple[int, ...]]:
    spec = make_spec("id", "tenant", layout, CallOptions(), CONFIG, None)
    return [chunk.separator for chunk in spec.chunks]


def test_short_text_between_two_chunks_travels_with_the_first() -> None:
    """Blank lines between chunks do; long text, and what follows the last chunk, do not."""
    assert separators(layout_of((1, False), (3, True), (2, False), (3, True), (2, False))) == [(4, 5), ()]
    assert separators(layout_of((3, True), (5, False), (3, True))) == [(), ()]
    assert separators(layout_of((3, True), (3, True), (1, False), (2, True))) == [(), (6,), ()]
