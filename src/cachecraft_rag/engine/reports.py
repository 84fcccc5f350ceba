"""The report of one request, completed with what only the driver knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from cachecraft_rag.chunks import Chunk, ChunkKey, PromptLayout, Segment
from cachecraft_rag.events import (
    ChunkDecision,
    ChunkReport,
    PromptPiece,
    Reason,
    RequestDecision,
    ReuseReport,
)


def full_report(request_id: str, layout: PromptLayout, reason: Reason, detail: str = "") -> ReuseReport:
    """Report of a request that was computed in full, or of which nothing else is known."""
    return ReuseReport(
        request_id=request_id,
        decision=RequestDecision.FULL,
        reason=reason,
        detail=detail,
        num_prompt_tokens=layout.num_tokens,
        num_computed_tokens=layout.num_tokens,
        chunks=tuple(_computed(segment, reason) for segment in layout.chunks),
    )


def complete_report(
    report: ReuseReport, layout: PromptLayout, *, ttft_s: float, absent: Sequence[ChunkReport] = ()
) -> ReuseReport:
    """Add the time to the first token, the chunks that were passed but are not in the prompt, and the
    prompt's pieces."""
    pieces = tuple(PromptPiece(part.text, part.span.start, len(part.span)) for part in layout.segments)
    return replace(report, ttft_s=ttft_s, chunks=(*report.chunks, *absent), pieces=pieces)


def absent_chunks(
    passed: Sequence[Chunk], layout: PromptLayout, key_of: Callable[[Chunk], ChunkKey]
) -> tuple[ChunkReport, ...]:
    """Reports of the `passed` chunks whose text does not stand in the prompt as a chunk."""
    found = {segment.text for segment in layout.chunks}
    texts = {chunk.text.strip(): chunk for chunk in passed}
    return tuple(absent_chunk(chunk, key_of(chunk)) for text, chunk in texts.items() if text not in found)


def _computed(segment: Segment, reason: Reason) -> ChunkReport:
    assert segment.chunk is not None and segment.key is not None  # what PromptLayout.chunks holds
    return ChunkReport(
        chunk_key=segment.key,
        doc_id=segment.chunk.doc_id,
        version=segment.chunk.version,
        decision=ChunkDecision.COMPUTED,
        reason=reason,
        start=segment.span.start,
        num_tokens=len(segment.span),
        num_computed_tokens=len(segment.span),
    )


def absent_chunk(chunk: Chunk, key: ChunkKey) -> ChunkReport:
    """Report of a chunk that was passed and whose text does not stand in the prompt."""
    return ChunkReport(
        chunk_key=key,
        doc_id=chunk.doc_id,
        version=chunk.version,
        decision=ChunkDecision.COMPUTED,
        reason=Reason.NOT_IN_PROMPT,
        start=-1,
        num_tokens=0,
    )
