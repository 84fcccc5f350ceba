"""Running a calibration: which requests are made, and how their answers are compared."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from cachecraft_rag.chunks import Chunk
from cachecraft_rag.engine.api import Completion, Message
from cachecraft_rag.engine.calibration import (
    Calibration,
    CalibrationPoint,
    CalibrationQuestion,
    Setup,
    digest_of,
    make_point,
    smallest_budget,
)
from cachecraft_rag.engine.calibration_files import AnswerFile


class Calibrated(Protocol):
    """The part of the engine that is measured."""

    def chat(
        self, messages: Sequence[Message], *, chunks: Sequence[Chunk] = (), **options: Any
    ) -> Completion: ...
    def complete(self, prompt: str, *, chunks: Sequence[Chunk] = (), **options: Any) -> Completion: ...
    def warm(
        self,
        chunks: Sequence[Chunk],
        *,
        system: str | None = None,
        tenant: str | None = None,
        neighbours: bool | int = False,
    ) -> int: ...
    def purge(self, tenant: str | None = None) -> int: ...


class CalibrationRun:
    """The requests of one calibration, in a tenant of its own: what production has stored neither
    changes the result nor is changed."""

    def __init__(
        self,
        engine: Calibrated,
        questions: Sequence[CalibrationQuestion],
        setup: Setup,
        answers: AnswerFile,
        on_answer: Callable[[], object],
    ) -> None:
        self._engine = engine
        self._questions = questions
        self._setup = setup
        self._answers = answers
        self._on_answer = on_answer
        self._chunks = tuple(dict.fromkeys(chunk for question in questions for chunk in question.chunks))
        self._setup_name = setup.name(self._chunks)
        self._tenant = f"calibration-{uuid.uuid4().hex}"
        self._is_warm = False

    def run(self, budgets: Sequence[float], target_agreement: float, confidence: float) -> Calibration:
        """Find the smallest budget that meets the target."""
        try:
            budget, points = smallest_budget(
                budgets, target_agreement, lambda budget: self._measure(budget, confidence)
            )
        finally:
            self._engine.purge(self._tenant)
        chosen = next(point for point in points if point.budget == budget)
        return Calibration(
            budget, target_agreement, confidence, points, chosen.low >= target_agreement, asdict(self._setup)
        )

    def _measure(self, budget: float, confidence: float) -> CalibrationPoint:
        agreements = [self._answer(q, None) == self._answer(q, budget) for q in self._questions]
        return make_point(budget, agreements, confidence)

    def _answer(self, question: CalibrationQuestion, budget: float | None) -> str:
        digest = self._answers.get(question.name, self._setup_name, budget)
        if digest is None:
            digest = digest_of(self._ask(question, budget).text)
            self._answers.add(question.name, self._setup_name, budget, digest)
        if budget is not None:
            self._on_answer()
        return digest

    def _ask(self, question: CalibrationQuestion, budget: float | None) -> Completion:
        self._warm_once()
        call: Any = self._engine.complete if isinstance(question.prompt, str) else self._engine.chat
        completion: Completion = call(
            question.prompt,
            chunks=question.chunks,
            tenant=self._tenant,
            reuse="off" if budget is None else self._setup.strategy,
            recompute_ratio=budget,
            granularity=self._setup.granularity,
            store=False,
            max_tokens=self._setup.max_tokens,
        )
        return completion

    def _warm_once(self) -> None:
        if not self._is_warm:
            setup = self._setup
            self._engine.warm(
                self._chunks, system=setup.system, tenant=self._tenant, neighbours=setup.neighbours
            )
            self._is_warm = True
