"""From a request and the index of stored variants to a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cachecraft_rag.chunks import ChunkKey, RecordMeta, Span
from cachecraft_rag.errors import PlanError
from cachecraft_rag.events import ChunkDecision, Reason
from cachecraft_rag.planner.live import Candidate, LiveMethod, LiveSelection
from cachecraft_rag.planner.plan import ChunkPlan, PlanRequest, PromptChunk, ReusePlan
from cachecraft_rag.planner.selection import select_tokens
from cachecraft_rag.planner.strategies import (
    Choice,
    StoredScore,
    Strategy,
    StrategyOptions,
    get_strategy,
)

VariantLookup = Callable[[ChunkKey], Sequence[RecordMeta]]

ROUNDING_SLACK = 1e-9
"""Keeps ceil(share * num_tokens) from counting float noise as a token: 0.07 * 100 > 7."""


def build_plan(request: PlanRequest, variants: VariantLookup) -> ReusePlan:
    """Decide for every chunk of the prompt; the same request and variants give the same plan.

    The context that the plan covers ends with the last chunk, and one token before the prompt's end
    at the latest.

    Args:
        variants: the stored variants of a chunk's KV, in any order; called once per chunk.

    Raises:
        InvalidRequestError: there is no such strategy.
        PlanError: the request's chunks are out of order or leave the prompt, the prompt is empty, or
            a stored profile does not fit its chunk.
    """
    strategy = get_strategy(request.strategy)
    context_end = min(request.chunks[-1].span.end, request.num_tokens - 1) if request.chunks else 0
    prefix: list[ChunkKey] = []
    missing: set[ChunkKey] = set()
    plans: list[ChunkPlan] = []
    live = _LiveBudget()
    overspent = 0
    for index, chunk in enumerate(request.chunks):
        reason = request.refusals.get(index)
        found = _usable(chunk, variants) if reason is None else []
        if reason is None and not found:
            reason = Reason.REPEATED_IN_PROMPT if chunk.key in missing else Reason.NOT_CACHED
            missing.add(chunk.key)
        choice = reason or _choose(request, strategy, chunk, prefix, found)
        if isinstance(choice, Reason):
            plans.append(_computed(chunk, choice))
        elif isinstance(strategy.score, LiveMethod) and 0.0 < choice.share < 1.0:
            live.add(choice, chunk.span.clip(0, context_end))
            plans.append(_chunk_plan(chunk, choice, prefix, context_end, (), ChunkDecision.REPAIRED))
        else:
            scores = _stored_scores(strategy, choice)
            recompute = _recompute(request, choice, scores, chunk.span.clip(0, context_end), overspent)
            overspent += sum(map(len, recompute)) - min(_budget(choice), len(chunk.span))
            plans.append(_chunk_plan(chunk, choice, prefix, context_end, recompute))
        prefix.append(chunk.key)
    selection = live.selection(strategy.score, request.granularity)
    whole = ReusePlan(request.num_tokens, context_end, tuple(plans), request.strategy, selection)
    whole.validate()
    return whole


def _usable(chunk: PromptChunk, variants: VariantLookup) -> list[RecordMeta]:
    """The variants that hold KV of exactly these tokens; an index at fault must not be believed."""
    num_tokens = len(chunk.span)
    return [r for r in variants(chunk.key) if r.key == chunk.key and r.num_tokens == num_tokens]


def _choose(
    request: PlanRequest,
    strategy: Strategy,
    chunk: PromptChunk,
    prefix: Sequence[ChunkKey],
    found: Sequence[RecordMeta],
) -> Choice | Reason:
    exact = [r for r in found if _is_exact(r, chunk)]
    if request.exact_only and not exact:
        return Reason.NO_EXACT_VARIANT
    if exact and strategy.reuses_exact:
        return Choice(max(exact, key=lambda r: r.record_id), share=0.0)
    options = StrategyOptions(request.alpha, request.share, request.recompute_ratio)
    return strategy.choose(found, prefix, options)


def _is_exact(record: RecordMeta, chunk: PromptChunk) -> bool:
    return record.prefix_is_exact and record.prefix_hash == chunk.prefix_hash


def _computed(chunk: PromptChunk, reason: Reason) -> ChunkPlan:
    return ChunkPlan(chunk.span, chunk.key, ChunkDecision.COMPUTED, reason, document=chunk.document)


@dataclass(slots=True)
class _LiveBudget:
    """What the workers will choose from, and how much, gathered over the chunks."""

    candidates: list[Candidate] = field(default_factory=list)
    wanted: float = 0.0

    def add(self, choice: Choice, in_context: Span) -> None:
        if not in_context:
            return
        need = _token_scores(choice)
        self.candidates.append(Candidate(in_context, None if need is None else need[: len(in_context)]))
        self.wanted += choice.share * len(in_context)

    def selection(self, method: StoredScore | LiveMethod, granularity: int) -> LiveSelection | None:
        if not self.candidates or not isinstance(method, LiveMethod):
            return None
        num_tokens = math.ceil(self.wanted - ROUNDING_SLACK)
        return LiveSelection(method, num_tokens, granularity, tuple(self.candidates))


def _chunk_plan(
    chunk: PromptChunk,
    choice: Choice,
    prefix: Sequence[ChunkKey],
    context_end: int,
    recompute: tuple[Span, ...],
    decision: ChunkDecision | None = None,
) -> ChunkPlan:
    record = choice.record
    num_kept = len(chunk.span.clip(0, context_end)) - sum(map(len, recompute))
    reason = Reason.OTHER_PREFIX
    if decision is None:
        decision, reason = _decide(num_kept, bool(recompute), _is_exact(record, chunk))
    return ChunkPlan(
        span=chunk.span,
        key=chunk.key,
        decision=decision,
        reason=reason,
        record_id=record.record_id,
        cached_start=record.start,
        recompute=recompute,
        same_predecessors=record.prefix_chunks == tuple(prefix),
        document=chunk.document,
        num_separator_tokens=len(chunk.separator) if num_kept and record.separator == chunk.separator else 0,
    )


def _budget(choice: Choice) -> int:
    """Tokens of the chunk that the strategy wants recomputed."""
    return math.ceil(choice.share * choice.record.num_tokens - ROUNDING_SLACK)


def _recompute(
    request: PlanRequest, choice: Choice, scores: np.ndarray | None, in_context: Span, overspent: int
) -> tuple[Span, ...]:
    """Positions in the prompt to recompute: the best of the whole chunk, less those past the context.

    Runs are taken whole, so a chunk may get more tokens than its budget; `overspent`, what chunks
    before this one got too much, is taken off its own. Without that, runs of 16 in chunks of 150
    tokens turn 15 % into 21 %.
    """
    if _budget(choice) >= choice.record.num_tokens:
        return (in_context,) if in_context else ()
    budget = max(0, _budget(choice) - max(0, overspent))
    spans = select_tokens(scores, budget, request.granularity, offset=in_context.start)
    if spans and spans[-1].end > in_context.end:
        clipped = (span.clip(in_context.start, in_context.end) for span in spans)
        return tuple(span for span in clipped if span)
    return spans


def _stored_scores(strategy: Strategy, choice: Choice) -> np.ndarray | None:
    return None if strategy.score is StoredScore.FIRST_TOKENS else _token_scores(choice)


def _token_scores(choice: Choice) -> np.ndarray | None:
    """The chosen variant's stored need of repair, None if it was never measured.

    Raises:
        PlanError: there is not one score per token.
    """
    record = choice.record
    if record.profile is None:
        return None
    scores = record.profile.token_scores
    if len(scores) != record.num_tokens:
        raise PlanError(
            f"record {record.record_id} has {len(scores)} token scores for {record.num_tokens} "
            "tokens: a profile needs one per token; drop the record"
        )
    return scores


def _decide(num_kept: int, any_recomputed: bool, is_exact: bool) -> tuple[ChunkDecision, Reason]:
    if num_kept == 0:
        return ChunkDecision.REPAIRED, Reason.RECOMPUTE_ALL
    if is_exact and not any_recomputed:
        return ChunkDecision.EXACT, Reason.SAME_PREFIX
    if any_recomputed:
        return ChunkDecision.REPAIRED, Reason.OTHER_PREFIX
    return ChunkDecision.REUSED, Reason.OTHER_PREFIX
