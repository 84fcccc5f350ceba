"""What crosses between processes comes back as it was, though tuples become lists on the way."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.chunks import ChunkKey, DocumentRef, Span
from cachecraft_rag.events import Reason
from cachecraft_rag.planner.limits import PlanLimits
from cachecraft_rag.vllm_connector.messages import ChunkRef, ControlMessage, RequestSpec

documents = st.none() | st.builds(DocumentRef, st.text(max_size=8), st.none() | st.text(max_size=8))
spans = st.builds(
    lambda start, length: Span(start, start + length), st.integers(0, 9999), st.integers(0, 999)
)
separators = st.lists(st.integers(0, 99), max_size=3).map(tuple)
refusals = st.none() | st.sampled_from(Reason)
chunk_refs = st.builds(
    ChunkRef,
    spans,
    st.text(max_size=8).map(ChunkKey),
    st.text(max_size=8),
    documents,
    separators,
    refusals,
    st.booleans(),
)
specs = st.builds(
    RequestSpec,
    request_id=st.text(max_size=8),
    tenant=st.text(max_size=8),
    chunks=st.lists(chunk_refs, max_size=4).map(tuple),
    strategy=st.sampled_from(["", "focus", "naive"]),
    alpha=st.floats(0, 4),
    share=st.floats(0, 1),
    recompute_ratio=st.none() | st.floats(0, 1),
    granularity=st.integers(1, 16),
    exact_only=st.booleans(),
    store=st.booleans(),
    store_from=st.integers(0, 4),
    full_reason=st.none() | st.sampled_from(Reason),
    full_detail=st.text(max_size=8),
    limits=st.none() | st.builds(PlanLimits, st.floats(0, 1), st.floats(0, 1)),
)


def sent(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters on the other side; JSON refuses anything that is not plain data."""
    received: dict[str, Any] = json.loads(json.dumps(params))
    return received


@given(specs)
def test_request_spec_survives_the_way(spec: RequestSpec) -> None:
    """Every field arrives equal and of its own type."""
    received = RequestSpec.from_params(sent(spec.to_params()))
    assert received == spec
    assert received is not None and isinstance(received.full_reason, type(spec.full_reason))


@given(specs)
def test_request_spec_and_control_message_share_the_parameters(spec: RequestSpec) -> None:
    """A request is never taken for a command, nor a command for a request."""
    command = ControlMessage("c1", "stats", {})
    assert ControlMessage.from_params(sent(spec.to_params())) is None
    assert RequestSpec.from_params(sent(command.to_params())) is None


def test_control_message_survives_the_way() -> None:
    """A command arrives with its arguments."""
    arguments = {"doc_id": "d", "version": None, "tenant": "t", "keys": ["a", "b"]}
    command = ControlMessage("c1", "replace", arguments)
    assert ControlMessage.from_params(sent(command.to_params())) == command


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}])
def test_parameters_of_others_are_not_ours(params: dict[str, Any] | None) -> None:
    """A request that did not come from our driver has neither a spec nor a command."""
    assert RequestSpec.from_params(params) is None
    assert ControlMessage.from_params(params) is None
