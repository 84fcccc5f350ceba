"""The self-test's judgement, its memory, and what follows from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.engine import self_test
from cachecraft_rag.engine.api import Completion
from cachecraft_rag.engine.self_test import SelfTestResult, logprob_gap, run_self_test
from cachecraft_rag.events import Reason
from cachecraft_rag.testing import FakeEngine

PASSED = SelfTestResult(True, tolerance=1e-3)
FAILED = SelfTestResult(False, exact_gap=1.0, tolerance=1e-3, detail="exact reuse differs")


class FakeTestee:
    """Answers like a `FakeEngine`, with log-probabilities moved by `shift` for one way of asking."""

    def __init__(self, *, max_model_len: int = 4096, **shifts: float) -> None:
        self._engine = FakeEngine("a b c d e f g h")
        self.max_model_len = max_model_len
        self._shifts = shifts
        self.recomputes = True
        self.purged: list[str | None] = []
        self.tenants: set[str] = set()

    def complete(self, prompt: str, **options: Any) -> Completion:
        self.tenants.add(options["tenant"])
        completion = self._engine.complete(prompt, **options)
        is_cut = options["reuse"] == "off" and options["read_prefix_cache"]
        shift = self._shifts.get("cut" if is_cut else options["reuse"], 0.0)
        logprobs = tuple({k: v + shift for k, v in step.items()} for step in completion.logprobs or ())
        return replace(completion, logprobs=logprobs, report=self._report(completion, options["reuse"]))

    def purge(self, tenant: str | None = None) -> int:
        self.purged.append(tenant)
        return 0

    def _report(self, completion: Completion, reuse: str) -> Any:
        if reuse != "recompute_all" or not self.recomputes:
            return completion.report
        num_reused = completion.report.num_reused_tokens
        return replace(completion.report, num_reused_tokens=0, num_recomputed_tokens=num_reused)


def completion_of(*steps: tuple[int, dict[int, float]]) -> Completion:
    report = FakeEngine().complete("x").report
    return Completion(
        "", tuple(token for token, _ in steps), "stop", report, (), tuple(step for _, step in steps)
    )


def test_exact_engine_passes() -> None:
    """An engine whose answers agree passes, with the tolerance of its dtype."""
    result = run_self_test(FakeTestee(), "float32", 8)
    assert result == SelfTestResult(True, 0.0, 0.0, 0.0, 1e-3, "")
    assert run_self_test(FakeTestee(), "bfloat16", 8).tolerance == 0.06


@pytest.mark.parametrize(("mode", "name"), [("recompute_all", "recompute_all"), ("exact", "exact reuse")])
def test_answers_that_differ_fail(mode: str, name: str) -> None:
    """A gap above the tolerance fails, and the detail names the path and the figure."""
    result = run_self_test(FakeTestee(**{mode: 0.01}), "float32", 8)
    assert not result.passed
    assert result.detail == f"{name} differs from full compute by 0.0100 in log-probability"


def test_not_a_number_fails() -> None:
    """NaN log-probabilities are no agreement."""
    assert not run_self_test(FakeTestee(exact=float("nan")), "float32", 8).passed


def test_noise_widens_the_tolerance() -> None:
    """What two full computes differ by, twice, is not held against reuse."""
    result = run_self_test(FakeTestee(exact=0.015, cut=0.01), "float32", 8)
    assert result.passed
    assert result.tolerance == pytest.approx(0.02)


def test_path_that_was_not_taken_fails() -> None:
    """Agreement proves nothing where nothing was recomputed."""
    testee = FakeTestee()
    testee.recomputes = False
    result = run_self_test(testee, "float32", 8)
    assert not result.passed
    assert "recompute_all recomputed nothing" in result.detail


def test_self_test_cleans_up_its_tenants() -> None:
    """Its tenants are its own, and purged."""
    testee = FakeTestee()
    run_self_test(testee, "float32", 8)
    assert set(testee.purged) == testee.tenants
    assert not {"default"} & testee.tenants


def test_small_window_skips_the_test() -> None:
    """A window too small for its prompts is no failure of reuse."""
    result = run_self_test(FakeTestee(max_model_len=128), "float32", 8)
    assert result.passed
    assert result.detail.startswith("skipped")


def test_gap_is_taken_up_to_the_first_different_token() -> None:
    """Steps after the answers have parted are not compared."""
    first = completion_of((1, {1: -0.1, 2: -3.0}), (3, {3: -0.5}), (4, {4: -9.0}))
    second = completion_of((1, {1: -0.2, 9: -3.0}), (5, {3: -0.9, 5: -0.4}), (4, {4: -1.0}))
    assert logprob_gap(first, second) == pytest.approx(0.4)


def test_gap_without_a_common_token_is_infinite() -> None:
    """Top lists that share nothing are as far apart as can be."""
    assert logprob_gap(completion_of((1, {1: -0.1})), completion_of((2, {2: -0.1}))) == float("inf")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CACHECRAFT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_result_is_remembered_per_key(cache: Path) -> None:
    """A saved result is read back, under its own key only."""
    self_test.save_result("a", FAILED)
    assert self_test.load_result("a") == FAILED
    assert self_test.load_result("b") is None


@pytest.mark.parametrize("content", ["", "[]", '{"passed": true, "no_such_field": 1}', "\x00"])
def test_unreadable_result_is_not_believed(cache: Path, content: str) -> None:
    """A damaged file is as good as none."""
    self_test.save_result("a", PASSED)
    (cache / "self_test" / "a.json").write_text(content)
    assert self_test.load_result("a") is None


def test_cache_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch) -> None:
    """Where nothing can be written, the result is only not remembered."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CACHECRAFT_CACHE_DIR", str(tmp_path / "file"))
    self_test.save_result("a", PASSED)
    assert self_test.load_result("a") is None


def test_remembered_failure_switches_reuse_off(make_engine, backend, spec_of, cache: Path, caplog) -> None:
    """A failure of an earlier start still holds: reports say so, and the log does."""
    self_test.save_result("test-model", FAILED)
    engine = make_engine(CacheCraftConfig())
    report = engine.complete("Hello").report
    assert (report.reason, report.detail) == (Reason.SELF_TEST_FAILED, FAILED.detail)
    assert "KV reuse is off" in caplog.text


def test_remembered_success_is_not_measured_again(make_engine, backend, cache: Path) -> None:
    """A passed test costs the next start nothing."""
    self_test.save_result("test-model", PASSED)
    make_engine(CacheCraftConfig()).start()
    assert backend.requests == []


def test_first_start_measures_and_remembers(make_engine, backend, cache: Path) -> None:
    """Without a remembered result the start runs the test on the engine itself."""
    engine = make_engine(CacheCraftConfig())
    engine.start()
    assert self_test.load_result("test-model") is not None
    assert engine.stats()["engine"].get("num_requests") is None


@pytest.mark.parametrize("config", [CacheCraftConfig(self_test=False), CacheCraftConfig(host_store_bytes=0)])
def test_nothing_is_measured_where_it_is_not_wanted(make_engine, backend, cache, config) -> None:
    """No test runs where it is switched off or where nothing is stored."""
    make_engine(config).start()
    assert backend.requests == []
