"""Load jobs under way in the worker: every step does a bounded piece of their work.

    add ──► load ──► pass of the question ──► choice ──► pass of the chosen tokens ──► answered
              └────── as far as the step's allowance goes, in order of arrival ──────┘

Jobs of one step share its passes. What is done in a step follows from the orders alone, never from a
clock, so that all ranks do the same in the same order.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from cachecraft_rag.chunks import Span
from cachecraft_rag.vllm_connector.compat import PassLimits
from cachecraft_rag.vllm_connector.load_jobs import Allowance, Work
from cachecraft_rag.vllm_connector.passes import PassPart, WantedPass
from cachecraft_rag.vllm_connector.recompute import take_runs
from cachecraft_rag.vllm_connector.steps import CaptureTarget, JobFacts, LoadJob

logger = logging.getLogger(__name__)

RUN_PRICE = 0.25
"""What a run costs beyond its tokens, in tokens: each run reads all keys before it for itself. Measured on
this CPU at 5,000 tokens of context, a step of single tokens took up to a fourth longer than vLLM's own
prefill of as many at the prompt's end."""

StartWork = Callable[[LoadJob, Allowance], Work]
RunPass = Callable[[Sequence[PassPart]], None]


@dataclass(slots=True, eq=False)
class RunningJob:
    """A job and how far it is.

    Attributes:
        wanted: the pass it waits for, of which `left` is still to be computed.
        has_loaded: its loads are done: the first pass was asked for.
    """

    job: LoadJob
    work: Work
    wanted: WantedPass | None = None
    left: tuple[Span, ...] = ()
    has_loaded: bool = False
    load_s: float = 0.0
    select_s: float = 0.0
    recompute_s: float = 0.0


class JobQueue:
    """Used from the worker's own thread only.

    Args:
        start: begins the work of a job.
        run_pass: computes parts of several jobs in one forward.
        limits: of one forward.
        num_layers: of the model: a pass that ends early costs its share of them.
    """

    def __init__(self, start: StartWork, run_pass: RunPass, limits: PassLimits, num_layers: int) -> None:
        self._start = start
        self._run_pass = run_pass
        self._limits = limits
        self._num_layers = num_layers
        self._allowance = Allowance()
        self._jobs: dict[str, RunningJob] = {}
        self._facts: dict[str, JobFacts] = {}
        self._answered: set[str] = set()
        self._failed: set[str] = set()

    def add(self, job: LoadJob) -> None:
        self._jobs[job.engine_request_id] = RunningJob(job, self._start(job, self._allowance))

    def drop(self, engine_request_id: str) -> None:
        """The request was given up: nothing is written into its blocks any more.

        A job that was answered is not here, and is not answered again: vLLM may have given its blocks
        to another request.
        """
        if self._jobs.pop(engine_request_id, None) is not None:
            self._answered.add(engine_request_id)

    def fail(self, engine_request_id: str) -> None:
        """Answer that a promise was not kept: vLLM ends the request, and the driver answers it again with
        reuse off."""
        self._jobs.pop(engine_request_id, None)
        self._answered.add(engine_request_id)
        self._failed.add(engine_request_id)

    def captures(self) -> Iterator[CaptureTarget]:
        """What is to be copied of the tokens that jobs under way compute."""
        for running in self._jobs.values():
            yield from running.job.captures

    def run(self, num_tokens: int) -> None:
        """Do work worth `num_tokens` computed tokens, or all there is."""
        self._allowance.left = float(num_tokens)
        while parts := self._next_pass():
            self._compute(parts)

    def take_answered(self) -> tuple[set[str], set[str]]:
        """vLLM's names of requests whose jobs ended since the last call, and those among them that failed."""
        answered, failed = self._answered, self._failed
        self._answered, self._failed = set(), set()
        return answered, failed

    def take_facts(self) -> dict[str, JobFacts]:
        """What was done, by our own request id, for each job that ended well since the last call."""
        facts, self._facts = self._facts, {}
        return facts

    # --- one pass -----------------------------------------------------------------------------

    def _next_pass(self) -> list[PassPart]:
        """Parts of one forward: what the first job that wants a pass wants, and others' like it."""
        parts: list[PassPart] = []
        num_tokens = num_runs = 0
        for running in list(self._jobs.values()):
            self._advance(running)
            if not running.left or running.wanted is None:
                continue
            if parts and _depth(parts[0].wanted) != _depth(running.wanted):
                continue
            price = self._price(running.wanted)
            room = min(self._limits.max_tokens - num_tokens, math.ceil(self._allowance.left / price))
            spans, running.left = take_runs(running.left, room, self._limits.max_sequences - num_runs)
            if not spans:
                continue  # and not break: a job behind this one may have ended with the last pass
            parts.append(PassPart(running.job, spans, running.wanted))
            num_tokens += sum(map(len, spans))
            num_runs += len(spans)
            self._allowance.left -= price * sum(map(len, spans))
        return parts

    def _price(self, wanted: WantedPass) -> float:
        """Of one token, in tokens of a contiguous pass through all layers."""
        depth = _depth(wanted)
        share = 1.0 if depth is None else depth / self._num_layers
        return share * (1.0 + RUN_PRICE * len(wanted.runs) / sum(map(len, wanted.runs)))

    def _compute(self, parts: Sequence[PassPart]) -> None:
        began = time.perf_counter()
        try:
            self._run_pass(parts)
        except Exception:
            # Whose tokens were at fault is not known.
            logger.exception("a recompute pass failed")
            for part in parts:
                self.fail(part.job.engine_request_id)
            return
        per_token_s = (time.perf_counter() - began) / sum(len(s) for part in parts for s in part.spans)
        for part in parts:
            running = self._jobs[part.job.engine_request_id]
            share_s = per_token_s * sum(map(len, part.spans))
            if part.wanted.watch is None:
                running.recompute_s += share_s
            else:
                running.select_s += share_s

    # --- one job ------------------------------------------------------------------------------

    def _advance(self, running: RunningJob) -> None:
        """Let the job go on until it wants a pass, waits for the next step, or has ended."""
        if running.left:
            return
        began = time.perf_counter()
        try:
            running.wanted = next(running.work)
        except StopIteration as ended:
            self._end(running, ended.value)
            return
        except Exception:
            logger.exception("load job of request %s failed", running.job.request_id)
            self.fail(running.job.engine_request_id)
            return
        finally:
            spent_s = time.perf_counter() - began
            if running.has_loaded:
                running.select_s += spent_s
            else:
                running.load_s += spent_s
        if running.wanted is not None:
            running.left, running.has_loaded = running.wanted.runs, True

    def _end(self, running: RunningJob, facts: JobFacts) -> None:
        del self._jobs[running.job.engine_request_id]
        self._answered.add(running.job.engine_request_id)
        self._facts[running.job.request_id] = replace(
            facts, load_s=running.load_s, select_s=running.select_s, recompute_s=running.recompute_s
        )


def _depth(wanted: WantedPass) -> int | None:
    """Layers that the pass runs through, None for all of them."""
    return wanted.watch.stop_before if wanted.watch is not None else None
