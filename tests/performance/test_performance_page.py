"""docs/performance.md: joins, sections that are there only with results, and figures that come from them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.common.aims import MET, MISSED
from benchmarks.performance_parts import limits
from benchmarks.performance_parts.frontier import join, quality_cells
from benchmarks.performance_parts.page import Sources, write_page
from benchmarks.quality.results import ResultFile
from benchmarks.quality.results import Row as Answer
from benchmarks.stall_parts.record import FULL as FULL_PREFILL
from benchmarks.stall_parts.record import Row, StallRecord, read, save
from benchmarks.stall_parts.tables import all_tables, verdicts
from benchmarks.ttft_parts.record import Point, add_point

from cachecraft_rag import CacheCraftConfig

STRATEGY, RUNS = CacheCraftConfig().strategy, CacheCraftConfig().granularity
ANSWER = Answer(
    item="q1", position=0, way="full", kl=0.0, kl_first=0.0, agree=True, divergence=None, f1=1.0,
    exact_match=1.0, contains=1.0, rouge_l=1.0, answer="a", num_prompt_tokens=100, num_reused_tokens=80,
    num_recomputed_tokens=10, num_missing_tokens=0, charged=0.15,
)  # fmt: skip


@pytest.fixture
def stall(made: Any) -> StallRecord:
    settings = {"context": 5000, "step_tokens": 512, "together": 4, "repeats": 3}
    full = Row(FULL_PREFILL, gap_s=2.0, alone_gap_s=0.1, ttft_s=9.0, alone_ttft_s=8.0)
    reuse = Row("reuse", gap_s=1.0, alone_gap_s=0.1, ttft_s=3.0, alone_ttft_s=2.8, whole_ttft_s=2.0)
    return StallRecord(made.facts, settings, [full, reuse])


@pytest.fixture
def point(made: Any) -> Point:
    """At the context that the aims speak of."""
    found: Point = made.point(
        made.reuse(0.0, 0.3, load_s=0.1, loaded_bytes=200_000_000),
        made.reuse(0.15, 2.0),
        made.reuse(0.15, 1.5, runs=RUNS + 3),
        made.reuse(1.0, 11.0),
    )
    return found


def write_quality(folder: Path, set_name: str, *, kl_by_way: dict[str, float]) -> None:
    results = ResultFile("default", set_name, folder)
    results.append(replace(ANSWER, way=way, kl=kl, agree=kl < 0.1) for way, kl in kl_by_way.items())


def test_frontier_joins_by_strategy_budget_and_granularity(tmp_path: Path, point: Point) -> None:
    kl_by_way = {
        "full": 0.0,
        f"{STRATEGY}@0.15/neighbours": 0.02,
        f"{STRATEGY}@0.15/alone": 0.06,
        f"{STRATEGY}@0.15/neighbours/g{RUNS + 3}": 0.04,
        "naive/alone": 0.3,
        "recompute_all/alone": 0.001,
        f"{STRATEGY}@0.2/neighbours": 0.01,
        "epic@0.15/alone": 0.05,
    }
    write_quality(tmp_path, "one", kl_by_way=kl_by_way)
    write_quality(tmp_path, "two", kl_by_way={way: 3 * kl for way, kl in kl_by_way.items()})
    joined = {each.name: each for each in join(point, quality_cells("default", tmp_path))}
    assert [(name, each.ttft_s) for name, each in joined.items()] == [
        ("naive/alone", 0.3),
        (f"{STRATEGY}@0.15/neighbours/g{RUNS + 3}", 1.5),
        (f"{STRATEGY}@0.15/neighbours", 2.0),
        (f"{STRATEGY}@0.15/alone", 2.0),
        ("recompute_all/alone", 11.0),
    ]
    ours = joined[f"{STRATEGY}@0.15/neighbours"]
    assert ours.speedup == pytest.approx(5.0) and ours.kl.mean == pytest.approx(0.04)
    assert joined[f"{STRATEGY}@0.15/alone"].agreement.mean == 0.5


def test_a_way_that_one_set_lacks_is_not_joined(tmp_path: Path, point: Point) -> None:
    write_quality(tmp_path, "one", kl_by_way={"full": 0.0, f"{STRATEGY}@0.15/neighbours": 0.02})
    write_quality(tmp_path, "two", kl_by_way={"full": 0.0})
    assert join(point, quality_cells("default", tmp_path)) == []
    assert join(point, quality_cells("gemma3", tmp_path)) == []


def test_stall_is_judged_against_chunked_prefill_and_against_one_piece(stall: StallRecord) -> None:
    assert [(verdict.value, verdict.is_met) for verdict in verdicts(stall)] == [(0.5, True), (1.4, False)]
    table, aims = all_tables(stall)
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert [row[-1] for row in aims.rows] == [MET, MISSED]


def test_a_stall_record_is_read_as_it_was_written(tmp_path: Path, stall: StallRecord) -> None:
    save(stall, tmp_path / "results" / "stall.json")
    assert read(tmp_path / "results" / "stall.json") == stall


def test_limits_name_the_settings_and_the_figures_that_there_are(point: Point) -> None:
    without = limits.section({})
    assert f"{CacheCraftConfig().min_chunk_tokens} tokens (`min_chunk_tokens`)" in without
    assert "times at" not in without and "MB/s" not in without and "{" not in without
    text = limits.section({"default-float32": [replace(point, context=1000), point]})
    assert "5.0 times at 1,000 tokens, 5.0 times at 5,000 tokens" in text
    # 200 MB in 10 s and in 0.1 s.
    assert "at 20 MB/s" in text and "at 2,000 MB/s" in text


def sources(folder: Path) -> Sources:
    return Sources(*(folder / name for name in ("ttft", "quality", "stall.json", "replay")))


def headings(page: Path) -> list[str]:
    return [line[3:] for line in page.read_text().splitlines() if line.startswith("## ")]


def test_sections_without_results_are_left_out(tmp_path: Path, point: Point) -> None:
    page = write_page(tmp_path / "docs", sources(tmp_path))
    assert headings(page) == ["Limits: where reuse does not pay"]
    assert "\n\n\n" not in page.read_text()
    add_point(tmp_path / "ttft" / "default-float32.json", replace(point, context=1000))
    write_page(tmp_path / "docs", sources(tmp_path))
    assert headings(page) == ["Time to first token", "Limits: where reuse does not pay"]


def test_a_page_of_all_sections_is_the_same_when_it_is_written_again(
    tmp_path: Path, point: Point, stall: StallRecord
) -> None:
    add_point(tmp_path / "ttft" / "default-float32.json", replace(point, context=1000))
    add_point(
        tmp_path / "ttft" / "default-float32.json", replace(point, facts={**point.facts, "commit": "def"})
    )
    write_quality(tmp_path / "quality", "one", kl_by_way={"full": 0.0, f"{STRATEGY}@0.15/neighbours": 0.02})
    save(stall, tmp_path / "stall.json")
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "scale.md").write_text("# At scale\n")
    page = write_page(docs, sources(tmp_path))
    text = page.read_text()
    assert headings(page) == [
        "Time to first token", "Quality against time to first token", "Stall", "Scale, soak and the store",
        "Limits: where reuse does not pay",
    ]  # fmt: skip
    assert "[scale.md](scale.md)" in text and "[soak.md](soak.md):" not in text
    # Each point says where it comes from.
    assert "Context 1,000: `python benchmarks/ttft.py` at commit `abc`" in text
    assert "Context 5,000: `python benchmarks/ttft.py` at commit `def`" in text
    pictures = {path.name: path.read_bytes() for path in (docs / "performance").iterdir()}
    assert set(pictures) == {"ttft-default-float32.png", "frontier-default-float32.png"}
    assert all(f"(performance/{name})" in text for name in pictures)
    shutil.rmtree(docs / "performance")
    assert write_page(docs, sources(tmp_path)).read_text() == text
    assert {path.name: path.read_bytes() for path in (docs / "performance").iterdir()} == pictures
