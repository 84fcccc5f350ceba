"""What is counted: one record per question, and figures over all of them. No engine, no output."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cachecraft_rag.events import ChunkDecision, ChunkReport, Reason, ReuseReport
from demo_parts.data import Question

NUM_FIRST = 5
"""Questions that fill the store; the criterion counts those after them."""
MIN_MOVED_SHARE = 0.60
MOVED = (ChunkDecision.REUSED, ChunkDecision.REPAIRED)


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    report: ReuseReport


@dataclass(frozen=True, slots=True)
class Asked:
    """One question, answered with reuse and by full compute of the very same prompt.

    Raises:
        ValueError: the two prompts differ in length, so that they must not be compared.
    """

    question: Question
    reuse: Answer
    full: Answer

    def __post_init__(self) -> None:
        lengths = self.reuse.report.num_prompt_tokens, self.full.report.num_prompt_tokens
        if lengths[0] != lengths[1]:
            raise ValueError(f"prompts of {lengths[0]} and {lengths[1]} tokens must not be compared")

    @property
    def is_same_answer(self) -> bool:
        return self.reuse.text == self.full.text

    @property
    def ttft_ratio(self) -> float:
        """How many times sooner the first token came with reuse."""
        return self.full.report.ttft_s / self.reuse.report.ttft_s


@dataclass(frozen=True, slots=True)
class PassageTokens:
    """Tokens of retrieved passages, by what was done with them; the four parts add up to `total`.

    Attributes:
        moved: KV taken over behind other predecessors than at capture.
        exact: KV taken over behind the very same ones, which a prefix cache can do too.
    """

    moved: int
    exact: int
    recomputed: int
    computed: int

    @property
    def total(self) -> int:
        return self.moved + self.exact + self.recomputed + self.computed

    @property
    def moved_share(self) -> float:
        """Share in [0, 1]; 0 of no tokens at all, so that an empty run does not pass."""
        return self.moved / self.total if self.total else 0.0


def is_moved(chunk: ChunkReport) -> bool:
    """Whether its KV was reused behind other predecessors than at capture."""
    return chunk.decision in MOVED and not chunk.same_predecessors


def count_tokens(reports: Iterable[ReuseReport]) -> PassageTokens:
    """Only tokens whose KV was really taken over count as moved: not what was recomputed."""
    chunks = [chunk for report in reports for chunk in report.chunks]
    reused = sum(chunk.num_reused_tokens for chunk in chunks)
    moved = sum(chunk.num_reused_tokens for chunk in chunks if is_moved(chunk))
    return PassageTokens(
        moved=moved,
        exact=reused - moved,
        recomputed=sum(chunk.num_recomputed_tokens for chunk in chunks),
        computed=sum(chunk.num_computed_tokens for chunk in chunks),
    )


def after_first(asked: Sequence[Asked]) -> Sequence[Asked]:
    return asked[NUM_FIRST:]


def median_ratio(asked: Iterable[Asked]) -> float:
    return statistics.median(one.ttft_ratio for one in asked)


def computed_reasons(report: ReuseReport) -> Counter[Reason]:
    """Why passages were computed in full: how many for each reason."""
    return Counter(c.reason for c in report.chunks if c.decision is ChunkDecision.COMPUTED)
