"""The work of one load job: loads cut to the step's allowance, and the passes that it asks for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.chunks import Span
from cachecraft_rag.planner.live import Candidate, LiveMethod, LiveSelection
from cachecraft_rag.planner.plan import Load
from cachecraft_rag.planner.selection import positions_of
from cachecraft_rag.vllm_connector import compat
from cachecraft_rag.vllm_connector.capture import Sink
from cachecraft_rag.vllm_connector.compat import KVLayer
from cachecraft_rag.vllm_connector.load_jobs import (
    LOADED_PER_COMPUTED,
    Allowance,
    JobRunner,
    take_loads,
)
from cachecraft_rag.vllm_connector.passes import PassPart, WantedPass
from cachecraft_rag.vllm_connector.rotary import RotaryTable
from cachecraft_rag.vllm_connector.steps import JobFacts, LoadJob

BLOCK = 16
LOADS = (Load(1, Span(4, 84)), Load(2, Span(90, 150), 10))
NUM_TOKENS = 170
NUM_LAYERS = 2


class Machine:
    """A runner without a model: what is written into its paged cache, by layer and slot."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.written: list[dict[int, float]] = [{} for _ in range(NUM_LAYERS)]
        self.passes: list[dict[str, Any]] = []
        random = torch.Generator().manual_seed(1)
        self.records = {
            name: Sink(torch.randn(NUM_LAYERS, 2, 80, 1, 8, generator=random), {}, np.ones(80, dtype=bool))
            for name in (1, 2)
        }
        layers = tuple(map(self._layer, range(NUM_LAYERS)))
        runner = SimpleNamespace(device=torch.device("cpu"))
        self.runner = JobRunner(runner, layers, frozenset({1}), self.records, {}, BLOCK, 1)
        # vLLM's kernel is not at issue here, nor is its model.
        monkeypatch.setattr(compat, "rotate_keys", lambda table, keys, turn: keys)
        monkeypatch.setattr(compat, "run_recompute_pass", self._run_pass)

    def _layer(self, index: int) -> KVLayer:
        def write(
            layer: Any, key: torch.Tensor, value: torch.Tensor, cache: Any, slots: torch.Tensor
        ) -> None:
            self.written[index].update(zip(slots.tolist(), key[:, 0, 0].tolist(), strict=True))

        attention = SimpleNamespace(impl=SimpleNamespace(do_kv_cache_update=write), kv_cache=None)
        table = RotaryTable(torch.ones(NUM_TOKENS, 8), True)
        return KVLayer(f"layer.{index}", attention, table, 1, 1, 8, 1.0, None, 0.0)

    def _run_pass(self, runner: Any, runs: Any, token_ids: Any, block_table: Any, slots: Any) -> None:
        under_way = self.runner.under_way
        assert under_way is not None
        rows = torch.arange(len(slots), dtype=torch.float32).view(-1, 1, 1)
        under_way.on_update(1, rows, rows)
        self.passes.append(
            {
                "runs": list(runs),
                "token_ids": token_ids.tolist(),
                "table": block_table.tolist(),
                "slots": slots.tolist(),
                "final": under_way.final_slots.tolist(),
            }
        )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def make_job(first_block: int = 100, method: LiveMethod | None = None, name: str = "r") -> LoadJob:
    spans = tuple(load.span for load in LOADS)
    live = method and LiveSelection(method, 40, 1, tuple(Candidate(span, None) for span in spans))
    return LoadJob(
        name,
        f"vllm-{name}",
        0,
        np.arange(1000, 1000 + NUM_TOKENS, dtype=np.int32),
        np.arange(first_block, first_block + -(-NUM_TOKENS // BLOCK), dtype=np.int32),
        LOADS,
        (Span(0, 4), Span(84, 90)),
        probe=Span(150, 158) if live else Span(150, 150),
        end=157 if live else 150,
        live=live,
    )


def run_to_pass(work: Any, allowance: Allowance, per_step: float) -> tuple[WantedPass, int]:
    """The first pass that it wants, and the steps until then."""
    for step in range(1000):
        allowance.left = per_step
        if (wanted := next(work)) is not None:
            return wanted, step + 1
    raise AssertionError("the job never wants a pass")


@given(num_tokens=st.integers(0, 200))
def test_loads_are_cut_anywhere(num_tokens: int) -> None:
    """What is taken and what is left are all tokens once, each with its row of the record."""
    taken, left = take_loads(LOADS, num_tokens)
    assert sum(len(load.span) for load in taken) == min(num_tokens, 140)
    rows = [
        (load.record_id, load.record_offset + i, load.span.start + i)
        for load in (*taken, *left)
        for i in range(len(load.span))
    ]
    assert rows == [(1, i, 4 + i) for i in range(80)] + [(2, 10 + i, 90 + i) for i in range(60)]


@pytest.mark.parametrize("per_step", [0.5, 1.0, 64.0])
def test_a_step_loads_what_it_may(machine: Machine, per_step: float) -> None:
    """32 tokens for one that is computed; in the end each slot has its row, on every layer."""
    allowance = Allowance()
    work = machine.runner.work(make_job(), allowance)
    wanted, num_steps = run_to_pass(work, allowance, per_step)
    assert num_steps >= 140 / (per_step * LOADED_PER_COMPUTED)
    assert wanted.runs == (Span(0, 4), Span(84, 90))
    for index, written in enumerate(machine.written):
        expected = {100 * BLOCK + 4 + i: machine.records[1].kv[index, 0, i, 0, 0].item() for i in range(80)}
        expected |= {
            100 * BLOCK + 90 + i: machine.records[2].kv[index, 0, 10 + i, 0, 0].item() for i in range(60)
        }
        assert written == expected


def test_record_that_is_freed_while_it_is_loaded_is_loaded_whole(machine: Machine) -> None:
    """Its document may be purged between two steps of the load."""
    allowance = Allowance(0.5)
    work = machine.runner.work(make_job(), allowance)
    assert next(work) is None
    machine.records.clear()
    run_to_pass(work, allowance, 0.5)
    assert len(machine.written[0]) == 140


def test_record_that_is_gone_is_computed(machine: Machine) -> None:
    """Its tokens join the first pass, and the facts say so."""
    del machine.records[2]
    work = machine.runner.work(make_job(), Allowance(64.0))
    wanted = next(work)
    assert wanted is not None and wanted.runs == (Span(0, 4), Span(84, 150))
    with pytest.raises(StopIteration) as ended:
        next(work)
    facts: JobFacts = ended.value.value
    assert (facts.failed_records, facts.num_tokens_repaired) == ((2,), 60)


def test_question_is_computed_again_with_the_tokens_it_chose(machine: Machine) -> None:
    """What it was asked with is provisional; its promised part is final in the second pass."""
    work = machine.runner.work(make_job(method=LiveMethod.QUESTION), Allowance(64.0))
    first = next(work)
    assert first is not None and first.provisional == Span(150, 158)
    assert first.runs == (Span(0, 4), Span(84, 90), Span(150, 158))
    second = next(work)
    assert second is not None and second.provisional == Span(0, 0)
    assert second.runs[-1] == Span(150, 157) or second.runs[-1].end == 157
    assert sum(map(len, second.runs)) == 40 - 8 + 7


def test_pass_of_several_jobs_keeps_them_apart(machine: Machine) -> None:
    """Each run has its own job's blocks, tokens and slots; watchers see their own rows; what is computed
    once more is not to be captured."""
    first = next(machine.runner.work(make_job(100, LiveMethod.QUESTION, "a"), Allowance(64.0)))
    second = next(machine.runner.work(make_job(200, name="b"), Allowance(64.0)))
    assert first is not None and second is not None and first.watch is not None
    machine.runner.run_pass(
        [
            PassPart(make_job(200, name="b"), second.runs, second),
            PassPart(make_job(100, LiveMethod.QUESTION, "a"), first.runs, first),
        ]
    )
    (ran,) = machine.passes
    positions = positions_of([*second.runs, *first.runs])
    assert ran["token_ids"] == (1000 + positions).tolist()
    assert [row[0] for row in ran["table"]] == [200, 200, 100, 100, 100]
    base = [200 * BLOCK] * 10 + [100 * BLOCK] * 18
    assert ran["slots"] == (positions + base).tolist()
    assert ran["final"] == ran["slots"][:20] + [-1] * 8
    assert torch.cat(first.watch.keys[1]).flatten().tolist() == list(range(10, 28))
