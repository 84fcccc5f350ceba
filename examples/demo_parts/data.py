"""The passages and questions of `examples/data/`, and the order in which they are asked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent.parent / "data"


@dataclass(frozen=True, slots=True)
class Passage:
    doc_id: str
    title: str
    text: str

    @property
    def content(self) -> str:
        """What is embedded and what the model reads."""
        return f"{self.title}\n{self.text}"

    def with_text(self, old: str, new: str) -> Passage:
        """This passage with every `old` changed to `new`.

        Raises:
            ValueError: `old` does not occur.
        """
        if old not in self.text:
            raise ValueError(f"{old!r} does not occur in {self.doc_id}: nothing would change")
        return replace(self, text=self.text.replace(old, new))


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its acceptable answers, and the passage that answers it."""

    text: str
    answers: tuple[str, ...]
    passage: Passage

    @property
    def topic(self) -> str:
        return self.passage.title

    @property
    def gold(self) -> str:
        return " / ".join(dict.fromkeys(self.answers))

    def is_answered_by(self, answer: str) -> bool:
        """Whether the answer names a gold one; a lenient check, for a small model."""
        return any(gold.casefold() in answer.casefold() for gold in self.answers)


def load(folder: Path = DATA) -> tuple[list[Passage], list[Question]]:
    passages = [Passage(**item) for item in _read(folder / "passages.jsonl")]
    by_id = {passage.doc_id: passage for passage in passages}
    questions = [
        Question(item["question"].strip(), tuple(item["answers"]), by_id[item["doc_id"]])
        for item in _read(folder / "questions.jsonl")
    ]
    return passages, questions


def in_turns(questions: Sequence[Question], num_topics: int) -> list[Question]:
    """The questions of the first `num_topics` topics, one of each topic in turn.

    So do the users of one help desk ask: about few topics, in no order, each in other words.
    """
    topics = list(dict.fromkeys(question.topic for question in questions))[:num_topics]
    groups = [[q for q in questions if q.topic == topic] for topic in topics]
    rounds = max(map(len, groups), default=0)
    return [group[turn] for turn in range(rounds) for group in groups if turn < len(group)]


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
