"""Documents and prompts: words of a tiny model's vocabulary, or the demo passages."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.soak_parts.churn import Version
from benchmarks.tiny_models import VOCAB_SIZE

PASSAGES = Path(__file__).parents[2] / "examples" / "data" / "passages.jsonl"
SYSTEM = "Answer from the passages in a few words."
QUESTIONS = ("Who is named first?", "Which year is named?", "What is this about?", "Where was it?")


@dataclass(frozen=True, slots=True)
class Words:
    """Documents of random words, one token each."""

    min_words: int = 30
    max_words: int = 110

    def document(self, version: Version) -> str:
        rng = random.Random(f"{version.document}.{version.number}")
        return _words(rng, rng.randint(self.min_words, self.max_words))

    def prompt(self, documents: Sequence[str], number: int) -> str:
        question = _words(random.Random(number), 6)
        return " w3 ".join([_words(random.Random("system"), 24), *documents, question])


@dataclass(frozen=True, slots=True)
class Passages:
    """The demo passages; a new version has another beginning."""

    texts: tuple[str, ...]

    @classmethod
    def read(cls) -> Passages:
        return cls(tuple(json.loads(line)["text"] for line in PASSAGES.read_text().splitlines()))

    def document(self, version: Version) -> str:
        text = self.texts[version.document]
        return f"Edition {version.number + 1}. {text}" if version.number else text

    def prompt(self, documents: Sequence[str], number: int) -> str:
        return "\n\n".join([SYSTEM, *documents, f"{QUESTIONS[number % len(QUESTIONS)]} ({number})"])


def _words(rng: random.Random, count: int) -> str:
    return " ".join(f"w{rng.randrange(10, VOCAB_SIZE)}" for _ in range(count))
