"""Drives an engine through the events of a soak, several at a time, and watches it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.common.memory import HeldBytes
from benchmarks.soak_parts.churn import Abort, Action, Event, Version
from benchmarks.soak_parts.figures import Outcome, Sample
from benchmarks.soak_parts.workers import WorkerFigures

from cachecraft_rag import CacheCraftEngine, Chunk
from cachecraft_rag.engine.api import Completion
from cachecraft_rag.engine.self_test import logprob_gap
from cachecraft_rag.events import ChunkDecision, Reason

MAX_TOKENS = 8
NUM_LOGPROBS = 5
LEAKS = ("num_pinned", "num_reserved", "num_doomed", "num_running")
COUNTS = ("num_evictions", "num_aborted_in_load", "num_readmitted", "num_moved_chunks", "num_jobs")


class Texts(Protocol):
    def document(self, version: Version) -> str: ...
    def prompt(self, documents: Sequence[str], number: int) -> str: ...


@dataclass(slots=True)
class Soak:
    """One run. `ask_workers` asks for their own figures; `show` is told of every sample."""

    engine: CacheCraftEngine
    texts: Texts
    num_in_flight: int
    sample_every: int
    ask_workers: Callable[[], WorkerFigures]
    show: Callable[[Sample], None]
    _counts: Counter[str] = field(default_factory=Counter)
    _settled: dict[tuple[str, int], int] = field(default_factory=dict)
    """The newest version of a document whose replace has returned. Not of one that was invalidated or purged
    since: an engine takes it in with whatever version it is named next."""
    _samples: list[Sample] = field(default_factory=list)
    _gaps: list[float] = field(default_factory=list)
    _faults: list[str] = field(default_factory=list)
    _errors: list[str] = field(default_factory=list)
    _num_asked: int = 0
    _started_s: float = field(default_factory=time.monotonic)

    async def run(self, events: Iterator[Event]) -> Outcome:
        num_free_blocks = self.engine.stats()["num_free_blocks"]
        while await self._ran_a_round(events):
            await asyncio.to_thread(self._sample)
        await asyncio.to_thread(self.engine.drain_feedback)
        stats = self.engine.stats()
        leaks = {name: int(stats[name]) for name in LEAKS}
        leaks["lost_blocks"] = num_free_blocks - stats["num_free_blocks"]
        leaks["records_of_worker_only"] = self.ask_workers().num_records - stats["num_records"]
        return Outcome(
            samples=self._samples,
            gaps=self._gaps,
            num_checked_with_stored=self._counts["checked_with_stored"],
            num_aborted=self._counts["aborted"],
            num_stale=self._counts["stale"],
            leaks=leaks,
            faults=[*self._faults, *self.engine.check()],
            errors=self._errors,
            counts={name: int(stats[name]) for name in COUNTS},
        )

    async def _ran_a_round(self, events: Iterator[Event]) -> bool:
        """Whether there were enough events for a sample, which is taken when nothing runs: memory in use is
        that of requests otherwise, which come and go."""
        start, events_of_round = self._num_asked, _take(events, self.sample_every)
        await asyncio.gather(*(self._work(events_of_round) for _ in range(self.num_in_flight)))
        return self._num_asked - start == self.sample_every

    def _check_books(self) -> None:
        self._counts["faults"] += len(found := self.engine.check())
        self._faults.extend(found)

    async def _work(self, events: Iterator[Event]) -> None:
        for event in events:  # shared with the other workers: each takes the next one
            try:
                await self._carry_out(event)
            except Exception as error:
                self._errors.append(f"{event.action} {event.number}: {error!r}")
            if event.action is Action.ASK:
                self._num_asked += 1
                if self._num_asked % self.sample_every == self.sample_every // 2:
                    await asyncio.to_thread(self._check_books)  # while the others' requests run

    async def _carry_out(self, event: Event) -> None:
        if event.action is Action.ASK:
            await self._ask(event)
        else:
            await asyncio.to_thread(self._change, event)

    def _change(self, event: Event) -> None:
        if event.action is Action.PURGE:
            for place in [place for place in self._settled if place[0] == event.tenant]:
                del self._settled[place]
            self.engine.purge(event.tenant)
            return
        (version,) = event.versions
        place = (event.tenant, version.document)
        if event.action is Action.INVALIDATE:
            self._settled.pop(place, None)
            self.engine.invalidate(_name(version), tenant=event.tenant)
            return
        chunks = [self._chunk(version)]
        self.engine.replace(_name(version), str(version.number), chunks, tenant=event.tenant)
        self._settled[place] = max(self._settled.get(place, 0), version.number)

    async def _ask(self, event: Event) -> None:
        if event.abort is not Abort.NONE:
            await self._abort(event)
            return
        behind = self._behind(event)
        out = await self._answer(event, reuse=event.reuse)
        self._count(out)
        still_behind = behind & self._behind(event)
        self._counts["stale"] += sum(
            version in still_behind
            and chunk.decision is not ChunkDecision.COMPUTED
            and chunk.reason is not Reason.PREFIX_CACHE  # computed anew by another that was behind
            for version, chunk in zip(event.versions, out.report.chunks, strict=True)
        )
        if event.is_checked:
            await self._check(event)

    def _behind(self, event: Event) -> set[Version]:
        """Versions of the question that were replaced."""
        return {
            each
            for each in event.versions
            if self._settled.get((event.tenant, each.document), 0) > each.number
        }

    async def _abort(self, event: Event) -> None:
        self._counts["aborted"] += 1
        arguments = self._arguments(event, reuse=event.reuse)
        if event.abort is Abort.CLOSE:
            async with aclosing(self.engine.astream_complete(**arguments)) as deltas:
                async for _ in deltas:
                    return
        task = asyncio.ensure_future(self.engine.acomplete(**arguments))
        await asyncio.wait([task], timeout=event.abort_after_s)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def _check(self, event: Event) -> None:
        """Both ways of reuse that promise full compute's answer, against it."""
        options = {"store": False, "logprobs": NUM_LOGPROBS, "ignore_eos": True}
        full = await self._answer(event, reuse="off", **options)
        recomputed = await self._answer(event, reuse="recompute_all", **options)
        exact = await self._answer(event, reuse="exact", **options)
        self._gaps.append(max(logprob_gap(recomputed, full), logprob_gap(exact, full)))
        self._counts["checked_with_stored"] += recomputed.report.num_recomputed_tokens > 0

    async def _answer(self, event: Event, **options: Any) -> Completion:
        return await self.engine.acomplete(**self._arguments(event, **options))

    def _arguments(self, event: Event, **options: Any) -> dict[str, Any]:
        chunks = [self._chunk(version) for version in event.versions]
        prompt = self.texts.prompt([chunk.text for chunk in chunks], event.number)
        return {
            "prompt": prompt,
            "chunks": chunks,
            "tenant": event.tenant,
            "max_tokens": MAX_TOKENS,
            **options,
        }

    def _chunk(self, version: Version) -> Chunk:
        return Chunk(self.texts.document(version), _name(version), str(version.number))

    def _count(self, out: Completion) -> None:
        chunks = out.report.chunks
        self._counts["chunks"] += len(chunks)
        self._counts["chunk_hits"] += sum(chunk.decision is not ChunkDecision.COMPUTED for chunk in chunks)
        self._counts["prompt_tokens"] += out.report.num_prompt_tokens
        self._counts["reused_tokens"] += out.report.num_reused_tokens

    def _sample(self) -> None:
        held, workers = HeldBytes.read(), self.ask_workers()
        sample = Sample(
            num_questions=self._num_asked,
            time_s=time.monotonic() - self._started_s,
            driver_bytes=held.driver_bytes,
            engine_bytes=held.engine_bytes,
            stored_bytes=workers.stored_bytes,
            free_bytes=workers.free_bytes,
            num_records=self.engine.stats()["num_records"],
            **{f"num_{name}": self._counts.pop(name, 0) for name in _SUMMED},
        )
        self._samples.append(sample)
        self.show(sample)


_SUMMED = ("chunks", "chunk_hits", "prompt_tokens", "reused_tokens", "faults")


def _take(events: Iterator[Event], num_questions: int) -> Iterator[Event]:
    """Events up to the last of so many questions."""
    while num_questions and (event := next(events, None)) is not None:
        num_questions -= event.action is Action.ASK
        yield event


def _name(version: Version) -> str:
    return f"document-{version.document}"
