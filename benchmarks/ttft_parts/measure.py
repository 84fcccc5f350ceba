"""One engine, and all ways in turns over the same passages.

The store is filled by one full prefill, which is the warm-up of full prefill as well. Each repeat asks
all ways in a changing order about the passages in one new order. Nothing measured leaves anything that a
later call could find, but for prefix caching: it has a tenant of its own in every repeat, in which a
request with another passage was answered before, so it finds the system prompt; asked the next question
over the same passages in the same order, it finds all of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common.prompts import QUESTION
from benchmarks.quality.models import QaModel
from benchmarks.ttft_parts.record import Measured, Sample
from benchmarks.ttft_parts.ways import PREFIX, PREFIX_SAME, Way, warming_way
from rich.progress import track

from cachecraft_rag import CacheCraftEngine, Chunk

NEXT_QUESTION = "Which of these passages speaks of a river, and where does it end?"
SEED = 5
_NO_TRACE = {"store": False, "read_prefix_cache": False}


@dataclass(frozen=True, slots=True)
class Asker:
    """Asks one engine for single tokens."""

    engine: CacheCraftEngine
    model: QaModel

    def ask(self, passages: Sequence[Chunk], question: str = QUESTION, **options: Any) -> Sample:
        prompt = self.model.prompt(passages, question)
        call = self.engine.complete if isinstance(prompt, str) else self.engine.chat
        return Sample.of(call(prompt, max_tokens=1, **options).report)

    def fill(self, passages: Sequence[Chunk]) -> None:
        """Compute the passages and store them, each behind those before it."""
        self.ask(passages, chunks=passages, reuse="off", read_prefix_cache=False)

    def time_way(self, way: Way, passages: Sequence[Chunk]) -> Sample:
        return self.ask(passages, chunks=passages, **way.options, **_NO_TRACE)

    def time_prefix_caching(self, passages: Sequence[Chunk], repeat: int) -> Iterator[tuple[str, Sample]]:
        """vLLM's own, without chunks, so that it pays for none: another order, then the same one."""
        options = {"reuse": "off", "tenant": f"prefix-{len(passages)}-{repeat}"}
        self.ask(passages[-1:], **options)
        yield PREFIX, self.ask(passages, **options)
        yield PREFIX_SAME, self.ask(passages, NEXT_QUESTION, **options)


def measure(
    asker: Asker, passages: Sequence[Chunk], ways: Sequence[Way], repeats: int, title: str
) -> list[Measured]:
    """All ways over the same passages, in the order of `ways`."""
    rng = random.Random(SEED)
    asker.fill(passages)
    if (warming := warming_way(ways)) is not None:
        asker.time_way(warming, other_order(passages, rng))
    samples: dict[str, list[Sample]] = {way.name: [] for way in ways}
    for repeat in track(range(repeats), description=title, transient=True):
        order = other_order(passages, rng)
        for way in rng.sample(ways, len(ways)):
            if way.name == PREFIX:
                for name, sample in asker.time_prefix_caching(order, repeat):
                    samples[name].append(sample)
            elif way.name != PREFIX_SAME:  # measured right behind the former
                samples[way.name].append(asker.time_way(way, order))
    return [Measured(way, samples[way.name]) for way in ways]


def check_orders(prompts: Iterable[Sequence[Chunk]]) -> None:
    """Before an engine starts: can the passages of each prompt stand in another order?

    Raises:
        SystemExit: one holds fewer than two.
    """
    if any(len(passages) < 2 for passages in prompts):
        raise SystemExit("fewer than two passages fit a context, so that there is no other order: raise it")


def other_order(passages: Sequence[Chunk], rng: random.Random) -> list[Chunk]:
    """Two or more passages shuffled, another one first: none then stands behind the text it was stored
    behind."""
    while True:
        order = rng.sample(passages, len(passages))
        if order[0] is not passages[0]:
            return order
