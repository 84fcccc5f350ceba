"""How a soak drives an engine, on a fake one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from benchmarks.soak_parts.churn import Abort, Action, Churn, Event, Mix, Version
from benchmarks.soak_parts.driving import COUNTS, LEAKS, Soak
from benchmarks.soak_parts.figures import Outcome, judge
from benchmarks.soak_parts.texts import Words
from benchmarks.soak_parts.workers import WorkerFigures

from cachecraft_rag.engine.api import Completion
from cachecraft_rag.testing import FakeEngine

MIX = Mix(num_documents=6, num_chunks=(1, 3), check_every=5, purge_every=20, replace_every=8)
OLD, NEW = Version(2, 0), Version(2, 1)


class Engine(FakeEngine):
    """With the operator's calls. `leak`: what is pinned at the end."""

    def __init__(self, leak: int = 0, is_failing: bool = False) -> None:
        super().__init__("one two three")
        self.leak = leak
        self.is_failing = is_failing
        self.purged: list[str | None] = []

    async def acomplete(self, prompt: str, **options: Any) -> Completion:
        if self.is_failing:
            raise RuntimeError("boom")
        return await super().acomplete(prompt, **options)

    def stats(self) -> dict[str, Any]:
        figures = {**dict.fromkeys((*LEAKS, *COUNTS), 0), "num_records": 4, "num_free_blocks": 100}
        return {**figures, "num_pinned": self.leak}

    def check(self) -> list[str]:
        return []

    def purge(self, tenant: str | None = None) -> int:
        self.purged.append(tenant)
        return 0

    def drain_feedback(self) -> None:
        pass


def held(num_records: int) -> Callable[[], WorkerFigures]:
    return lambda: WorkerFigures(num_records, 0, 0)


def soak(engine: Any, events: Any, num_worker_records: int = 4) -> Outcome:
    run = Soak(engine, Words(5, 9), 3, 10, held(num_worker_records), lambda sample: None)
    return asyncio.run(run.run(iter(events)))


def ask(version: Version, **changed: Any) -> Event:
    return Event(Action.ASK, 0, "red", (version,), **changed)


def failed(outcome: Outcome) -> list[str]:
    return [each.name for each in judge(outcome) if each.has_passed is False]


def test_run_carries_out_all_events_and_samples_them() -> None:
    engine = Engine()
    outcome = soak(engine, Churn(MIX, 1).events(40))
    assert [sample.num_questions for sample in outcome.samples] == [10, 20, 30, 40]
    assert outcome.errors == []
    assert outcome.num_aborted == 40 // MIX.abort_every
    assert sorted(engine.purged) == ["blue", "red"]  # type: ignore[type-var]
    assert sum(call.method == "replace" for call in engine.calls) == 5
    assert all(sample.driver_bytes > 0 and 0 < sample.hit_rate < 1 for sample in outcome.samples)


def test_checked_question_is_asked_in_three_more_ways_that_store_nothing() -> None:
    engine = Engine()
    outcome = soak(engine, [ask(OLD, is_checked=True)])
    asked = [(call.options["reuse"], call.options.get("store", True)) for call in engine.calls]
    assert asked == [("auto", True), ("off", False), ("recompute_all", False), ("exact", False)]
    assert list(outcome.gaps) == [0.0]


def test_aborts_end_their_requests() -> None:
    engine = Engine()
    outcome = soak(engine, [ask(OLD, abort=Abort.CLOSE), ask(OLD, abort=Abort.CANCEL, abort_after_s=0.01)])
    assert (outcome.num_aborted, list(outcome.errors)) == (2, [])
    assert [call.method for call in engine.calls] == ["astream_complete", "acomplete"]


def test_replaced_version_that_is_still_reused_is_counted() -> None:
    """The fake engine remembers texts only, so it does reuse what was replaced."""
    replaced = Event(Action.REPLACE, 0, "red", (NEW,))
    run = Soak(Engine(), Words(), 1, 10, held(4), lambda sample: None)  # type: ignore[arg-type]
    outcome = asyncio.run(run.run(iter([replaced, ask(OLD), ask(OLD), ask(NEW)])))
    assert outcome.num_stale == 1


@pytest.mark.parametrize("action", [Action.INVALIDATE, Action.PURGE])
def test_what_was_invalidated_since_may_come_back_in_any_version(action: Action) -> None:
    replaced, dropped = Event(Action.REPLACE, 0, "red", (NEW,)), Event(action, 0, "red", (NEW,))
    run = Soak(Engine(), Words(), 1, 10, held(4), lambda sample: None)  # type: ignore[arg-type]
    outcome = asyncio.run(run.run(iter([replaced, dropped, ask(OLD), ask(OLD)])))
    assert outcome.num_stale == 0


def test_leaks_fail_the_run() -> None:
    assert "leaks" not in failed(soak(Engine(), Churn(MIX, 1).events(20)))
    assert "leaks" in failed(soak(Engine(leak=1), Churn(MIX, 1).events(20)))
    assert "leaks" in failed(soak(Engine(), Churn(MIX, 1).events(20), num_worker_records=5))


def test_request_that_fails_is_an_error_of_the_run_and_ends_nothing() -> None:
    outcome = soak(Engine(is_failing=True), Churn(MIX, 1).events(20))
    assert "failed requests" in failed(outcome)
    assert outcome.samples[-1].num_questions == 20
