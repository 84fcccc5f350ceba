"""Percentiles, bounds and ratios against cases worked out by hand, and arrivals against their rate."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from benchmarks.common.aims import MET, MISSED
from benchmarks.engine_replay_parts.arrivals import arrivals, compressed, poisson
from benchmarks.engine_replay_parts.figures import (
    agreement,
    bound_prefill,
    compare,
    figures_of,
    makespan_s,
    quantiles,
)
from benchmarks.engine_replay_parts.record import MODERATE, SATURATED, RunRecord, WayRecord, read, save
from benchmarks.engine_replay_parts.served import Served, served_from
from benchmarks.engine_replay_parts.tables import AIMS, all_tables, gain_sentence
from benchmarks.engine_replay_parts.validation import write_validation
from benchmarks.engine_replay_parts.ways import WAYS, chosen_ways

from cachecraft_rag.chunks import ChunkKey
from cachecraft_rag.events import ChunkDecision, ChunkReport, Reason, RequestDecision, ReuseReport

ONE = Served(
    arrival_s=0.0, ttft_s=1.0, latency_s=2.0, text="an answer", num_output=2, num_prompt=1000, num_prefix=100,
    num_exact=0, num_moved=680, num_recomputed=120, num_computed=100, num_probe=10, num_found=800,
    decision="reuse", reason="other_prefix", load_s=0.1, select_s=0.1, recompute_s=0.2,
    tiers={"host": 2}, tier_tokens={"host": 800},
)  # fmt: skip
COLD = replace(
    ONE, num_moved=0, num_recomputed=0, num_computed=900, num_probe=0, num_found=0, ttft_s=4.0, latency_s=5.0,
    decision="full", tiers={"computed": 2}, tier_tokens={"computed": 800},
)  # fmt: skip


def test_quantiles_are_linear_between_neighbours() -> None:
    assert quantiles([float(value) for value in range(101)]) == (50.0, 95.0, 99.0)
    assert quantiles([1.0, 3.0]) == pytest.approx((2.0, 2.9, 2.98))
    assert quantiles([7.0]) == (7.0, 7.0, 7.0)


def test_makespan_runs_from_the_first_arrival_to_the_last_completion() -> None:
    served = [replace(ONE, arrival_s=1.0, latency_s=9.0), replace(ONE, arrival_s=3.0, latency_s=2.0)]
    assert makespan_s(served) == 9.0


def test_bound_is_misses_and_the_budget_of_what_was_found() -> None:
    assert bound_prefill([ONE, ONE], 0.15) == pytest.approx(2 * (100 + 0.15 * 800))
    assert bound_prefill([COLD], None) == 900


def test_answers_agree_word_for_word_or_not_at_all() -> None:
    served = [replace(ONE, text=text) for text in ("a b", "a  b ", "a c", "")]
    full = [replace(ONE, text=text) for text in ("a b", "a b", "a b", "")]
    assert agreement(served, full) == 0.75
    assert math.isnan(agreement(served, []))


def test_ratio_of_tokens_bounds_the_ratio_of_throughputs() -> None:
    ours = figures_of([ONE, replace(ONE, arrival_s=1.0)], [], 0.15)
    base = figures_of([COLD, replace(COLD, arrival_s=1.0)], [], None)
    compared = compare(ours, base)
    assert ours.over_bound == pytest.approx(230 / 220)
    assert compared.token_ratio == pytest.approx(900 / 230)
    assert compared.throughput_ratio == pytest.approx(6.0 / 3.0)
    assert compared.efficiency == pytest.approx(2.0 / (900 / 230))
    assert compared.ttft_ratio == pytest.approx((0.25, 0.25, 0.25))
    assert ours.shares == pytest.approx(
        {"prefix": 0.1, "exact": 0.0, "moved": 0.68, "recomputed": 0.12, "computed": 0.1}
    )


def chunk(start: int, num_tokens: int, reused: int, recomputed: int, tier: str, exact: bool) -> ChunkReport:
    decision = ChunkDecision.EXACT if exact else ChunkDecision.REPAIRED if tier else ChunkDecision.COMPUTED
    return ChunkReport(
        ChunkKey(f"{start}"), None, None, decision, Reason.OTHER_PREFIX, start, num_tokens,
        reused, recomputed, num_tokens - reused - recomputed, tier=tier,
    )  # fmt: skip


def test_a_report_is_counted_by_tier_and_the_prefix_cache_s_part_of_a_chunk_once() -> None:
    chunks = (
        chunk(10, 100, 100, 0, "prefix_cache", True),
        chunk(110, 100, 100, 0, "host", True),
        chunk(210, 100, 80, 20, "disk", False),
        chunk(310, 100, 0, 0, "", False),
    )
    report = ReuseReport(
        "id", RequestDecision.REUSE, Reason.OTHER_PREFIX, num_prompt_tokens=420, num_reused_tokens=290,
        num_recomputed_tokens=20, num_computed_tokens=110, num_prefix_tokens=140, num_probe_tokens=5,
        chunks=chunks,
    )  # fmt: skip
    served = served_from(report, text="", num_output=1, arrival_s=0.0, ttft_s=1.0, latency_s=1.0)
    assert served.tiers == {"prefix_cache": 1, "host": 1, "disk": 1, "computed": 1}
    assert served.tier_tokens == {"prefix_cache": 130, "host": 70, "disk": 100, "computed": 100}
    assert (served.num_exact, served.num_moved, served.num_found) == (70, 80, 170)
    assert served.num_prefill == 135
    parts = served.num_prefix + served.num_exact + served.num_moved
    assert parts + served.num_recomputed + served.num_computed == served.num_prompt


def test_poisson_arrivals_are_the_same_every_time_and_have_their_rate() -> None:
    times = poisson(4000, 2.5)
    assert times == poisson(4000, 2.5)
    assert times[0] == 0.0 and times == sorted(times)
    assert times[-1] == pytest.approx(4000 / 2.5, rel=0.05)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    deviation = math.sqrt(sum((gap - 0.4) ** 2 for gap in gaps) / len(gaps))
    assert deviation == pytest.approx(0.4, rel=0.1)  # of an exponential: its mean


def test_a_trace_s_times_are_compressed_to_the_rate_and_keep_their_pattern() -> None:
    assert compressed([100.0, 110.0, 150.0], 4.0) == pytest.approx([0.0, 0.1, 0.5])
    assert arrivals("trace", [100.0, 110.0, 150.0], 4.0) == compressed([100.0, 110.0, 150.0], 4.0)
    with pytest.raises(ValueError, match="use poisson"):
        compressed([3.0, 3.0], 1.0)


def test_prefix_caching_is_always_measured_and_first() -> None:
    assert [way.name for way in chosen_ways(["ours", "full"])] == ["prefix", "ours", "full"]
    with pytest.raises(SystemExit, match="unknown way fast"):
        chosen_ways(["fast"])


def test_ways_without_reuse_have_no_chunk_store() -> None:
    for way in WAYS.values():
        is_off = way.options.get("reuse") == "off"
        assert (way.made_config().host_store_bytes == 0) is is_off


def way_record(name: str, served: list[Served]) -> WayRecord:
    return WayRecord(name, 1.0, 1.1, 5.0, 2**30, 2**28, {SATURATED: 3.0}, {SATURATED: served})


def record(workload: str) -> RunRecord:
    facts = {
        "command": "python -m benchmarks.engine_replay", "commit": "abc", "model": "tiny", "engine_args": {},
        "machine": {"cpu": "some", "cores": 2, "load_1min": 0.0}, "workload": {},
    }  # fmt: skip
    ways = [
        ("prefix", [COLD]),
        ("full", [COLD]),
        ("prefix-reordered", [COLD]),
        ("ours", [ONE]),
        ("ours-0", [ONE]),
    ]
    return RunRecord(workload, facts, [way_record(name, served) for name, served in ways])


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    save(record("passages"), tmp_path / "passages.json")
    assert read(tmp_path / "passages.json") == record("passages")


@pytest.mark.parametrize("workload", sorted(AIMS))
def test_every_way_stands_in_the_tables_and_every_aim_is_judged(workload: str) -> None:
    tables = list(all_tables(record(workload)))
    for table in tables:
        assert all(len(row) == len(table.columns) for row in table.rows)
    assert [row[0] for row in tables[0].rows] == ["prefix", "full", "prefix-reordered", "ours", "ours-0"]
    judged = {row[0]: row[-1] for row in tables[-1].rows}
    expected = {f"{aim.name}, {SATURATED}": MET for aim in AIMS[workload] if aim.load == SATURATED}
    if workload == "ragpulse":
        expected[f"throughput / what the token ratio allows, {SATURATED}"] = MISSED
    assert judged == expected
    assert "chunks moved 100%" in gain_sentence(record(workload))


def test_a_run_of_the_trace_is_handed_to_the_simulation(tmp_path: Path) -> None:
    shape = {
        "first": 1500, "num_saturated": 300, "num_moderate": 61, "scale": 0.5, "max_output_tokens": 16,
    }  # fmt: skip
    measured = record("ragpulse")
    ways = [
        replace(way, rates={MODERATE: 2.0}, served={MODERATE: way.served[SATURATED]}) for way in measured.ways
    ]
    target = tmp_path / "measured.json"
    write_validation(replace(measured, facts={"workload": shape}, ways=ways), target)
    written = json.loads(target.read_text())
    assert written["workload"]["arrivals_s"] == [each.arrival_s for each in ways[0].served[MODERATE]]
    assert written["workload"]["num_warm_up"] == 1800
    assert [row["way"] for row in written["rows"]] == ["prefix", "full", "reuse", "reuse"]
    with pytest.raises(SystemExit, match="ragpulse"):
        write_validation(record("passages"), target)
