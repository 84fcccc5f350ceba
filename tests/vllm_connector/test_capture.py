"""Rows of a forward find their place in the sinks by their slots, however the batch is laid out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from cachecraft_rag.chunks import Span
from cachecraft_rag.vllm_connector.capture import CaptureSession, Sink
from cachecraft_rag.vllm_connector.compat import KVLayer
from cachecraft_rag.vllm_connector.rotary import RotaryTable
from cachecraft_rag.vllm_connector.steps import CaptureTarget, slots_of

NUM_LAYERS = 3
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_SIZE = 8
BLOCK_SIZE = 4
NUM_TOKENS = 40
PROFILED = {1: 0, 2: 1}
# The request's blocks lie scattered in the paged cache.
BLOCK_IDS = np.array([7, 3, 11, 0, 5, 12, 1, 9, 4, 2], dtype=np.int32)
PADDING = -1

_random = torch.Generator().manual_seed(11)
KEYS, VALUES = torch.randn(2, NUM_LAYERS, NUM_TOKENS, NUM_KV_HEADS, HEAD_SIZE, generator=_random)
QUERIES = torch.randn(NUM_LAYERS, NUM_TOKENS, NUM_HEADS * HEAD_SIZE, generator=_random)


def make_layer(index: int) -> KVLayer:
    return KVLayer(
        name=f"layer-{index}",
        attention=None,
        rotary=RotaryTable(torch.ones(1, HEAD_SIZE), True),
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_size=HEAD_SIZE,
        scale=1.0,
        sliding_window=None,
        logits_soft_cap=0.0,
    )


@pytest.fixture
def session() -> CaptureSession:
    return CaptureSession([make_layer(index) for index in range(NUM_LAYERS)], PROFILED)


def make_sink(num_tokens: int, *, is_lead: bool = False) -> Sink:
    layers = PROFILED if is_lead else {index: index for index in range(NUM_LAYERS)}
    kv = torch.full((len(layers), 2, num_tokens, NUM_KV_HEADS, HEAD_SIZE), torch.nan)
    queries = None if is_lead else torch.full((len(PROFILED), num_tokens, NUM_HEADS, HEAD_SIZE), torch.nan)
    return Sink(kv, layers, np.zeros(num_tokens, dtype=bool), queries=queries)


def target_of(span: Span, offset: int = 0, num_sink_tokens: int | None = None) -> CaptureTarget:
    slots = slots_of(BLOCK_IDS, BLOCK_SIZE, span)
    return CaptureTarget(1, offset, slots, num_sink_tokens or len(span))


def run_forward(session: CaptureSession, rows: Sequence[int | None]) -> None:
    """One forward over these positions, in this order; None is a row of padding."""
    real = torch.tensor([PADDING if row is None else row for row in rows])
    slots = slots_of(BLOCK_IDS, BLOCK_SIZE, Span(0, NUM_TOKENS))
    mapping = torch.tensor([PADDING if row is None else int(slots[row]) for row in rows])
    for layer in range(NUM_LAYERS):
        # Padding holds whatever the last position's values are: it must not be copied anywhere.
        session.on_update(layer, KEYS[layer, real], VALUES[layer, real], mapping)
        if layer in PROFILED:
            session.on_query(layer, QUERIES[layer, real])


def assert_holds(sink: Sink, span: Span) -> None:
    """All rows are the KV and the queries of `span`, layer by layer."""
    assert sink.is_complete
    part = slice(span.start, span.end)
    for layer, index in sink.layers.items():
        assert torch.equal(sink.kv[index, 0], KEYS[layer, part])
        assert torch.equal(sink.kv[index, 1], VALUES[layer, part])
    if sink.queries is not None:
        for layer, place in PROFILED.items():
            expected = QUERIES[layer, part].view(-1, NUM_HEADS, HEAD_SIZE)
            assert torch.equal(sink.queries[place], expected)


IN_ORDER = list(range(NUM_TOKENS))
SHUFFLED = torch.randperm(NUM_TOKENS, generator=torch.Generator().manual_seed(2)).tolist()


@pytest.mark.parametrize(
    "rows",
    [
        IN_ORDER,
        [*IN_ORDER, *[None] * 24],
        [None, *SHUFFLED, None],
        IN_ORDER[::-1],
        IN_ORDER[20:] + IN_ORDER[:20],
    ],
    ids=["in order", "padded", "shuffled and padded", "reversed", "two halves"],
)
def test_rows_are_found_by_their_slots(session: CaptureSession, rows: list[int | None]) -> None:
    """Two chunks of one batch get their own rows, wherever they stand in it."""
    first, second = Span(5, 17), Span(17, 33)
    sinks = [make_sink(len(first)), make_sink(len(second))]
    session.arm([(sinks[0], target_of(first)), (sinks[1], target_of(second))])
    run_forward(session, rows)
    assert_holds(sinks[0], first)
    assert_holds(sinks[1], second)


def test_a_chunk_is_assembled_from_several_forwards(session: CaptureSession) -> None:
    """Pieces of a long prompt, each armed anew, fill one sink."""
    span = Span(6, 30)
    sink = make_sink(len(span))
    for part in (Span(6, 13), Span(13, 14), Span(14, 30)):
        assert not sink.is_complete
        session.arm([(sink, target_of(part, part.start - span.start, len(span)))])
        run_forward(session, list(part.positions()))
        session.disarm()
    assert_holds(sink, span)


def test_a_step_of_two_forwards_fills_one_target(session: CaptureSession) -> None:
    """Recompute pass and model's own forward see the same target, each with its rows."""
    span = Span(8, 20)
    sink = make_sink(len(span))
    session.arm([(sink, target_of(span))])
    run_forward(session, [9, 12, 13, 19])
    assert sink.filled.nonzero()[0].tolist() == [1, 4, 5, 11]
    run_forward(session, [8, 10, 11, 14, 15, 16, 17, 18, None])
    assert_holds(sink, span)


