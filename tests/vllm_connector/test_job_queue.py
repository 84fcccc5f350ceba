"""Load jobs in pieces: what a step does of them, in which order, and what becomes of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.chunks import Span
from cachecraft_rag.planner.selection import positions_of
from cachecraft_rag.vllm_connector.compat import PassLimits
from cachecraft_rag.vllm_connector.job_queue import JobQueue
from cachecraft_rag.vllm_connector.load_jobs import Allowance, Work
from cachecraft_rag.vllm_connector.passes import PassPart, PassWatch, WantedPass
from cachecraft_rag.vllm_connector.steps import CaptureTarget, JobFacts, LoadJob

NUM_LAYERS = 8
LIMITS = PassLimits(max_tokens=64, max_sequences=16)
EARLY = PassWatch(frozenset({1}), stop_before=2)


def make_job(name: str) -> LoadJob:
    empty = np.zeros(0, dtype=np.int32)
    return LoadJob(name, f"vllm-{name}", 0, empty, empty, (), (), Span(0, 0), 0)


@dataclass
class Passes:
    """A queue of jobs that want the given passes, and what was computed, pass by pass."""

    wanted: dict[str, list[WantedPass]] = field(default_factory=dict)
    num_loads: dict[str, int] = field(default_factory=dict)
    limits: PassLimits = LIMITS
    run: list[dict[str, list[int]]] = field(default_factory=list)
    at_fault: str = ""

    def __post_init__(self) -> None:
        self.queue = JobQueue(self.start, self.compute, self.limits, NUM_LAYERS)

    def add(self, name: str, *wanted: WantedPass, num_loads: int = 0) -> None:
        self.wanted[name], self.num_loads[name] = list(wanted), num_loads
        self.queue.add(make_job(name))

    def start(self, job: LoadJob, allowance: Allowance) -> Work:
        """Loads cost one token each."""
        for _ in range(self.num_loads[job.request_id]):
            while allowance.left <= 0:
                yield None
            allowance.left -= 1
        yield from self.wanted[job.request_id]
        return JobFacts(0.0, 0.0, 0)

    def compute(self, parts: Sequence[PassPart]) -> None:
        if any(part.job.request_id == self.at_fault for part in parts):
            raise RuntimeError("out of memory")
        self.run.append({part.job.request_id: positions_of(part.spans).tolist() for part in parts})

    def step(self, num_tokens: int) -> int:
        """Tokens computed in it."""
        first = len(self.run)
        self.queue.run(num_tokens)
        return sum(len(positions) for each in self.run[first:] for positions in each.values())

    def computed(self, name: str) -> list[int]:
        return [position for each in self.run for position in each.get(name, ())]


def whole(*runs: Span) -> WantedPass:
    return WantedPass(runs)


@given(
    lengths=st.lists(st.lists(st.integers(1, 90), min_size=1, max_size=3), min_size=1, max_size=4),
    allowances=st.lists(st.integers(1, 100), min_size=1, max_size=4),
    limits=st.builds(PassLimits, st.integers(1, 80), st.integers(1, 5)),
)
def test_every_job_gets_its_passes_in_order_within_the_allowance(
    lengths: list[list[int]], allowances: list[int], limits: PassLimits
) -> None:
    """However steps and forwards cut them; no step computes more than it may, and none is idle."""
    passes = Passes(limits=limits)
    for index, of_job in enumerate(lengths):
        runs = [[Span(3 * i, 3 * i + 2) for i in range(length)] for length in of_job]
        passes.add(f"r{index}", *(whole(*each) for each in runs))
    names = {f"vllm-r{index}" for index in range(len(lengths))}
    ended: set[str] = set()
    while ended != names:
        allowance = allowances[len(passes.run) % len(allowances)]
        computed = passes.step(allowance)
        answered, failed = passes.queue.take_answered()
        assert computed <= allowance
        assert computed >= 0.8 * allowance - 1 or ended | answered == names
        assert not failed and not answered & ended
        ended |= answered
    for index, of_job in enumerate(lengths):
        wanted = [[p for i in range(length) for p in (3 * i, 3 * i + 1)] for length in of_job]
        assert passes.computed(f"r{index}") == [position for each in wanted for position in each]
    assert set(passes.queue.take_facts()) == {f"r{index}" for index in range(len(lengths))}


def test_jobs_of_one_step_share_its_passes() -> None:
    """Both questions are asked in one forward, and both choices computed in another."""
    passes = Passes()
    for name in "ab":
        passes.add(name, whole(Span(0, 4)), whole(Span(9, 12), Span(20, 22)))
    assert passes.step(64) == 18
    assert [sorted(each) for each in passes.run] == [["a", "b"], ["a", "b"]]


def test_who_came_first_goes_first() -> None:
    """What the first job leaves of a step is for the next."""
    passes = Passes()
    for name in "abc":
        passes.add(name, whole(Span(0, 6)))
    passes.step(8)
    assert passes.run == [{"a": [0, 1, 2, 3, 4, 5], "b": [0, 1]}]
    assert passes.queue.take_answered()[0] == {"vllm-a"}


def test_loads_take_their_part_of_the_step() -> None:
    """A job that still loads waits for the next step; one behind it does not pass it by."""
    passes = Passes()
    passes.add("a", whole(Span(0, 2)), num_loads=7)
    passes.add("b", whole(Span(0, 2)))
    assert passes.step(5) == 0
    assert passes.step(5) == 3
    assert passes.run == [{"a": [0, 1], "b": [0]}]


def test_dropped_job_is_answered_once_and_computes_nothing_more() -> None:
    """Its blocks belong to others from the answer on."""
    passes = Passes()
    passes.add("a", whole(Span(0, 9)))
    passes.step(4)
    passes.queue.drop("vllm-a")
    assert passes.step(64) == 0
    assert passes.queue.take_answered() == ({"vllm-a"}, set())
    passes.queue.drop("vllm-a")
    assert passes.queue.take_answered() == (set(), set())
    assert passes.queue.take_facts() == {}


def test_failed_pass_fails_the_jobs_in_it_only() -> None:
    """They are answered as failed, without facts; a job behind them goes on."""
    passes = Passes(at_fault="b", limits=PassLimits(8, 16))
    for name in "abc":
        passes.add(name, whole(Span(0, 4)))
    passes.step(64)
    assert passes.queue.take_answered() == ({"vllm-a", "vllm-b", "vllm-c"}, {"vllm-a", "vllm-b"})
    assert set(passes.queue.take_facts()) == {"c"}


def test_job_that_raises_is_answered_as_failed() -> None:
    """A request must not wait for an answer that never comes."""
    passes = Passes()
    passes.queue.add(make_job("unknown"))
    passes.step(64)
    assert passes.queue.take_answered() == ({"vllm-unknown"}, {"vllm-unknown"})


def test_pass_that_ends_early_is_on_its_own_and_costs_its_layers() -> None:
    """2 of 8 layers: four tokens for the price of one."""
    passes = Passes()
    passes.add("a", WantedPass((Span(0, 16),), EARLY), whole(Span(0, 2)))
    passes.add("b", whole(Span(0, 2)))
    passes.add("c", WantedPass((Span(0, 8),), EARLY))
    passes.step(10)
    assert [sorted(each) for each in passes.run] == [["a", "c"], ["a", "b"]]
    assert [sum(map(len, each.values())) for each in passes.run] == [24, 4]


def test_scattered_tokens_cost_more_than_a_run() -> None:
    """Each reads all keys before it for itself."""
    scattered, run = Passes(), Passes()
    scattered.add("a", whole(*(Span(2 * i, 2 * i + 1) for i in range(50))))
    run.add("a", whole(Span(0, 50)))
    assert scattered.step(40) == 32
    assert run.step(40) == 40


def test_time_of_a_shared_pass_is_divided_by_tokens() -> None:
    """And it is the time of choosing where the job watches."""
    passes = Passes()
    passes.add("a", whole(Span(0, 6)))
    passes.add("b", whole(Span(0, 2)))
    passes.add("c", WantedPass((Span(0, 4),), PassWatch(frozenset({3}))))
    passes.step(64)
    facts = passes.queue.take_facts()
    assert facts["a"].recompute_s == pytest.approx(3 * facts["b"].recompute_s)
    assert facts["b"].recompute_s > 0
    assert facts["c"].recompute_s == 0
    assert facts["c"].select_s >= 2 * facts["b"].recompute_s


def test_captures_are_wanted_as_long_as_their_job_runs() -> None:
    """In every step of it, and in none after."""
    passes = Passes(wanted={"a": [whole(Span(0, 8))]}, num_loads={"a": 0})
    target = CaptureTarget(1, 0, np.arange(8), 8)
    passes.queue.add(replace(make_job("a"), captures=(target,)))
    passes.step(4)
    assert list(passes.queue.captures()) == [target]
    passes.step(4)
    assert list(passes.queue.captures()) == []
