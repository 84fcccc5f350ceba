"""What calibration remembers, per model: answers as they come, and the budget that was chosen."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

from cachecraft_rag.engine.calibration import Calibration
from cachecraft_rag.engine.remembered import load_facts, save_facts
from cachecraft_rag.models import cache_dir

logger = logging.getLogger(__name__)


class AnswerFile:
    """Answers of earlier runs by (question, setup, budget), so that a run that was interrupted goes on.

    One JSON line per answer, appended at once. A line that was cut off is passed over.
    """

    def __init__(self, model_key: str) -> None:
        self._path = _folder() / f"{model_key}.jsonl"
        self._answers = {
            (question, setup, budget): digest for question, setup, budget, digest in self._lines()
        }

    def get(self, question: str, setup: str, budget: float | None) -> str | None:
        """The answer's digest; `budget` None is full compute. None if it is not known."""
        return self._answers.get((question, setup, budget))

    def add(self, question: str, setup: str, budget: float | None, digest: str) -> None:
        """Remember an answer. A cache folder that cannot be written costs only the next run's time."""
        self._answers[question, setup, budget] = digest
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([question, setup, budget, digest]) + "\n")
        except OSError as error:
            logger.warning("a calibration answer could not be written to %s: %s", self._path, error)

    def _lines(self) -> Iterator[tuple[str, str, float | None, str]]:
        try:
            text = self._path.read_text(encoding="utf-8")
        except OSError:
            return
        for line in text.splitlines():
            try:
                question, setup, budget, digest = json.loads(line)
            except (ValueError, TypeError):
                continue
            yield question, setup, budget, digest


def load_calibration(model_key: str) -> Calibration | None:
    """The calibration of an earlier process; None if there is none that can be read."""
    try:
        return Calibration.from_dict(load_facts(_choice_path(model_key)))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def save_calibration(model_key: str, calibration: Calibration) -> None:
    """Remember `calibration` for later engines of the same model."""
    save_facts(_choice_path(model_key), calibration.to_dict())


def _choice_path(model_key: str) -> Path:
    return _folder() / f"{model_key}.json"


def _folder() -> Path:
    return cache_dir() / "calibration"
