"""Requests as they are sent: the same for every way of answering."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cachecraft_rag import Chunk

SEPARATOR = "\n\n"


@dataclass(frozen=True, slots=True)
class Passage:
    """A retrieved text.

    Attributes:
        num_tokens: of the text by itself, in the model's tokenizer.
        rank: 0 is the passage that most requests of the whole workload name.
    """

    name: str
    text: str
    num_tokens: int
    rank: int = 0


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """One request.

    Attributes:
        passages: in the order in which they were retrieved.
        tail: what follows them: history, web results and the question.
        num_tokens: of all texts; the chat template comes on top.
        time_s: arrival in the trace, 0 where there is none.
        ignore_eos: generate `max_tokens` whatever the model says.
    """

    system: str
    passages: tuple[Passage, ...]
    tail: str
    num_tokens: int
    max_tokens: int
    time_s: float = 0.0
    ignore_eos: bool = False

    def messages(self) -> list[dict[str, str]]:
        user = SEPARATOR.join([*(passage.text for passage in self.passages), self.tail])
        return [{"role": "system", "content": self.system}, {"role": "user", "content": user}]

    def chunks(self) -> list[Chunk]:
        return [Chunk(passage.text, doc_id=passage.name) for passage in self.passages]

    def reordered(self) -> ReplayRequest:
        """The most popular passages first, so that more prompts begin alike."""
        return replace(self, passages=tuple(sorted(self.passages, key=lambda passage: passage.rank)))

    def only_first_token(self) -> ReplayRequest:
        return replace(self, max_tokens=1)


@dataclass(frozen=True, slots=True)
class Workload:
    """Consecutive parts of one traffic; each part's requests are new to the parts before it.

    Attributes:
        fill: for ways with a chunk store only: puts it into the state that earlier traffic left.
        warm_up: for all ways with a cache; not measured.
        saturated: measured, arriving faster than they can be served.
        moderate: measured, at a rate that prefix caching can serve.
        facts: what a reader has to know of it.
    """

    name: str
    fill: tuple[ReplayRequest, ...]
    warm_up: tuple[ReplayRequest, ...]
    saturated: tuple[ReplayRequest, ...]
    moderate: tuple[ReplayRequest, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
