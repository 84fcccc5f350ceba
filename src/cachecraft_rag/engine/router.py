"""Reuse or full compute? What the driver alone can decide, written into the request's spec."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cachecraft_rag.chunks import DocumentRef, PromptLayout, Segment, SegmentKind
from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.engine.options import CallOptions
from cachecraft_rag.events import Reason
from cachecraft_rag.vllm_connector.messages import ChunkRef, RequestSpec

MAX_SEPARATOR_TOKENS = 4
"""Text between two chunks up to this length travels with the first: blank lines, a rule."""


@dataclass(frozen=True, slots=True)
class FullCompute:
    """Why a request is computed in full."""

    reason: Reason
    detail: str = ""


def make_spec(
    request_id: str,
    tenant: str,
    layout: PromptLayout,
    options: CallOptions,
    config: CacheCraftConfig,
    engine_off: FullCompute | None,
) -> RequestSpec:
    """The spec of one request.

    Args:
        tenant: salt of keys and index, already with the default filled in.
        engine_off: why this engine reuses nothing at all, None if it does.
    """
    full = engine_off or _asked_for_full(options)
    ratio = options.recompute_ratio
    return RequestSpec(
        request_id=request_id,
        tenant=tenant,
        chunks=_chunk_refs(layout),
        # "exact" plans as "auto" does and then takes only what lies behind the same prefix.
        strategy=config.strategy if options.reuse in ("auto", "exact") else options.reuse,
        alpha=config.alpha,
        recompute_ratio=config.recompute_ratio if ratio is None else ratio,
        granularity=options.granularity or config.granularity,
        exact_only=options.reuse == "exact",
        store=options.store,
        full_reason=full.reason if full else None,
        full_detail=full.detail if full else "",
    )


def without_reuse(spec: RequestSpec, full: FullCompute, request_id: str) -> RequestSpec:
    """The same request again, under a new id, computed in full."""
    return replace(spec, request_id=request_id, full_reason=full.reason, full_detail=full.detail)


def _asked_for_full(options: CallOptions) -> FullCompute | None:
    if options.precision_critical:
        return FullCompute(Reason.REUSE_OFF, "precision_critical")
    return FullCompute(Reason.REUSE_OFF) if options.reuse == "off" else None


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
    return ChunkRef(segment.span, segment.key, segment.prefix_hash, document, separator)
