"""One engine: continuous batching with chunked prefill, first come first served."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from benchmarks.cluster_sim.assumptions import Assumptions
from benchmarks.cluster_sim.ways import Caches, Job
from benchmarks.cluster_sim.workload import SimRequest


@dataclass(frozen=True, slots=True)
class Outcome:
    """Times count from the request's arrival."""

    request: SimRequest
    job: Job
    engine: int
    ttft_s: float
    end_s: float


@dataclass(slots=True, eq=False)
class _Prefill:
    request: SimRequest
    job: Job
    num_left: int


@dataclass(order=True, slots=True)
class _Decode:
    """Every running request gets one token a step, so it is known in which step each one ends."""

    last_step: int
    order: int
    request: SimRequest = field(compare=False)
    job: Job = field(compare=False)
    ttft_s: float = field(compare=False)


@dataclass(slots=True, eq=False)
class Engine:
    """`begin_step` and `end_step` in turn; between them the engine is busy."""

    number: int
    assumed: Assumptions
    caches: Caches
    is_busy: bool = False
    _waiting: deque[SimRequest] = field(default_factory=deque)
    _prefills: deque[_Prefill] = field(default_factory=deque)
    _finishing: list[_Prefill] = field(default_factory=list)
    _decodes: list[_Decode] = field(default_factory=list)
    _step: int = 0
    _num_started: int = 0
    _context_tokens: int = 0
    _reserved_tokens: int = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._prefills or self._decodes)

    def submit(self, request: SimRequest) -> None:
        self._waiting.append(request)

    def begin_step(self) -> float:
        """Schedule one step; how long it takes, in seconds."""
        assumed = self.assumed
        room = max(1, assumed.max_batched_tokens - len(self._decodes))
        work, load_s = float(len(self._decodes)), 0.0
        while room:
            prefill = next((each for each in self._prefills if each.num_left), None)
            if prefill is None:
                prefill = self._admit()
                if prefill is None:
                    break
                load_s += prefill.job.load_s
            taken = min(room, prefill.num_left)
            prefill.num_left -= taken
            room -= taken
            work += prefill.job.work * taken / prefill.job.num_computed
        self._finishing = [each for each in self._prefills if not each.num_left]
        self.is_busy = True
        compute_s = max(assumed.weights_s, work / assumed.prefill_tokens_per_s)
        context_s = self._context_tokens / assumed.context_tokens_per_s
        return assumed.step_overhead_s + compute_s + context_s + load_s

    def end_step(self, now_s: float) -> list[Outcome]:
        """What ended with the step; what it computed is in the caches from now on."""
        self.is_busy = False
        self._step += 1
        for prefill in self._finishing:
            self._prefills.remove(prefill)
            self._start_decoding(prefill, now_s)
        self._finishing = []
        ended = []
        while self._decodes and self._decodes[0].last_step <= self._step:
            done = heapq.heappop(self._decodes)
            self._context_tokens -= done.job.num_tokens
            self._reserved_tokens -= _size(done.request)
            ended.append(
                Outcome(done.request, done.job, self.number, done.ttft_s, now_s - done.request.time_s)
            )
        return ended

    def _admit(self) -> _Prefill | None:
        """The next waiting request, if there is room for its KV."""
        if not self._waiting or len(self._prefills) + len(self._decodes) >= self.assumed.max_sequences:
            return None
        size = _size(self._waiting[0])
        if self._reserved_tokens and self._reserved_tokens + size > self.assumed.device_tokens:
            return None
        request = self._waiting.popleft()
        self._reserved_tokens += size
        self.caches.prefix.cache.fit(max(0, self.assumed.device_tokens - self._reserved_tokens))
        job = self.caches.plan(request)
        self._prefills.append(_Prefill(request, job, job.num_computed))
        return self._prefills[-1]

    def _start_decoding(self, prefill: _Prefill, now_s: float) -> None:
        """The step that ends a prefill gives the first token."""
        request = prefill.request
        self.caches.fill(request, prefill.job)
        last_step = self._step + request.num_output_tokens - 1
        ttft_s = now_s - request.time_s
        self._num_started += 1
        heapq.heappush(self._decodes, _Decode(last_step, self._num_started, request, prefill.job, ttft_s))
        self._context_tokens += prefill.job.num_tokens


def _size(request: SimRequest) -> int:
    return request.num_tokens + request.num_output_tokens
