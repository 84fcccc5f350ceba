"""The simulation against closed forms, and that it loses nothing on the way."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.cluster_sim.assumptions import Assumptions, read_assumptions
from benchmarks.cluster_sim.run import measure, simulate
from benchmarks.cluster_sim.validate import validate
from benchmarks.cluster_sim.ways import Way
from benchmarks.cluster_sim.workload import Part, SimRequest, at_rate
from hypothesis import given, settings
from hypothesis import strategies as st

from cachecraft_rag.errors import ConfigurationError

FULL = Way("full", has_prefix_cache=False)
PREFIX = Way("prefix")
FREE = 1e30
SERVICE_TOKENS = 100


def assumptions(**changes: Any) -> Assumptions:
    """1,000 tokens a second, nothing else costs anything, caches hold all."""
    values: dict[str, Any] = {
        "prefill_tokens_per_s": 1e3,
        "weights_s": 0.0,
        "context_tokens_per_s": FREE,
        "attention_balance_tokens": FREE,
        "step_overhead_s": 0.0,
        "max_batched_tokens": SERVICE_TOKENS,
        "max_sequences": 10**6,
        "kv_bytes_per_token": 1.0,
        "device_tokens": 10**9,
        "host_tokens": 10**9,
        "shared_tokens": 10**9,
        "host_bytes_per_s": FREE,
        "shared_bytes_per_s": FREE,
        "repair_overhead": 1.0,
    }
    values |= changes
    return Assumptions(name="test", sources=dict.fromkeys(values, "test"), **values)


def request(
    *chunks: int, time_s: float = 0.0, session: int = 0, question: int = -1, num_output: int = 1
) -> SimRequest:
    """Chunks of 90 tokens and a question of 10."""
    parts = (*(Part(number, 90, is_chunk=True) for number in chunks), Part(question, 10))
    return SimRequest(time_s, session, parts, num_output)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_mean_wait_is_that_of_a_queue_with_fixed_service(load: float) -> None:
    """M/D/1: load * service / 2 / (1 - load) (Pollaczek and Khinchine)."""
    service_s = SERVICE_TOKENS / 1e3
    sent = at_rate([request(1)] * 40_000, load / service_s)
    outcomes = simulate(sent, assumptions(), FULL, 1)
    mean_wait_s = sum(outcome.ttft_s for outcome in outcomes) / len(outcomes) - service_s
    assert mean_wait_s == pytest.approx(load * service_s / 2 / (1 - load), rel=0.05)


def test_a_step_decodes_all_running_requests() -> None:
    """Of three requests at once each waits one step for its second token, whatever else the step does."""
    rates = assumptions(weights_s=1.0, prefill_tokens_per_s=FREE)
    outcomes = simulate([request(1, num_output=2) for _ in range(3)], rates, FULL, 1)
    # A decoding request takes a place of the batch, so the second prefill needs two steps.
    assert [outcome.end_s - outcome.ttft_s for outcome in outcomes] == pytest.approx([1.0] * 3)
    assert outcomes[0].ttft_s == pytest.approx(1.0)


requests = st.lists(
    st.builds(
        request,
        st.integers(0, 4),
        st.integers(5, 9),
        time_s=st.floats(0, 5),
        session=st.integers(0, 3),
        question=st.integers(-9, -1),
        num_output=st.integers(1, 20),
    ),
    min_size=1,
    max_size=30,
)
all_ways = st.sampled_from([FULL, PREFIX, Way("own", budget=0.2), Way("shared", budget=0.2, is_shared=True)])


@settings(deadline=None)
@given(requests, all_ways, st.integers(1, 3), st.integers(50, 400), st.integers(1, 4))
def test_every_request_ends_once(
    sent: list[SimRequest], way: Way, num_engines: int, room: int, max_sequences: int
) -> None:
    """Whatever the ways, the room for KV and the limits; tokens are computed or come from one tier."""
    rates = assumptions(device_tokens=room, host_tokens=room, shared_tokens=room, max_sequences=max_sequences)
    outcomes = simulate(sent, rates, way, num_engines)
    assert sorted(map(id, sent)) == sorted(id(outcome.request) for outcome in outcomes)
    for outcome in outcomes:
        job = outcome.job
        assert 0 < outcome.ttft_s <= outcome.end_s
        held = job.num_prefix_tokens + job.num_host_tokens + job.num_shared_tokens
        assert held <= job.num_tokens <= held + job.num_computed
        assert outcome.engine == outcome.request.session % num_engines


def test_chunks_are_reused_behind_other_chunks_and_prefixes_are_not() -> None:
    """The same chunks in another order: nothing for the prefix cache, all but the budget for reuse."""
    sent = [request(1, 2), request(2, 1, time_s=10.0)]
    (_, by_prefix), (_, by_chunk) = (
        simulate(sent, assumptions(), way, 1) for way in (PREFIX, Way("reuse", budget=0.1))
    )
    assert (by_prefix.job.num_prefix_tokens, by_prefix.job.num_computed) == (0, 190)
    assert (by_chunk.job.num_host_tokens, by_chunk.job.num_computed) == (180, 18 + 10)


def test_repaired_tokens_are_no_prefix_for_others() -> None:
    """KV behind a repaired chunk is approximate, so the prefix cache never gets it."""
    sent = [request(1, 2), request(2, 1, time_s=10.0), request(2, 1, time_s=20.0)]
    *_, last = simulate(sent, assumptions(), Way("reuse", budget=0.1), 1)
    assert (last.job.num_prefix_tokens, last.job.num_host_tokens) == (0, 180)


@pytest.mark.parametrize(("is_shared", "num_tokens"), [(False, 0), (True, 90)])
def test_another_engine_finds_chunks_in_the_shared_tier_only(is_shared: bool, num_tokens: int) -> None:
    """What one engine computed, another one loads; the time of the load is waited for."""
    sent = [request(1), request(1, time_s=10.0, session=1, question=-2)]
    way = Way("reuse", budget=0.0, is_shared=is_shared)
    _, second = simulate(sent, assumptions(shared_bytes_per_s=90.0), way, 2)
    assert second.job.num_shared_tokens == num_tokens
    assert second.ttft_s == pytest.approx(1.01 if is_shared else 0.1)


@pytest.mark.parametrize("change", [{"sources": {}}, {"prefill_tokens_per_s": 0.0}])
def test_assumptions_need_a_source_and_a_value(change: dict[str, Any]) -> None:
    """A figure from nowhere is refused."""
    with pytest.raises(ConfigurationError):
        replace(assumptions(), **change)


def test_validation_compares_each_measured_figure(tmp_path: Path) -> None:
    """A replay that did just what the simulation says has ratios of one, whatever the trace's own times."""
    rates, arrivals_s = assumptions(), [0.0, 0.05, 1.0, 1.01, 1.02]
    trace = [request(n % 3, time_s=0.0) for n in range(20)]
    warm_up = [replace(each, time_s=-100.0 * (15 - n)) for n, each in enumerate(trace[:15])]
    sent = [replace(each, time_s=time_s) for each, time_s in zip(trace[15:], arrivals_s, strict=True)]
    simulated = measure([*warm_up, *sent], rates, PREFIX, 1, 15)
    row = {"way": "prefix", "ttft_p99_s": simulated.ttft_p99_s, "computed_share": simulated.computed_share}
    workload = {
        "first": 0,
        "num_warm_up": 15,
        "arrivals_s": arrivals_s,
        "token_scale": 1.0,
        "max_output_tokens": 1,
    }
    measured_path, rates_path = tmp_path / "measured.json", tmp_path / "rates.json"
    measured_path.write_text(json.dumps({"workload": workload, "rows": [row]}))
    rates_path.write_text(json.dumps({each.name: getattr(rates, each.name) for each in fields(rates)}))
    found = validate(trace, read_assumptions(rates_path), measured_path)
    assert [(each.figure, each.ratio) for each in found] == [("ttft_p99_s", 1.0), ("computed_share", 1.0)]
