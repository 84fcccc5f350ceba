"""From a request's plan and what became of it to its `ReuseReport`."""

from __future__ import annotations

from collections.abc import Sequence

from cachecraft_rag.chunks import Span, parts_within
from cachecraft_rag.events import (
    ChunkDecision,
    ChunkReport,
    Reason,
    RequestDecision,
    ReuseReport,
)
from cachecraft_rag.planner.plan import ChunkPlan, ReusePlan
from cachecraft_rag.vllm_connector.messages import ChunkRef
from cachecraft_rag.vllm_connector.request_state import RequestState

TIER_HOST = "host"
TIER_PREFIX_CACHE = "prefix_cache"


def build_report(state: RequestState) -> ReuseReport:
    """The report of a request that came from our driver; all counts add up to its prompt."""
    spec = state.spec
    assert spec is not None
    local = max(state.first_local_tokens, 0)
    plan = state.executed_plan
    failed = frozenset(state.facts.failed_records) if state.facts else frozenset()
    chunks = tuple(
        _chunk_report(state, index, ref, plan, local, failed) for index, ref in enumerate(spec.chunks)
    )
    recomputed = sum(chunk.num_recomputed_tokens for chunk in chunks)
    kept = sum(
        chunk.num_reused_tokens - _overlap(ref.span, 0, local)
        for chunk, ref in zip(chunks, spec.chunks, strict=True)
    )
    reused = local + kept + sum(chunk.num_separator_tokens for chunk in chunks)
    decision, reason = _request_decision(state, plan, reused, bool(failed), chunks)
    facts = state.facts
    return ReuseReport(
        request_id=spec.request_id,
        decision=decision,
        reason=reason,
        detail=state.full_detail,
        strategy=plan.strategy if plan else "",
        num_prompt_tokens=state.num_prompt_tokens,
        num_reused_tokens=reused,
        num_recomputed_tokens=recomputed,
        num_computed_tokens=state.num_prompt_tokens - reused - recomputed,
        num_stored_tokens=state.num_stored_tokens,
        num_prefix_tokens=local,
        num_probe_tokens=facts.num_probe_tokens if facts else 0,
        load_s=facts.load_s if facts else 0.0,
        select_s=facts.select_s if facts else 0.0,
        recompute_s=facts.recompute_s if facts else 0.0,
        loaded_bytes=facts.loaded_bytes if facts else 0,
        chunks=chunks,
    )


def _request_decision(
    state: RequestState,
    plan: ReusePlan | None,
    num_reused: int,
    has_failures: bool,
    chunks: Sequence[ChunkReport],
) -> tuple[RequestDecision, Reason]:
    if plan is not None:
        decision = RequestDecision.REUSE if num_reused else RequestDecision.FULL
        if has_failures:
            return decision, Reason.LOAD_FAILED
        reasons = [chunk.reason for chunk in plan.chunks if chunk.record_id is not None]
        moved = [reason for reason in reasons if reason is not Reason.SAME_PREFIX]
        return decision, moved[0] if moved else Reason.SAME_PREFIX
    if state.full_reason is not None:
        return RequestDecision.FULL, state.full_reason
    if num_reused:
        return RequestDecision.REUSE, Reason.PREFIX_CACHE
    return RequestDecision.FULL, chunks[0].reason if chunks else Reason.NO_CHUNKS


def _chunk_report(
    state: RequestState,
    index: int,
    ref: ChunkRef,
    plan: ReusePlan | None,
    local: int,
    failed: frozenset[int],
) -> ChunkReport:
    num_tokens = len(ref.span)
    from_prefix = _overlap(ref.span, 0, local)
    chunk = plan.chunks[index] if plan else None
    planned = state.plan.chunks[index] if state.plan else None
    if from_prefix == num_tokens:
        decision, reason, tier = ChunkDecision.EXACT, Reason.PREFIX_CACHE, TIER_PREFIX_CACHE
        chunk = None
    elif chunk is not None and chunk.record_id in failed:
        decision, reason, tier, chunk = ChunkDecision.COMPUTED, Reason.LOAD_FAILED, "", None
    elif chunk is not None and chunk.record_id is not None:
        tier = state.tiers.get(chunk.record_id) or TIER_HOST
        decision, reason = chunk.decision, chunk.reason
    else:
        decision, tier = ChunkDecision.COMPUTED, ""
        reason = planned.reason if planned else (state.full_reason or Reason.NOT_CACHED)
        if reason is Reason.NOT_CACHED:
            reason = state.unstored.get(index, reason)
        chunk = None
    kept = _kept_beyond(plan, chunk, local) if plan and chunk else 0
    missing = num_tokens - from_prefix - kept
    return ChunkReport(
        chunk_key=ref.key,
        doc_id=ref.document.doc_id if ref.document else None,
        version=ref.document.version if ref.document else None,
        decision=decision,
        reason=reason,
        start=ref.span.start,
        num_tokens=num_tokens,
        num_reused_tokens=from_prefix + kept,
        num_recomputed_tokens=missing if chunk else 0,
        num_computed_tokens=0 if chunk else missing,
        num_separator_tokens=_kept_separator(plan, index, local, failed),
        tier=tier,
        cached_start=chunk.cached_start if chunk else -1,
        same_predecessors=chunk.same_predecessors if chunk else False,
        variant=chunk.variant if chunk else None,
    )


def _kept_beyond(plan: ReusePlan, chunk: ChunkPlan, local: int) -> int:
    """Tokens of a chunk whose loaded KV was kept, beyond vLLM's own hit."""
    first, last = max(chunk.span.start, local), min(chunk.span.end, plan.context_end)
    if last <= first:
        return 0
    return last - first - sum(map(len, parts_within(chunk.recompute, Span(first, last))))


def _kept_separator(plan: ReusePlan | None, index: int, local: int, failed: frozenset[int]) -> int:
    """Tokens behind a chunk whose KV came with it, beyond vLLM's own hit."""
    chunk = plan.chunks[index] if plan else None
    if plan is None or chunk is None or chunk.record_id is None or chunk.record_id in failed:
        return 0
    return _overlap(Span(chunk.span.end, chunk.loaded_span.end), local, plan.context_end)


def _overlap(span: Span, start: int, end: int) -> int:
    return max(0, min(span.end, end) - max(span.start, start))
