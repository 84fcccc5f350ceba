"""Selection of tokens that only a running request allows: by what its question attends to, or by how
far cached KV is from fresh KV. The workers measure; what follows from it is decided here."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cachecraft_rag.chunks import Span
from cachecraft_rag.planner.selection import select_spans

NEED_WEIGHT = 3.0
"""Weight of the stored need in `FOCUS`, the question's attention having 1. Attention is peaked: with equal
weights it alone decides most of the budget. Measured in docs/quality.md."""


class LiveMethod(enum.StrEnum):
    """What the workers measure before tokens are chosen."""

    QUESTION = "question"
    """Attention of the question on each token, in a pass of the question over the loaded KV."""
    FOCUS = "focus"
    """The same, mixed with each token's stored need of repair."""
    DEVIATION = "deviation"
    """Distance of the cached from the fresh values on an early layer (CacheBlend)."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """Loaded tokens of one chunk that compete for the budget.

    Attributes:
        need: float32 (len(span),), stored attention to earlier chunks (Cache-Craft eq. 14); None if it
            was never measured.
    """

    span: Span
    need: np.ndarray | None

    def clip(self, start: int) -> Candidate:
        """The part from `start` on."""
        part = self.span.clip(start, max(start, self.span.end))
        offset = part.start - self.span.start
        return Candidate(part, None if self.need is None else self.need[offset : offset + len(part)])


@dataclass(frozen=True, slots=True, eq=False)
class LiveSelection:
    """One global budget over all loaded chunks.

    Attributes:
        num_tokens: the budget, what it takes to measure included.
        granularity: length of the runs that are taken.
        candidates: ascending and disjoint.
    """

    method: LiveMethod
    num_tokens: int
    granularity: int
    candidates: tuple[Candidate, ...]

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(candidate.span for candidate in self.candidates)

    @property
    def num_candidates(self) -> int:
        return sum(map(len, self.spans))

    def clip(self, start: int) -> LiveSelection:
        """Without what lies before `start`: it needs no repair."""
        return self._with(c for c in (candidate.clip(start) for candidate in self.candidates) if len(c.span))

    def without(self, spans: Sequence[Span]) -> LiveSelection:
        """Without the candidates that touch `spans`: they are computed anyway."""
        return self._with(c for c in self.candidates if not _touches(c.span, spans))

    def choose(self, measured: np.ndarray | None, num_tokens: int) -> tuple[Span, ...]:
        """The best tokens within `num_tokens`.

        Args:
            measured: float (num_candidates,), what the workers measured; None where that failed, so
                that stored need alone decides.
        """
        budget = min(max(0, num_tokens), self.num_candidates)
        return select_spans(self.spans, self._scores(measured), budget, self.granularity)

    def _with(self, candidates: Iterable[Candidate]) -> LiveSelection:
        """Fewer candidates, and as much less of the budget."""
        left = replace(self, candidates=tuple(candidates))
        if left.num_candidates == self.num_candidates:
            return left
        return replace(left, num_tokens=-(-self.num_tokens * left.num_candidates // self.num_candidates))

    def _scores(self, measured: np.ndarray | None) -> np.ndarray:
        if measured is None:
            return _share_of_total(self._need())
        if self.method is LiveMethod.FOCUS:
            mixed: np.ndarray = _share_of_total(measured) + NEED_WEIGHT * _share_of_total(self._need())
            return mixed
        return measured

    def _need(self) -> np.ndarray:
        need: np.ndarray = np.concatenate([np.zeros(0), *_needs(self.candidates)])
        return need


def _needs(candidates: Sequence[Candidate]) -> Iterator[np.ndarray]:
    for candidate in candidates:
        yield np.zeros(len(candidate.span)) if candidate.need is None else candidate.need


def _share_of_total(scores: np.ndarray) -> np.ndarray:
    total = float(scores.sum(dtype=np.float64))
    return scores / total if total > 0.0 else scores


def _touches(span: Span, others: Sequence[Span]) -> bool:
    return any(other.start < span.end and span.start < other.end for other in others)