def test_a_lead_buffer_takes_profiled_layers_only(session: CaptureSession) -> None:
    """The text before the first chunk is kept on the layers that are profiled."""
    span = Span(0, 7)
    sink = make_sink(len(span), is_lead=True)
    session.arm([(sink, target_of(span))])
    run_forward(session, SHUFFLED)
    assert_holds(sink, span)


def test_rows_of_others_fill_nothing(session: CaptureSession) -> None:
    """A forward without the chunk's slots leaves its sink as it was."""
    sink = make_sink(4)
    session.arm([(sink, target_of(Span(0, 4)))])
    run_forward(session, [None, 10, 11, None])
    assert not sink.filled.any()
    assert sink.kv.isnan().all()


def test_a_disarmed_session_copies_nothing(session: CaptureSession) -> None:
    """After the step ends, later forwards are not captured."""
    sink = make_sink(4)
    session.arm([(sink, target_of(Span(0, 4)))])
    session.disarm()
    run_forward(session, IN_ORDER)
    assert not sink.filled.any()


def test_a_sink_is_complete_only_after_the_last_layer(session: CaptureSession) -> None:
    """Rows count when their last layer is written: a forward cut short leaves no half record."""
    sink = make_sink(4)
    session.arm([(sink, target_of(Span(0, 4)))])
    mapping = torch.from_numpy(slots_of(BLOCK_IDS, BLOCK_SIZE, Span(0, 4)))
    for layer in range(NUM_LAYERS - 1):
        session.on_update(layer, KEYS[layer, :4], VALUES[layer, :4], mapping)
    assert not sink.filled.any()


def test_a_fault_while_copying_is_not_the_requests(
    session: CaptureSession, caplog: pytest.LogCaptureFixture
) -> None:
    """A sink of the wrong shape costs its record, not the forward, and is logged."""
    sink = make_sink(2)
    session.arm([(sink, target_of(Span(0, 4)))])
    run_forward(session, IN_ORDER)
    assert not sink.is_complete
    assert "capture failed" in caplog.text
