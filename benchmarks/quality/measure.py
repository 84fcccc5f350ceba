"""One item: full prefill's answer, then every way's, and how far each is from it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from benchmarks.quality import metrics
from benchmarks.quality.forced import FORCED_ARG, TRACE_ARG, TRACES, Reference, Trace
from benchmarks.quality.items import EvalSet, Item
from benchmarks.quality.models import QaModel
from benchmarks.quality.results import Row
from benchmarks.quality.ways import FULL, Way

from cachecraft_rag import CacheCraftEngine
from cachecraft_rag.engine.api import Completion
from cachecraft_rag.events import ChunkDecision, ReuseReport


@dataclass(frozen=True)
class Meter:
    """Measures items on one engine; at most `slots` requests are on their way at a time."""

    engine: CacheCraftEngine
    model: QaModel
    eval_set: EvalSet
    slots: asyncio.Semaphore

    async def measure(self, item: Item, ways: Sequence[Way], *, with_full: bool) -> list[Row]:
        """One row per way, and full prefill's own before them if it is wanted."""
        full = Trace()
        answer = await self._ask(item, full, reuse="off", store=False, **self.model.sampling)
        reference = Reference.of([full.rows[step] for step in range(len(full.rows))])
        row = self._row(item, FULL, answer, _Distance([0.0], None, answer.text.strip()), charged=1.0)
        rows = await asyncio.gather(*(self._measure_way(item, way, answer, reference) for way in ways))
        return [row, *rows] if with_full else rows

    async def _measure_way(self, item: Item, way: Way, full: Completion, reference: Reference) -> Row:
        options = {**way.options, "tenant": way.regime}
        free = Trace(reference)
        answer = await self._ask(item, free, **options, **self.model.sampling)
        step = divergence(full.token_ids, answer.token_ids)
        kl = free.kl
        # A free answer's distributions compare until it takes another token. Most never do, so only the
        # others pay for a second, forced answer.
        if step is not None and step + 1 < len(reference):
            kl = await self._forced_kl(item, full, reference, options)
        charged = metrics.charged_ratio(way.strategy, answer.report, self._num_layers)
        distance = _Distance([kl[step] for step in range(len(reference))], step, full.text.strip())
        return self._row(item, way.name, answer, distance, charged)

    async def _forced_kl(
        self, item: Item, full: Completion, reference: Reference, options: dict[str, Any]
    ) -> dict[int, float]:
        forced = list(full.token_ids[: len(reference)])
        trace = Trace(reference)
        await self._ask(item, trace, forced, **options, max_tokens=len(forced), ignore_eos=True)
        return trace.kl

    async def _ask(self, item: Item, trace: Trace, forced: Sequence[int] = (), **options: Any) -> Completion:
        with _registered(trace) as key:
            extra_args = {TRACE_ARG: key, FORCED_ARG: list(forced)}
            async with self.slots:
                return await self.model.ask(
                    self.engine, item.chunks, item.question, extra_args=extra_args, **options
                )

    @cached_property
    def _num_layers(self) -> int:
        return self.model.num_layers()

    def _row(self, item: Item, way: str, completion: Completion, distance: _Distance, charged: float) -> Row:
        language, answer, report = self.eval_set.language, completion.text.strip(), completion.report
        return Row(
            item=item.item_id,
            position=item.position,
            way=way,
            kl=fmean(distance.kl),
            kl_first=distance.kl[0],
            agree=answer == distance.full_answer,
            divergence=distance.divergence,
            f1=metrics.f1(answer, item.answers, language),
            exact_match=metrics.exact_match(answer, item.answers),
            contains=metrics.contains(answer, item.answers),
            rouge_l=metrics.rouge_l(answer, item.answers, language),
            answer=answer,
            num_prompt_tokens=report.num_prompt_tokens,
            num_reused_tokens=report.num_reused_tokens,
            num_recomputed_tokens=report.num_recomputed_tokens,
            num_missing_tokens=0 if way == FULL else _num_missing_tokens(report),
            charged=charged,
        )


@dataclass(frozen=True, slots=True)
class _Distance:
    """From full prefill's answer: KL of each compared step, and the first other token."""

    kl: list[float]
    divergence: int | None
    full_answer: str


def divergence(full: Sequence[int], other: Sequence[int]) -> int | None:
    """First step at which two answers have other tokens, None if they are the same."""
    for step, (token, other_token) in enumerate(zip(full, other, strict=False)):
        if token != other_token:
            return step
    return None if len(full) == len(other) else min(len(full), len(other))


def _num_missing_tokens(report: ReuseReport) -> int:
    return sum(chunk.num_tokens for chunk in report.chunks if chunk.decision is ChunkDecision.COMPUTED)


@contextmanager
def _registered(trace: Trace) -> Iterator[str]:
    """The key under which the logits processor finds `trace` while the request runs."""
    key = uuid.uuid4().hex
    TRACES[key] = trace
    try:
        yield key
    finally:
        del TRACES[key]
