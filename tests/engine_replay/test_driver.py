"""The driver over an engine without a model, and the whole benchmark over the real one (-m slow)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
from benchmarks.engine_replay import arguments, run
from benchmarks.engine_replay_parts import run as run_module
from benchmarks.engine_replay_parts.driver import serve, warm
from benchmarks.engine_replay_parts.figures import makespan_s
from benchmarks.engine_replay_parts.memory import PeakMemory
from benchmarks.engine_replay_parts.record import LOADS, MODERATE, SATURATED, read
from benchmarks.engine_replay_parts.run import Settings, run_ways
from benchmarks.engine_replay_parts.texts import DATA
from benchmarks.engine_replay_parts.ways import WAYS, chosen_ways
from benchmarks.engine_replay_parts.workload import Passage, ReplayRequest, Workload
from rich.console import Console

from cachecraft_rag import CacheCraftConfig
from cachecraft_rag.testing import FakeEngine

PASSAGES = [Passage(f"p{index}", f"passage number {index} of the base", 6, rank=-index) for index in range(5)]
REQUESTS = [
    ReplayRequest("Answer.", tuple(PASSAGES[index : index + 3]), f"question {index}?", 22, 8, ignore_eos=True)
    for index in range(3)
]


async def test_every_request_is_answered_in_the_order_of_the_requests() -> None:
    engine = FakeEngine()
    served = await serve(engine, REQUESTS, [0.02, 0.01, 0.0], WAYS["ours"])
    assert [one.arrival_s for one in served] == [0.02, 0.01, 0.0]
    # Each is sent at its own time, so the last of them comes first.
    asked = [call.messages[-1]["content"].rsplit("\n", 1)[-1] for call in engine.calls]
    assert asked == ["question 2?", "question 1?", "question 0?"]
    assert all(0 <= one.ttft_s <= one.latency_s for one in served)
    assert all(one.num_prompt > 0 and sum(one.tiers.values()) == 3 for one in served)


async def test_a_way_sends_its_own_options_and_order() -> None:
    engine = FakeEngine()
    await serve(engine, REQUESTS[:1], [0.0], WAYS["prefix-reordered"])
    call = engine.last_call
    assert [chunk.doc_id for chunk in call.chunks] == ["p2", "p1", "p0"]
    assert dict(call.options) == {"max_tokens": 8, "ignore_eos": True, "reuse": "off"}


async def test_warming_sends_every_request_once() -> None:
    engine = FakeEngine()
    await warm(engine, [request.only_first_token() for request in REQUESTS * 5], WAYS["ours"])
    assert len(engine.calls) == 15
    assert {call.options["max_tokens"] for call in engine.calls} == {1}


def test_peak_memory_is_the_most_that_was_seen() -> None:
    memory = PeakMemory()
    memory.driver_bytes = 2**60
    memory.sample()
    assert memory.driver_bytes == 2**60
    with PeakMemory() as running:
        running.sample()
        held = bytearray(64 * 1024**2)
        running.sample()
        assert running.driver_bytes >= len(held)


class EngineWithoutModel(FakeEngine):
    """What the benchmark starts, with figures to read."""

    started: ClassVar[list[tuple[CacheCraftConfig, dict[str, Any]]]] = []

    def __init__(self, model: str, *, config: CacheCraftConfig, **engine_args: Any) -> None:
        super().__init__(model_name=model)
        self.started.append((config, engine_args))

    def stats(self) -> dict[str, Any]:
        return {"num_records": 3, "engine": {}}


def test_a_run_measures_prefix_caching_first_and_all_ways_at_its_rates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_module, "CacheCraftEngine", EngineWithoutModel)
    EngineWithoutModel.started.clear()
    workload = Workload("passages", tuple(REQUESTS), tuple(REQUESTS), tuple(REQUESTS), tuple(REQUESTS))
    settings = Settings("model", {"dtype": "bfloat16"}, "poisson", overload=8.0, moderate=0.7)
    said: list[str] = []
    records = list(run_ways(workload, chosen_ways(["full", "ours-one"]), settings, said.append))
    assert [record.way for record in records] == ["prefix", "full", "ours-one"]
    base = records[0]
    capacity = 3 / makespan_s(base.served[SATURATED])
    assert base.rates[MODERATE] == pytest.approx(0.7 * capacity)
    for record in records:
        assert record.rates == base.rates
        times = [[one.arrival_s for one in record.served[load]] for load in LOADS]
        assert times == [[one.arrival_s for one in base.served[load]] for load in LOADS]
        assert record.store == {"num_records": 3}
    assert [args for _, args in EngineWithoutModel.started] == [
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "max_num_seqs": 1},
    ]
    assert [config.host_store_bytes for config, _ in EngineWithoutModel.started] == [0, 0, None]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("workload", ["passages", "ragpulse"])
def test_benchmark_runs_on_the_real_engine(workload: str, tmp_path: Path) -> None:
    if not DATA.is_dir():
        pytest.skip(f"the data sets are not in {DATA}")
    target = tmp_path / "results.json"
    argv = [workload, "--small", "--ways", "full", "ours", "--requests", "6", "--json", str(target)]
    began = time.perf_counter()
    run(arguments(argv), Console())
    elapsed_s = time.perf_counter() - began
    record = read(target)
    assert [way.way for way in record.ways] == ["prefix", "full", "ours"]
    for way in record.ways:
        for load in LOADS:
            figures = record.figures(way, load)
            assert figures is not None and 0 < figures.makespan_s < elapsed_s
            assert figures.num_prefill <= figures.num_prompt + sum(one.num_probe for one in way.served[load])
    full, ours = record.of("full"), record.of("ours")
    assert full is not None and ours is not None
    assert all(one.num_computed == one.num_prompt for one in full.served[SATURATED])
    assert sum(one.num_prefill for one in ours.served[SATURATED]) < sum(
        one.num_prompt for one in full.served[SATURATED]
    )
