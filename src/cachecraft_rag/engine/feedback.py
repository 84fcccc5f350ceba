"""Feedback: a share of the reused requests is asked again while the engine is idle, and what is found
moves the budget, trips the breaker, or has a chunk cached anew. See docs/feedback.md."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cachecraft_rag.chunks import ChunkKey
from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.engine.api import Completion
from cachecraft_rag.engine.breaker import Breaker, BudgetController, ChunkState, ChunkWard
from cachecraft_rag.engine.calls import Prepared
from cachecraft_rag.engine.diagnosis import Verdict, examine
from cachecraft_rag.engine.idle import IdleWork
from cachecraft_rag.engine.options import CallOptions
from cachecraft_rag.engine.shadow import Ask, Control, Sample, Shadow, reused_chunks
from cachecraft_rag.events import ChunkDecision, Reason, RequestDecision
from cachecraft_rag.vllm_connector.messages import RequestSpec

logger = logging.getLogger(__name__)

MAX_WAITING_SAMPLES = 64


class Feedback:
    """Samples, their work in the engine's idle time (an `IdleJob`), and what they led to.

    `steer` and `stats` may be called from any thread; all else belongs to the engine's loop.
    """

    def __init__(
        self,
        config: CacheCraftConfig,
        ask: Ask,
        control: Control,
        forget_prefixes: Callable[[str], None],
        idle: IdleWork,
    ) -> None:
        self.breaker = Breaker(config.quality_threshold)
        self.controller = BudgetController(config.quality_target)
        self.ward = ChunkWard()
        self._share = config.feedback_share
        self._max_kl = config.max_first_token_kl
        self._shadow = Shadow(ask, control)
        self._forget_prefixes = forget_prefixes
        self._idle = idle
        idle.add(self)
        self._waiting: deque[Sample] = deque()
        self._counters: Counter[str] = Counter()
        self._work_s = 0.0
        self._drops: set[asyncio.Task[None]] = set()

    # --- what it does to requests -------------------------------------------------------------

    def steer(self, spec: RequestSpec, options: CallOptions) -> RequestSpec:
        """Apply what was learnt to a request of reuse mode "auto"; all others are obeyed."""
        if options.reuse != "auto" or spec.full_reason is not None:
            return spec
        if self.breaker.is_open:
            return replace(spec, full_reason=Reason.QUALITY_BREAKER)
        spec = self._refuse_quarantined(spec)
        return spec if options.recompute_ratio is not None else _scaled(spec, self.controller.scale)

    def _refuse_quarantined(self, spec: RequestSpec) -> RequestSpec:
        barred = frozenset(self.ward.keys_in(ChunkState.QUARANTINED))
        if barred.isdisjoint(ref.key for ref in spec.chunks):
            return spec
        refused = (replace(r, refusal=Reason.QUARANTINED) if r.key in barred else r for r in spec.chunks)
        return replace(spec, chunks=tuple(refused))

    # --- what it sees of requests -------------------------------------------------------------

    def offer(self, prepared: Prepared, completion: Completion) -> None:
        """Take note of an answered request, and queue it as a sample where it is due."""
        self.note_restored(completion)
        if not self._share or not self._is_eligible(prepared, completion):
            return
        keys = reused_chunks(completion).values()
        is_due = self._is_due()
        if is_due or self.breaker.is_open or self.ward.needs_sample(keys):
            self._queue(Sample(prepared))

    def note_restored(self, completion: Completion) -> None:
        """Take note of what an answer computed and stored anew, of chunks in quarantine."""
        for chunk in completion.report.chunks:
            is_stored = 0 < chunk.num_tokens <= completion.report.num_stored_tokens
            if chunk.decision is ChunkDecision.COMPUTED and is_stored:
                self.ward.restored(chunk.chunk_key)

    @staticmethod
    def _is_eligible(prepared: Prepared, completion: Completion) -> bool:
        options, report = prepared.call.options, completion.report
        # What `store=False` asks for is to leave nothing behind, in this queue neither.
        if options.reuse != "auto" or not options.store or completion.finish_reason == "abort":
            return False
        # A bound answer begins as its form wants, and agrees in its form, whatever the KV is worth.
        if prepared.request.sampling.structured is not None:
            return False
        if report.reason is Reason.QUALITY_BREAKER:
            return bool(prepared.spec.chunks)
        return report.decision is RequestDecision.REUSE and bool(reused_chunks(completion))

    def _is_due(self) -> bool:
        """By counting, so that the same traffic has the same samples: one in 1/share requests."""
        before = self._counters["num_eligible"]
        self._counters["num_eligible"] += 1
        return int((before + 1) * self._share) > int(before * self._share)

    def _queue(self, sample: Sample) -> None:
        self._counters["num_sampled"] += 1
        self._waiting.append(sample)
        if len(self._waiting) > MAX_WAITING_SAMPLES:
            # The oldest but one: the first may have been begun.
            del self._waiting[1]
            self._counters["num_dropped"] += 1

    # --- work ---------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    async def drain(self) -> None:
        """Work off all waiting samples now, or as soon as no request runs."""
        await self._idle.drain(self)
        if self._drops:
            await asyncio.wait(self._drops)

    async def stop(self) -> None:
        """Give up what waits; the engine is about to close, and its idle work has ended."""
        self._waiting.clear()
        await asyncio.gather(*self._drops, return_exceptions=True)

    async def do_piece(self) -> None:
        """Examine one sample."""
        sample = self._waiting[0]
        started_s = time.monotonic()
        try:
            self._learn(sample, await examine(self._shadow, sample, self._max_kl))
        except Exception as error:
            # Feedback must not end with one sample, and its faults are no user's.
            self._counters["num_failed"] += 1
            logger.warning("a feedback sample failed: %r", error)
        finally:
            self._work_s += time.monotonic() - started_s
        self._waiting.popleft()  # not where it was interrupted: then it is taken up again

    def _learn(self, sample: Sample, verdict: Verdict) -> None:
        self._counters["num_examined"] += 1
        self._counters["num_agreeing"] += verdict.agrees
        self._counters["num_diagnosed"] += verdict.first_token_kl > self._max_kl
        self._counters["num_blames"] += verdict.blamed is not None
        self.controller.add(verdict.quality)
        self.breaker.add(verdict.quality)
        if self.ward.add(verdict.keys, verdict.blamed) and verdict.blamed is not None:
            # A task of its own: traffic that interrupts the work must not keep the records in use.
            owner = _owner_of(sample.prepared.spec, verdict.blamed)
            drop = asyncio.create_task(self._drop(owner, verdict.blamed))
            self._drops.add(drop)
            drop.add_done_callback(self._end_drop)

    async def _drop(self, tenant: str, key: ChunkKey) -> None:
        await self._shadow.drop(tenant, [key])
        # Reused behind its own prefix the chunk counted as exact, so vLLM's prefix cache has it too.
        self._forget_prefixes(tenant)

    def _end_drop(self, drop: asyncio.Task[None]) -> None:
        self._drops.discard(drop)
        if not drop.cancelled() and (error := drop.exception()) is not None:
            logger.warning("a quarantined chunk's records were not dropped: %r", error)

    # --- figures ------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counts, the state of budget, breaker and chunks, and the seconds spent."""
        names = ("eligible", "sampled", "examined", "agreeing", "diagnosed", "blames", "dropped", "failed")
        return {
            **{f"num_{name}": self._counters[f"num_{name}"] for name in names},
            "num_waiting": len(self._waiting),
            "mean_quality": self.controller.measured,
            "scale": self.controller.scale,
            "breaker": "open" if self.breaker.is_open else "closed",
            "num_breaker_openings": self.breaker.num_openings,
            "suspects": list(self.ward.keys_in(ChunkState.SUSPECT)),
            "quarantined": list(self.ward.keys_in(ChunkState.QUARANTINED)),
            "on_probation": list(self.ward.keys_in(ChunkState.PROBATION)),
            "num_quarantines": self.ward.num_quarantines,
            "num_releases": self.ward.num_releases,
            "work_s": self._work_s,
        }


def _owner_of(spec: RequestSpec, key: ChunkKey) -> str:
    """The tenant that a chunk of the request is stored for."""
    return next((spec.tenant_of(ref) for ref in spec.chunks if ref.key == key), spec.tenant)


def _scaled(spec: RequestSpec, scale: float) -> RequestSpec:
    ratio = spec.recompute_ratio
    return replace(
        spec,
        alpha=spec.alpha * scale,
        share=min(1.0, spec.share * scale),
        recompute_ratio=None if ratio is None else min(1.0, ratio * scale),
    )
