"""From a request's plan and its blocks to what the workers are told: load jobs and captures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cachecraft_rag.chunks import Span
from cachecraft_rag.errors import InternalError
from cachecraft_rag.planner.live import LiveMethod
from cachecraft_rag.planner.plan import Load, ReusePlan
from cachecraft_rag.vllm_connector.messages import RequestSpec
from cachecraft_rag.vllm_connector.recompute import merge_spans
from cachecraft_rag.vllm_connector.request_state import RequestState
from cachecraft_rag.vllm_connector.steps import LEAD_PREFIX, CaptureTarget, LoadJob, slots_of

MAX_PROBE_TOKENS = 128
"""Most tokens behind the context that are asked what they attend to: a question, not a history."""


def make_job(
    state: RequestState, block_ids: Sequence[int], block_size: int, unready: Sequence[Span]
) -> LoadJob:
    """The job that fills what this request was promised.

    Args:
        unready: stretches of vLLM's own hit that have to be computed as well; see `unready_spans`.

    Raises:
        InternalError: there is no plan behind the promise.
    """
    plan, spec, local = state.plan, state.spec, state.num_local_tokens
    if plan is None or spec is None:
        raise InternalError(f"request {state.request.request_id} was promised KV without a plan")
    missing = [run.clip(local, run.end) for run in plan.recompute if run.end > local]
    live = plan.live.clip(local) if plan.live else None
    num_allocated = min(state.num_prompt_tokens, len(block_ids) * block_size)
    probe = Span(plan.context_end, plan.context_end)
    if live is not None and live.method is not LiveMethod.DEVIATION:
        probe = Span(probe.start, min(num_allocated, probe.start + MAX_PROBE_TOKENS))
    return LoadJob(
        request_id=spec.request_id,
        start=local,
        token_ids=np.array(state.request.prompt_token_ids[: probe.end], dtype=np.int32),
        block_ids=np.array(block_ids[: -(-probe.end // block_size)], dtype=np.int32),
        loads=_loads_beyond(plan, local),
        recompute=merge_spans([*unready, *missing]),
        live=live,
        probe=probe,
        lead=lead_name(spec),
    )


def lead_name(spec: RequestSpec) -> str:
    """Sink that holds the keys of the text before the request's first chunk."""
    # With the tenant: the prefix hash of a shared chunk is the same for all, the text before it is not
    # for all to share.
    return f"{LEAD_PREFIX}{spec.tenant}:{spec.chunks[0].prefix_hash}" if spec.chunks else ""


def unready_spans(
    block_ids: Sequence[int], num_local_tokens: int, written: set[int], block_size: int
) -> list[Span]:
    """Stretches of vLLM's own hit that another request computes in this very step.

    vLLM files blocks as cached when they are scheduled, which is right for one forward over all
    requests, but our pass runs before it. Those tokens are exact, so computing them here as well,
    into the shared blocks, writes what the forward will write again.

    Args:
        written: blocks that this step's forward writes for other requests.
    """
    hit = block_ids[: -(-num_local_tokens // block_size)]
    return [
        Span(index * block_size, min((index + 1) * block_size, num_local_tokens))
        for index, block_id in enumerate(hit)
        if block_id in written
    ]


def capture_targets(
    state: RequestState, computed: Span, block_ids: Sequence[int], block_size: int
) -> list[CaptureTarget]:
    """Where the rows of the tokens computed in this step go; captures that end here are done."""
    blocks = np.array(block_ids, dtype=np.int32)
    targets = []
    for capture in state.pending:
        part = capture.span.clip(computed.start, computed.end)
        if len(part):
            slots = slots_of(blocks, block_size, part)
            offset = part.start - capture.span.start
            targets.append(CaptureTarget(capture.sink, offset, slots, len(capture.span)))
    state.pending = [capture for capture in state.pending if capture.span.end > computed.end]
    return targets


def _loads_beyond(plan: ReusePlan, local: int) -> tuple[Load, ...]:
    """The plan's loads without what vLLM's own prefix hit covers."""
    clipped = []
    for load in plan.loads:
        part = load.span.clip(local, load.span.end)
        if len(part):
            offset = load.record_offset + part.start - load.span.start
            clipped.append(Load(load.record_id, part, offset))
    return tuple(clipped)
