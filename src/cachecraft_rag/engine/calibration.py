"""The smallest recompute budget with which a user's own questions are answered as by full compute."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

from cachecraft_rag.chunks import Chunk
from cachecraft_rag.engine.api import Message
from cachecraft_rag.errors import InvalidRequestError

BUDGETS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
FULL = 1.0
"""Everything recomputed: full compute's own answers, so that some budget always meets the target."""


@dataclass(frozen=True, slots=True)
class CalibrationQuestion:
    """One question as it is asked in production: the whole prompt and the chunks in it.

    Attributes:
        prompt: chat messages, or the text of a finished prompt.

    Raises:
        InvalidRequestError: no chunk is given, so there is nothing to reuse.
    """

    prompt: str | Sequence[Message]
    chunks: tuple[Chunk, ...]

    def __post_init__(self) -> None:
        if not self.chunks:
            raise InvalidRequestError(
                f"a calibration question has no chunks ({str(self.prompt)[:60]!r}): name those in its prompt"
            )

    @property
    def name(self) -> str:
        """Hash of all that decides its answer, as 32 hex digits."""
        prompt = self.prompt if isinstance(self.prompt, str) else [dict(m) for m in self.prompt]
        return _hash([prompt, [chunk.text for chunk in self.chunks]])


@dataclass(frozen=True, slots=True)
class CalibrationPoint:
    """One measured budget: the share of answers equal to full compute's, with a Wilson interval."""

    budget: float
    agreement: float
    low: float
    high: float
    num_questions: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was found.

    Attributes:
        budget: smallest measured share of reused tokens to recompute that meets the target.
        points: measured budgets in ascending order; not all were needed.
        is_certain: whether the lower end of the chosen point's interval meets the target too. More
            questions make it so, where the budget is right.
        setup: what else the budget holds for, the fields of `Setup`.
    """

    budget: float
    target_agreement: float
    confidence: float
    points: tuple[CalibrationPoint, ...]
    is_certain: bool
    setup: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Calibration:
        points = tuple(CalibrationPoint(**point) for point in data["points"])
        return cls(**{**data, "points": points})


@dataclass(frozen=True, slots=True)
class Setup:
    """What a question's answers depend on besides its prompt, the model and the budget."""

    strategy: str
    granularity: int
    system: str | None
    neighbours: bool | int
    max_tokens: int

    def name(self, chunks: Sequence[Chunk]) -> str:
        """With neighbours, how a chunk is cached depends on all `chunks`."""
        return _hash([asdict(self), sorted({chunk.text for chunk in chunks}) if self.neighbours else None])


def digest_of(answer: str) -> str:
    """What is remembered of an answer: enough to tell whether two are equal, and no text on the disk."""
    return _hash(answer)


def check_questions(questions: Sequence[CalibrationQuestion]) -> tuple[CalibrationQuestion, ...]:
    """The distinct questions in order.

    Raises:
        InvalidRequestError: there are none, or an element is something else.
    """
    for index, question in enumerate(questions):
        if not isinstance(question, CalibrationQuestion):
            raise InvalidRequestError(
                f"questions[{index}] is a {type(question).__name__}: wrap it as CalibrationQuestion"
            )
    if not questions:
        raise InvalidRequestError("questions is empty: pass some tens of questions from your own use")
    return tuple({question.name: question for question in questions}.values())


def check_target(target_agreement: float, confidence: float) -> None:
    """Raises: InvalidRequestError: the target is not in (0, 1], or the confidence not in (0, 1)."""
    if not 0 < target_agreement <= 1:
        raise InvalidRequestError(f"target_agreement is {target_agreement!r}: it must lie in (0, 1]")
    if not 0 < confidence < 1:
        raise InvalidRequestError(f"confidence is {confidence!r}: it must lie between 0 and 1")


def check_budgets(budgets: Sequence[float]) -> tuple[float, ...]:
    """The budgets in ascending order, with 1.0 at the end.

    Raises:
        InvalidRequestError: one is not in [0, 1].
    """
    for budget in budgets:
        if not 0 <= budget <= 1:
            raise InvalidRequestError(f"budgets holds {budget!r}: a share of tokens lies in [0, 1]")
    return tuple(sorted({*map(float, budgets), FULL}))


def wilson_interval(num_agreeing: int, num_questions: int, confidence: float) -> tuple[float, float]:
    """Two-sided score interval of a share (Wilson 1927), which keeps its coverage near 0 and 1, where
    the interval from the standard error shrinks to a point."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, weight = num_agreeing / num_questions, z * z / num_questions
    middle = share + weight / 2
    half = z * math.sqrt((share * (1 - share) + weight / 4) / num_questions)
    low, high = (middle - half) / (1 + weight), (middle + half) / (1 + weight)
    # At the ends the exact bound is the share itself, which rounding may miss by a hair.
    return max(0.0, min(low, share)), min(1.0, max(high, share))


def make_point(budget: float, agreements: Sequence[bool], confidence: float) -> CalibrationPoint:
    """The point of one budget; `agreements` has one value per question."""
    num_agreeing, num_questions = sum(agreements), len(agreements)
    low, high = wilson_interval(num_agreeing, num_questions, confidence)
    return CalibrationPoint(budget, num_agreeing / num_questions, low, high, num_questions)


def smallest_budget(
    budgets: Sequence[float], target: float, measure: Callable[[float], CalibrationPoint]
) -> tuple[float, tuple[CalibrationPoint, ...]]:
    """Bisect the ascending `budgets` for the smallest whose measured agreement meets the target.

    Agreement is taken to grow with the budget, so that 8 budgets cost 3 measurements and not 8. The
    last one is taken as met and measured only if it is the result. The measured share decides and not
    the lower end of its interval: with 20 questions that end is 0.88 even where all agree, and every
    target of 0.9 would mean full compute.

    Returns:
        The budget, and the measured points in ascending order.
    """
    points: dict[float, CalibrationPoint] = {}
    low, high = 0, len(budgets) - 1
    while low < high:
        middle = (low + high) // 2
        point = points[budgets[middle]] = measure(budgets[middle])
        low, high = (low, middle) if point.agreement >= target else (middle + 1, high)
    if budgets[low] not in points:
        points[budgets[low]] = measure(budgets[low])
    return budgets[low], tuple(points[budget] for budget in sorted(points))


def _hash(data: Any) -> str:
    text = json.dumps(data, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
