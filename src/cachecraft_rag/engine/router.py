"""Reuse or full compute? What the driver alone can decide, written into the request's spec.

`docs/router.md` has the whole decision in one table, with what the scheduler side decides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cachecraft_rag.chunks import DocumentRef, PromptLayout, Segment, SegmentKind
from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.engine.altered import altered_share
from cachecraft_rag.engine.calls import Call
from cachecraft_rag.engine.complexity import features, predict, question_of
from cachecraft_rag.engine.options import CallOptions
from cachecraft_rag.events import Reason
from cachecraft_rag.planner.limits import PlanLimits
from cachecraft_rag.vllm_connector.messages import ChunkRef, RequestSpec

MAX_SEPARATOR_TOKENS = 4
"""Text between two chunks up to this length travels with the first: blank lines, a rule."""


@dataclass(frozen=True, slots=True)
class FullCompute:
    """Why a request is computed in full."""

    reason: Reason
    detail: str = ""


def route_engine(config: CacheCraftConfig) -> FullCompute | None:
    """Why no request of an engine reuses anything, None if its configuration allows reuse."""
    if config.precision_critical:
        return FullCompute(Reason.PRECISION_CRITICAL, "It is set for the whole engine.")
    return None


def route(
    call: Call, layout: PromptLayout, num_output_tokens: int, config: CacheCraftConfig
) -> FullCompute | None:
    """Why this request is to be computed in full, None if its plan may decide.

    The caller's word comes first: `precision_critical` over any mode, then `reuse="off"`. The rules
    behind them are for `reuse="auto"`: a strategy named by the caller is obeyed, and "exact" changes
    no answer.

    Args:
        num_output_tokens: most tokens that can be generated: `max_tokens`, clipped to the window. An
            unclipped one was rejected: "no limit" is asked for by a huge number.
    """
    if (reason := asked_for_full(call.options)) is not None:
        return FullCompute(reason)
    if call.options.reuse != "auto":
        return None
    full = _altered_chunks(call, layout, config)
    if full is not None or not layout.chunks:
        return full
    return _long_output(num_output_tokens, config) or _complex_question(call, layout, config)


def asked_for_full(options: CallOptions) -> Reason | None:
    """Why the caller wants full compute, None if the caller does not."""
    if options.precision_critical:
        return Reason.PRECISION_CRITICAL
    return Reason.REUSE_OFF if options.reuse == "off" else None


def make_spec(
    request_id: str,
    tenant: str,
    layout: PromptLayout,
    options: CallOptions,
    config: CacheCraftConfig,
    full: FullCompute | None,
) -> RequestSpec:
    """The spec of one request.

    Args:
        tenant: salt of keys and index, already with the default filled in.
        full: why it is computed in full, None if its plan decides.
    """
    ratio = options.recompute_ratio
    return RequestSpec(
        request_id=request_id,
        tenant=tenant,
        chunks=_chunk_refs(layout),
        # "exact" plans as "auto" does and then takes only what lies behind the same prefix.
        strategy=config.strategy if options.reuse in ("auto", "exact") else options.reuse,
        alpha=config.alpha,
        share=config.share,
        recompute_ratio=config.recompute_ratio if ratio is None else ratio,
        granularity=options.granularity or config.granularity,
        exact_only=options.reuse == "exact",
        store=options.store,
        full_reason=full.reason if full else None,
        full_detail=full.detail if full else "",
        limits=_limits(options, config),
    )


def without_reuse(spec: RequestSpec, full: FullCompute, request_id: str) -> RequestSpec:
    """The same request again, under a new id, computed in full."""
    return replace(spec, request_id=request_id, full_reason=full.reason, full_detail=full.detail)


def _altered_chunks(call: Call, layout: PromptLayout, config: CacheCraftConfig) -> FullCompute | None:
    share, limit = altered_share(call.chunks, layout), config.max_altered_share
    if share <= limit:
        return None
    return FullCompute(Reason.ALTERED_CHUNKS, f"Altered: {share:.0%}; max_altered_share={limit}.")


def _long_output(num_output_tokens: int, config: CacheCraftConfig) -> FullCompute | None:
    limit = config.max_output_tokens_for_reuse
    if num_output_tokens <= limit:
        return None
    return FullCompute(
        Reason.LONG_OUTPUT, f"Tokens: {num_output_tokens}; max_output_tokens_for_reuse={limit}."
    )


def _complex_question(call: Call, layout: PromptLayout, config: CacheCraftConfig) -> FullCompute | None:
    limit = config.max_complexity
    if limit >= 1.0:  # switched off: no estimate is above it
        return None
    question = question_of(call.prompt, (segment.text for segment in layout.chunks))
    complexity = predict(features(question, len(layout.chunks), layout.num_tokens))
    if complexity <= limit:
        return None
    return FullCompute(Reason.COMPLEX_QUESTION, f"Estimate: {complexity:.2f}; max_complexity={limit}.")


def _limits(options: CallOptions, config: CacheCraftConfig) -> PlanLimits | None:
    if options.reuse != "auto":
        return None
    return PlanLimits(config.max_missing_share, config.max_overhead_share)


def _chunk_refs(layout: PromptLayout) -> tuple[ChunkRef, ...]:
    segments = layout.segments
    following = (*segments[1:], None, None)
    return tuple(
        _chunk_ref(segment, _separator(layout, *following[index : index + 2]))
        for index, segment in enumerate(segments)
        if segment.kind is SegmentKind.CHUNK
    )


def _separator(layout: PromptLayout, text: Segment | None, after: Segment | None) -> tuple[int, ...]:
    """Ids of the short text between two chunks; empty where there is none."""
    if text is None or after is None or after.kind is not SegmentKind.CHUNK:
        return ()
    if text.kind is SegmentKind.CHUNK or len(text.span) > MAX_SEPARATOR_TOKENS:
        return ()
    return layout.token_ids[text.span.start : text.span.end]


def _chunk_ref(segment: Segment, separator: tuple[int, ...]) -> ChunkRef:
    assert segment.chunk is not None and segment.key is not None  # what a CHUNK segment holds
    chunk = segment.chunk
    document = None if chunk.doc_id is None else DocumentRef(chunk.doc_id, chunk.version)
    return ChunkRef(
        segment.span, segment.key, segment.prefix_hash, document, separator, is_shared=chunk.is_shared
    )
