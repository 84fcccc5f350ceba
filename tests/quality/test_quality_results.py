"""Result files, what is still to be measured, and the report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.quality.items import SETS, Item
from benchmarks.quality.models import MODELS
from benchmarks.quality.report import write_report
from benchmarks.quality.results import ResultFile, Row, result_files
from benchmarks.quality.run import Run
from benchmarks.quality.tables import Cell, common_ways, paired, paired_table, result_table, variants_table
from benchmarks.quality.ways import FULL, Way

from cachecraft_rag.chunks import Chunk

META = {"pool": "piece", "commit": "abc", "model": "M"}
ROW = Row(
    item="q1",
    position=0,
    way=FULL,
    kl=0.0,
    kl_first=0.0,
    agree=True,
    divergence=None,
    f1=1.0,
    exact_match=1.0,
    contains=1.0,
    rouge_l=1.0,
    answer="Paris",
    num_prompt_tokens=100,
    num_reused_tokens=0,
    num_recomputed_tokens=0,
    num_missing_tokens=0,
    charged=1.0,
)


@pytest.fixture
def results(tmp_path: Path) -> ResultFile:
    return ResultFile("m", "some_set", tmp_path / "results")


def fill(results: ResultFile, way: str, kls: list[float]) -> None:
    results.append(
        replace(ROW, item=f"q{i}", position=i, way=way, kl=kl, agree=kl == 0) for i, kl in enumerate(kls)
    )


def test_variants_are_compared_where_both_were_measured() -> None:
    """Items with one variant only do not count; a cell without both has no row."""
    one = {f"q{i}": replace(ROW, item=f"q{i}", way="focus@0.15/single", kl=0.4) for i in range(2)}
    two = {f"q{i}": replace(ROW, item=f"q{i}", way="focus@0.15/traffic", kl=0.1) for i in range(3)}
    cells = [Cell("m", "s", {"focus@0.15/single": one, "focus@0.15/traffic": two}), Cell("m", "t", {})]
    *_, row = variants_table(cells).splitlines()
    assert row.startswith("| m on s | 2 | 0.4000 | 0.1000 | -0.3000")


def test_rows_come_back_as_they_were_written(results: ResultFile) -> None:
    """All fields survive, at five digits; a line end of Unicode in an answer does not end the line."""
    row = replace(ROW, answer="a\u2028b", kl=1 / 3, agree=False, divergence=2)
    results.begin(META)
    results.append([row])
    assert results.rows() == [replace(row, kl=0.33333)]
    assert results.metas() == [META]


def test_answers_are_cut(results: ResultFile) -> None:
    """Files stay small enough to commit."""
    results.append([replace(ROW, answer="x" * 500)])
    assert results.rows()[0].answer == "x" * 120


def test_a_run_that_was_killed_goes_on_behind_its_last_whole_line(results: ResultFile) -> None:
    """Half a line is dropped, so that the next one is not joined to it."""
    results.begin(META)
    results.append([ROW])
    whole = results.path.read_text()
    results.path.write_text(whole + ROW.to_json()[:40])
    assert results.done() == {("q1", FULL)}
    results.begin(META)
    results.append([replace(ROW, item="q2")])
    assert results.path.read_text().startswith(whole)
    assert results.done() == {("q1", FULL), ("q2", FULL)}


def test_a_new_commit_gets_a_line_of_its_own(results: ResultFile) -> None:
    """Facts are written again only when they differ."""
    later = {**META, "commit": "def"}
    for meta in (META, META, later):
        results.begin(meta)
    assert results.metas() == [META, later]


def test_another_pool_of_chunks_is_refused(results: ResultFile) -> None:
    """Neighbours come from the pool, so rows over different pools do not compare."""
    results.begin(META)
    with pytest.raises(SystemExit, match="--items"):
        results.begin({**META, "pool": 20})


def test_only_what_is_missing_is_measured(results: ResultFile) -> None:
    """A way added later asks for itself alone; an item with all its ways is not asked for again."""
    items = [Item(f"q{i}", i, "Who?", ("x",), (Chunk("t"),)) for i in range(3)]
    fill(results, FULL, [0.0, 0.0])
    fill(results, "naive/alone", [0.1])
    ways = [Way.parse("naive/alone"), Way.parse("epic@0.05/alone")]
    run = Run(MODELS["default"], SETS["xquad_en"], items, (), "even", ways[:1], results)
    assert run.missing() == {"q2": [FULL, "naive/alone"]}
    run = replace(run, ways=ways, half="all")
    assert run.missing() == {
        "q0": ["epic@0.05/alone"],
        "q1": ["naive/alone", "epic@0.05/alone"],
        "q2": [FULL, "naive/alone", "epic@0.05/alone"],
    }


def test_pairs_are_the_items_that_both_ways_have(results: ResultFile) -> None:
    """The difference is taken item by item, on one half if that is asked for."""
    fill(results, FULL, [0.0] * 4)
    fill(results, "focus@0.15/neighbours", [0.1, 0.2, 0.3, 0.4])
    fill(results, "epic@0.15/alone", [0.4, 0.4])
    cell = Cell.of(results)
    gap, num_pairs = paired([cell], "focus@0.15/neighbours", "epic@0.15/alone", lambda row: row.kl)
    assert (num_pairs, gap.mean) == (2, pytest.approx(-0.25))
    gap, num_pairs = paired([cell], "focus@0.15/neighbours", "epic@0.15/alone", lambda row: row.kl, half=1)
    assert (num_pairs, gap.mean, gap.reading) == (1, pytest.approx(-0.2), "below 0")


def test_tables_show_what_the_rows_hold(results: ResultFile) -> None:
    """KL, agreement and the paired gap appear with their intervals; ways are in a fixed order."""
    fill(results, FULL, [0.0] * 4)
    fill(results, "naive/alone", [0.0, 0.5, 0.0, 0.5])
    fill(results, "focus@0.05/neighbours", [0.0, 0.25, 0.0, 0.25])
    cell = Cell.of(results)
    assert common_ways([cell]) == [FULL, "focus@0.05/neighbours", "naive/alone"]
    line = next(line for line in result_table(cell).splitlines() if "`naive/alone`" in line)
    assert line.startswith("| `naive/alone` | 4 | 0.2500 [0.0000, 0.5000] | 0.0000 | 0.500 | 1.000 | 100.0 %")
    assert "| 5% | `naive/alone` | 2 | -0.2500 [-0.2500, -0.2500] | below 0 |" in paired_table([cell], 1)


def test_report_is_written_from_the_files_alone(results: ResultFile, tmp_path: Path) -> None:
    """Page and pictures appear; each table names its command, commits and model."""
    pytest.importorskip("matplotlib", reason="pip install -r requirements/quality.txt")
    results.begin(META)
    fill(results, FULL, [0.0] * 4)
    fill(results, "naive/alone", [0.0, 0.5, 0.0, 0.5])
    write_report(results.folder, tmp_path)
    page = (tmp_path / "quality.md").read_text()
    assert "--model m --set some_set" in page and "`abc`" in page and '"model": "M"' in page
    assert (tmp_path / "quality" / "m-some_set.png").read_bytes().startswith(b"\x89PNG")


def test_report_without_results_says_how_to_get_them(tmp_path: Path) -> None:
    """An empty folder is a user's mistake, not an empty page."""
    with pytest.raises(SystemExit, match=r"benchmarks\.quality run"):
        write_report(tmp_path, tmp_path)
    assert result_files(tmp_path) == []
