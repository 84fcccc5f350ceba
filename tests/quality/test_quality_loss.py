"""Where reuse loses: the tables, and which chunks are taken for the comparison."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.quality.items import Item
from benchmarks.quality.loss import evidence_of, others_of
from benchmarks.quality.loss_tables import chunk_table, layer_table, question_table
from benchmarks.quality.results import Row
from benchmarks.quality.tables import Cell

from cachecraft_rag.chunks import Chunk

WAY = "focus@0.15/neighbours"
ROW = Row("q", 0, WAY, 0.0, 0.0, True, None, 0.0, 0.0, 0.0, 0.0, "", 100, 0, 0, 0, 0.15)


def last_cells(table: str) -> list[str]:
    """Cells of the table's last row."""
    return [cell.strip() for cell in table.splitlines()[-1].strip("|").split("|")]


def test_question_table_shows_how_the_loss_is_spread() -> None:
    """One bad item of ten has all the loss; what starts at the first token is told apart."""
    rows = {f"q{i}": replace(ROW, item=f"q{i}") for i in range(9)}
    rows["bad"] = replace(ROW, item="bad", kl=1.0, kl_first=0.5, agree=False, divergence=0)
    table = question_table([Cell("m", "s", {WAY: rows})])
    assert last_cells(table) == ["m on s", "10", "0.1000", "0.0000", "100 %", "0.0500", "0.10", "0.10"]


def test_chunk_table_compares_what_was_computed_in_full() -> None:
    found = {
        "m on s": [
            {"kl": {"nothing": 0.4, "evidence": 0.1, "others": 0.3}},
            {"kl": {"nothing": 0.2, "evidence": 0.1, "others": 0.1}},
        ]
    }
    assert last_cells(chunk_table(found)) == ["m on s", "2", "0.3000", "0.1000", "0.2000"]


def test_layer_table_averages_items_and_neighbouring_layers() -> None:
    """Items whose role has no chunks are left out."""
    distance = {"evidence": [0.1] * 6 + [0.3] * 6, "others": [0.2] * 12}
    found = {"m on s": [{"distance": distance}, {"distance": {"evidence": [], "others": [0.4] * 12}}]}
    table = layer_table(found)
    assert last_cells(table)[2:] == ["0.300"] * 6
    assert table.splitlines()[-2].endswith("| evidence | 0.100 | 0.100 | 0.100 | 0.300 | 0.300 | 0.300 |")


def test_as_many_others_as_evidence_and_never_the_same() -> None:
    chunks = tuple(Chunk(f"t{index}") for index in range(6))
    item = Item("i", 0, "Who?", ("x",), chunks, evidence=(1, 4))
    assert evidence_of(item) == [chunks[1], chunks[4]]
    assert len(others_of(item)) == 2
    assert not set(others_of(item)) & set(evidence_of(item))
    assert others_of(item) == others_of(item)
