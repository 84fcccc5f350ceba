"""Speed-ups, efficiency, verdicts and the estimate against cases worked out by hand."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks.common.aims import MET, MISSED
from benchmarks.common.prompts import passages_for
from benchmarks.ttft_parts.estimate import ModelSize, estimate_s, num_full_prefills
from benchmarks.ttft_parts.figures import default_way, efficiency, speedup, verdicts
from benchmarks.ttft_parts.measure import check_orders, other_order
from benchmarks.ttft_parts.record import add_point, read
from benchmarks.ttft_parts.tables import aims_table, overview_table, page_tables, summary_tables
from benchmarks.ttft_parts.ways import FULL, PREFIX, PREFIX_SAME, Way, make_ways, warming_way

from cachecraft_rag import Chunk


def test_speedup_and_efficiency_are_of_medians(made: Any) -> None:
    measured = made.reuse(0.15, 1.0, 1.6, 9.0, load_s=0.1)
    at = made.point(measured)
    assert speedup(at, measured) == pytest.approx(10.0 / 1.6)
    assert efficiency(at, measured) == pytest.approx((1.6 - 0.1) / (0.15 * 10.0))


def test_what_recomputes_nothing_has_no_efficiency(made: Any) -> None:
    at = made.point(made.reuse(0.0, 0.2))
    assert [efficiency(at, measured) for measured in at.ways] == [None] * 4


def test_verdicts_are_of_the_default_strategy_at_its_own_granularity(made: Any) -> None:
    others = (
        made.reuse(0.15, 0.01, runs=made.runs + 3),
        made.timed(Way.reuse("epic", 0.15, made.runs), 0.01),
    )
    at = made.point(
        made.reuse(0.0, 0.2), *others, made.reuse(0.15, 2.5, load_s=0.1), made.reuse(0.30, 3.1, load_s=0.1)
    )
    found = {verdict.figure: verdict for verdict in verdicts([made.point(context=1000), at])}
    assert [round(verdict.value, 2) for verdict in found.values()] == [50.0, 4.0, 3.23, 1.6, 1.0]
    assert [verdict.is_met for verdict in found.values()] == [True, False, True, False, True]
    assert [row[-1] for row in aims_table([at]).rows] == [MET, MISSED, MET, MISSED, MET]


def test_nothing_is_judged_at_another_context(made: Any) -> None:
    assert list(verdicts([made.point(made.reuse(0.0, 0.2), context=1000)])) == []


def test_other_granularities_are_measured_at_the_aims_budgets_only() -> None:
    names = [way.name for way in make_ways(["focus", "epic"], [0.0, 0.15, 0.5, 1.0], [1, 16])]
    assert names[:3] == [FULL, PREFIX, PREFIX_SAME]
    assert names[3:] == [
        "focus@0", "focus@0.15", "focus@0.15/g16", "focus@0.5", "focus@1",
        "epic@0.15", "epic@0.15/g16", "epic@0.5",
    ]  # fmt: skip


def test_the_cheapest_recompute_pass_warms_up() -> None:
    ways = make_ways(["focus"], [0.0, 0.3, 0.15, 1.0], [1])
    assert warming_way(ways) == Way.reuse("focus", 0.15, 1)
    assert warming_way(make_ways(["focus"], [0.0], [1])) is None


def test_a_run_replaces_the_point_at_its_context_and_leaves_the_others(made: Any, tmp_path: Path) -> None:
    path = tmp_path / "results" / "default-float32.json"
    old, other, new = (
        made.point(made.reuse(0.15, 2.0)),
        made.point(context=1000),
        made.point(made.reuse(0.15, 3.0)),
    )
    for each in (old, other, new):
        add_point(path, each)
    assert read(path) == [other, new]


def test_tables_hold_every_way_and_leave_out_what_was_not_measured(made: Any) -> None:
    short, long = (
        made.point(made.reuse(0.0, 0.2), context=1000),
        made.point(made.reuse(0.0, 0.2), made.reuse(0.15, 2.0)),
    )
    overview = overview_table([short, long])
    assert overview.rows[0][-1] == "–" and overview.rows[1][-1] == "2.00 s (5.0 ×)"
    tables = list(page_tables([short, long]))
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)
    assert [row[0] for row in tables[0].rows] == [f"`{measured.way.name}`" for measured in long.ways]
    assert default_way(short, 0.15) is None
    assert [table.title[:4] for table in summary_tables([short, long])][2:] == ["Aims"]
    assert len(list(summary_tables([short]))) == 2


def test_the_estimate_counts_the_fill_the_warm_up_and_every_repeat() -> None:
    ways = [Way(FULL), Way(PREFIX), Way(PREFIX_SAME), Way.reuse("focus", 0.15, 1)]
    per_repeat = 1 + 1 + 0.05 + 0.2
    assert num_full_prefills(ways, 3) == pytest.approx(1 + 0.2 + 3 * per_repeat)
    size = ModelSize(num_weights=50, attention_width=1)
    # 2 * 50 * 100 + 2 * 1 * 100 ** 2 = 30,000 operations take 3 s; at 200 tokens 100,000 take 10 s.
    assert estimate_s(size, [200], ways, 3, (100, 3.0)) == pytest.approx(10 * num_full_prefills(ways, 3))


def test_the_size_of_a_model_is_read_from_its_configuration(tmp_path: Path) -> None:
    config = {
        "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 16,
        "num_hidden_layers": 3,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    # q and o: 8 x 8 each, k and v: 8 x 4 each, three of 8 x 16.
    assert ModelSize.read(tmp_path) == ModelSize(3 * (2 * 64 + 2 * 32 + 3 * 128), 3 * 8)
    (tmp_path / "config.json").write_text(json.dumps({**config, "head_dim": 5}))
    assert ModelSize.read(tmp_path).attention_width == 3 * 4 * 5


def words(text: str) -> int:
    return len(text.split())


def test_passages_fill_the_context_and_a_token_between_them() -> None:
    texts: Sequence[str] = ["a b c", "d e", "f g h"]
    assert [chunk.text for chunk in passages_for(7, words, texts)] == ["a b c", "d e"]
    assert [chunk.text for chunk in passages_for(6, words, texts)] == ["a b c"]
    with pytest.raises(SystemExit, match="too few"):
        passages_for(11, words, texts)


def test_passages_stand_in_another_order_with_another_one_first() -> None:
    passages = [Chunk(str(number)) for number in range(3)]
    for seed in range(20):
        order = other_order(passages, random.Random(seed))
        assert order[0] is not passages[0] and sorted(order, key=passages.index) == passages
    check_orders([passages, passages[:2]])
    with pytest.raises(SystemExit, match="two passages"):
        check_orders([passages, passages[:1]])
