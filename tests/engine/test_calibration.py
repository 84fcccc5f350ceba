"""Calibration: its arithmetic, its search, what it remembers, and what the engine makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.chunks import Chunk
from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.engine.api import Completion
from cachecraft_rag.engine.calibrate import CalibrationRun
from cachecraft_rag.engine.calibration import (
    BUDGETS,
    Calibration,
    CalibrationPoint,
    CalibrationQuestion,
    Setup,
    make_point,
    smallest_budget,
    wilson_interval,
)
from cachecraft_rag.engine.calibration_files import AnswerFile, load_calibration, save_calibration
from cachecraft_rag.errors import InvalidRequestError
from cachecraft_rag.testing import FakeEngine

RIVER = Chunk("The river flows from the hills to the sea.", doc_id="river")
SETUP = Setup("cachecraft", 1, "Answer.", False, 8)
QUESTIONS = tuple(CalibrationQuestion(f"{RIVER.text}\n\nQuestion {i}?", (RIVER,)) for i in range(10))
FOUND = Calibration(0.2, 0.9, 0.9, (CalibrationPoint(0.2, 0.95, 0.9, 0.98, 40),), True, asdict(SETUP))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CACHECRAFT_CACHE_DIR", str(tmp_path))
    return tmp_path


class FakeCalibrated:
    """Answers question i as full compute does from the budget `needs[i]` on."""

    def __init__(self, needs: Sequence[float], *, dies_after: int | None = None) -> None:
        self.needs = needs
        self.asked: list[dict[str, Any]] = []
        self.warmed: list[dict[str, Any]] = []
        self.purged: list[str | None] = []
        self._dies_after = dies_after

    def complete(self, prompt: str, **options: Any) -> Completion:
        if len(self.asked) == self._dies_after:
            raise KeyboardInterrupt
        self.asked.append(options)
        index, budget = int(prompt.split()[-1].rstrip("?")), options["recompute_ratio"]
        text = "right" if budget is None or budget >= self.needs[index] else "wrong"
        return replace(FakeEngine().complete("x"), text=text)

    chat = complete

    def warm(self, chunks: Sequence[Chunk], **options: Any) -> int:
        self.warmed.append({"chunks": tuple(chunks), **options})
        return len(chunks)

    def purge(self, tenant: str | None = None) -> int:
        self.purged.append(tenant)
        return 0


def run(engine: FakeCalibrated, target: float = 0.9) -> Calibration:
    answers = AnswerFile("model")
    return CalibrationRun(engine, QUESTIONS, SETUP, answers, lambda: None).run(BUDGETS, target, 0.9)


@pytest.mark.parametrize(
    ("num_agreeing", "num_questions", "expected"),
    [(0, 10, (0.0, 0.2775)), (5, 10, (0.2366, 0.7634)), (10, 10, (0.7225, 1.0)), (81, 263, (0.2553, 0.3662))],
)
def test_wilson_interval_is_that_of_the_tables(num_agreeing, num_questions, expected) -> None:
    """At 95 % it gives the published values (Newcombe 1998, table I, method 3, for 81 of 263)."""
    assert wilson_interval(num_agreeing, num_questions, 0.95) == pytest.approx(expected, abs=5e-5)


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.floats(0.5, 0.999))
def test_interval_holds_the_share(counts: tuple[int, int], confidence: float) -> None:
    """Whatever the counts, the share lies in its interval and the interval in [0, 1]."""
    low, high = wilson_interval(*counts, confidence)
    assert 0 <= low <= counts[0] / counts[1] <= high <= 1


@given(st.lists(st.sampled_from(BUDGETS), min_size=1, max_size=30), st.floats(0.01, 1.0))
def test_search_finds_the_smallest_budget(needs: list[float], target: float) -> None:
    """On a monotone curve bisection finds what trying every budget would, with few measurements."""
    tried = []

    def measure(budget: float) -> CalibrationPoint:
        tried.append(budget)
        return make_point(budget, [budget >= need for need in needs], 0.9)

    budget, points = smallest_budget(BUDGETS, target, measure)
    expected = min(b for b in BUDGETS if sum(b >= need for need in needs) / len(needs) >= target)
    assert budget == expected
    assert len(tried) == len(set(tried)) <= 4 and [p.budget for p in points] == sorted(tried)


def test_answers_are_compared_with_full_computes_in_a_tenant_of_their_own() -> None:
    """Chunks are warmed once as they are in production, questions leave nothing, the tenant is purged."""
    engine = FakeCalibrated([0.15] * 9 + [1.0])
    found = run(engine)
    assert (found.budget, found.is_certain) == (0.15, False)
    assert next(p for p in found.points if p.budget == 0.15).agreement == 0.9
    (warmed,) = engine.warmed
    assert warmed["chunks"] == (RIVER,) and warmed["system"] == "Answer."
    assert {a["tenant"] for a in engine.asked} == {warmed["tenant"]} == set(engine.purged)
    assert not any(a["store"] for a in engine.asked)
    assert {a["reuse"] for a in engine.asked} == {"off", "cachecraft"}


def test_certainty_needs_the_lower_end_of_the_interval() -> None:
    """A low target that all questions meet is met for certain."""
    assert run(FakeCalibrated([0.05] * 10), target=0.5).is_certain


def test_interrupted_run_goes_on() -> None:
    """Answers of a run that was stopped are not asked for again, and the result is the same."""
    with pytest.raises(KeyboardInterrupt):
        run(stopped := FakeCalibrated([0.1] * 10, dies_after=7))
    assert stopped.purged
    whole = run(resumed := FakeCalibrated([0.1] * 10))
    assert len(resumed.asked) == 10 * (1 + len(whole.points)) - 7
    assert run(again := FakeCalibrated([0.1] * 10)) == whole and again.asked == []


def test_other_setup_shares_no_answers(cache: Path) -> None:
    """Answers of one system prompt say nothing of another; a line cut off by a crash is passed over."""
    run(FakeCalibrated([0.1] * 10))
    (file,) = (cache / "calibration").glob("*.jsonl")
    file.write_text(file.read_text() + '["half a li', encoding="utf-8")
    engine = FakeCalibrated([0.1] * 10)
    other = replace(SETUP, system="Be brief.")
    CalibrationRun(engine, QUESTIONS, other, AnswerFile("model"), lambda: None).run(BUDGETS, 0.9, 0.9)
    assert len(engine.asked) >= 20


def test_no_answer_is_kept_as_text(cache: Path) -> None:
    """What stays on the disk tells equal answers from others and holds none of them."""
    run(FakeCalibrated([0.1] * 10))
    (file,) = (cache / "calibration").glob("*.jsonl")
    assert "right" not in file.read_text() and RIVER.text not in file.read_text()


def test_calibration_is_remembered_per_model(cache: Path) -> None:
    """What is saved is loaded again, for that model only; a damaged file is none."""
    save_calibration("model", FOUND)
    assert load_calibration("model") == FOUND
    assert load_calibration("other") is None
    (cache / "calibration" / "model.json").write_text("{")
    assert load_calibration("model") is None


@pytest.mark.parametrize(
    ("settings", "ratio"),
    [
        ({"strategy": "cachecraft"}, 0.2),
        ({"strategy": "cachecraft", "preset": "faithful"}, None),
        ({"strategy": "cachecraft", "recompute_ratio": 0.4}, 0.4),
        ({"strategy": "naive"}, None),
    ],
)
def test_later_engines_use_it_where_the_budget_is_left_open(
    make_engine, backend, spec_of, settings, ratio
) -> None:
    """The budget is that of the calibration with the preset and strategy it was measured for."""
    save_calibration("test-model", FOUND)
    engine = make_engine(CacheCraftConfig(self_test=False, **settings))
    engine.complete(RIVER.text, chunks=[RIVER])
    engine.complete(RIVER.text, chunks=[RIVER], recompute_ratio=0.7)
    assert [spec_of(request).recompute_ratio for request in backend.requests] == [ratio, 0.7]
    figures = engine.stats()["calibration"]
    assert (figures is not None and figures["budget"]) == (ratio == 0.2 and 0.2)


def test_engine_calibrates_and_uses_the_result(make_engine, backend, spec_of) -> None:
    """`calibrate` asks, remembers, and sets the budget of what follows."""
    engine = make_engine(CacheCraftConfig(self_test=False, strategy="cachecraft"))
    found = engine.calibrate(QUESTIONS, budgets=[0.1, 0.3], show_progress=False)
    assert (found.budget, found.points[-1].agreement) == (0.1, 1.0)
    assert load_calibration("test-model") == found
    engine.complete(RIVER.text, chunks=[RIVER])
    assert spec_of(backend.requests[-1]).recompute_ratio == 0.1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"questions": []}, "questions is empty"),
        ({"questions": ["Who?"]}, r"questions\[0\] is a str"),
        ({"target_agreement": 0.0}, "target_agreement is 0.0"),
        ({"target_agreement": 1.1}, "target_agreement is 1.1"),
        ({"confidence": 1.0}, "confidence is 1.0"),
        ({"budgets": [0.1, 1.5]}, "budgets holds 1.5"),
    ],
)
def test_wrong_arguments_are_named(engine, arguments, named) -> None:
    """Each argument that breaks its rule is named with its value, before the engine starts."""
    with pytest.raises(InvalidRequestError, match=named):
        engine.calibrate(**{"questions": QUESTIONS, **arguments})
    assert not engine.is_started


def test_question_needs_chunks() -> None:
    """A question without chunks has nothing to reuse."""
    with pytest.raises(InvalidRequestError, match="no chunks"):
        CalibrationQuestion("Who?", ())
