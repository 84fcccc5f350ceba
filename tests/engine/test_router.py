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
