"""From a request's plan and its blocks to what the workers are told: load jobs and captures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cachecraft_rag.chunks import Span
from cachecraft_rag.errors import InternalError
from cachecraft_rag.planner.plan import Load, ReusePlan
from cachecraft_rag.vllm_connector.messages import RequestSpec
from cachecraft_rag.vllm_connector.recompute import merge_spans
from cachecraft_rag.vllm_connector.request_state import MAX_PROBE_TOKENS, RequestState
from cachecraft_rag.vllm_connector.steps import LEAD_PREFIX, CaptureTarget, LoadJob, slots_of

MIN_WORK_PART = 4
"""Of a step's tokens, at least a fourth for load jobs, on top of a forward that takes them all: requests
with reuse must not wait until nobody else has a prompt to compute."""


def make_job(state: RequestState, block_ids: Sequence[int], block_size: int) -> LoadJob:
    """The job that fills what this request was promised.

    Raises:
        InternalError: there is no plan behind the promise, or no blocks for it.
    """
    plan, spec, local = state.plan, state.spec, state.num_local_tokens
    if plan is None or spec is None:
        raise InternalError(f"request {state.request.request_id} was promised KV without a plan")
    missing = [run.clip(local, run.end) for run in plan.recompute if run.end > local]
    live = plan.live.clip(local) if plan.live else None
    num_allocated = min(state.num_prompt_tokens, len(block_ids) * block_size)
    if num_allocated < state.promised_end:
        raise InternalError(
            f"request {state.request.request_id} was promised {state.promised_end} tokens, but its blocks "
            f"hold {num_allocated}"
        )
    probe_end = min(num_allocated, plan.context_end + MAX_PROBE_TOKENS)
    probe = Span(plan.context_end, probe_end if state.asks_question else plan.context_end)
    computed = Span(local, state.promised_end)
    return LoadJob(
        request_id=spec.request_id,
        engine_request_id=state.request.request_id,
        start=local,
        token_ids=np.array(state.request.prompt_token_ids[: probe.end], dtype=np.int32),
        block_ids=np.array(block_ids[: -(-probe.end // block_size)], dtype=np.int32),
        loads=_loads_beyond(plan, local),
        recompute=merge_spans(missing),
        probe=probe,
        end=state.promised_end,
        captures=tuple(capture_targets(state, computed, block_ids, block_size)),
        live=live,
        lead=lead_name(spec),
    )


def lead_name(spec: RequestSpec) -> str:
    """Sink that holds the keys of the text before the request's first chunk."""
    # With the tenant: the prefix hash of a shared chunk is the same for all, the text before it is not
    # for all to share.
    return f"{LEAD_PREFIX}{spec.tenant}:{spec.chunks[0].prefix_hash}" if spec.chunks else ""


def capture_targets(
    state: RequestState, computed: Span, block_ids: Sequence[int], block_size: int
) -> list[CaptureTarget]:
    """Where the rows of the tokens computed go."""
    blocks = np.array(block_ids, dtype=np.int32)
    targets = []
    for capture in state.pending:
        part = capture.span.clip(computed.start, computed.end)
        if len(part):
            slots = slots_of(blocks, block_size, part)
            offset = part.start - capture.span.start
            targets.append(CaptureTarget(capture.sink, offset, slots, len(capture.span)))
    return targets


def work_tokens(max_step_tokens: int, num_scheduled_tokens: int) -> int:
    """Tokens that load jobs may compute in a step whose forward computes `num_scheduled_tokens`."""
    return max(max_step_tokens - num_scheduled_tokens, max_step_tokens // MIN_WORK_PART, 1)


def _loads_beyond(plan: ReusePlan, local: int) -> tuple[Load, ...]:
    """The plan's loads without what vLLM's own prefix hit covers."""
    clipped = []
    for load in plan.loads:
        part = load.span.clip(local, load.span.end)
        if len(part):
            offset = load.record_offset + part.start - load.span.start
            clipped.append(Load(load.record_id, part, offset))
    return tuple(clipped)
