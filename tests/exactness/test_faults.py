"""A fault in the cache costs at most a full compute, with a reason; it never kills the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.engine
EXACT = 1e-3


@pytest.fixture(scope="module")
def outcomes(run_script: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What became of one request after another, each with a fault planted in another hook."""
    return run_script("faults_cell.py", str(tmp_path_factory.mktemp("models")))


def test_record_that_is_gone_is_computed_instead(outcomes: dict[str, Any]) -> None:
    """The recompute pass makes good for KV that cannot be loaded, and says so."""
    outcome = outcomes["lost_record"]
    assert outcome["gap"] < EXACT
    assert outcome["reason"] == "load_failed"
    assert set(outcome["chunks"]) == {"computed"} and outcome["repaired"] > 0
    assert outcomes["after_lost_record"]["reason"] == "not_cached"
    assert outcomes["after_lost_record"]["gap"] < EXACT


def test_failed_plan_is_full_compute(outcomes: dict[str, Any]) -> None:
    """Without a plan the prompt is computed in full."""
    assert outcomes["plan"]["reason"] == "plan_failed" and outcomes["plan"]["decision"] == "full"
    assert outcomes["plan"]["gap"] < EXACT


@pytest.mark.parametrize("kind", ["pass", "job"])
def test_broken_promise_fails_the_request_only(outcomes: dict[str, Any], kind: str) -> None:
    """Promised KV that never came ends the request with an error, which the driver answers again;
    nothing of it stays in vLLM's own cache."""
    assert outcomes[kind]["ends"] in ("error", "GenerationError")
    assert outcomes[f"after_{kind}"]["gap"] < EXACT


@pytest.mark.parametrize("kind", ["capture", "open_record", "reserve"])
def test_failed_capture_stores_nothing(outcomes: dict[str, Any], kind: str) -> None:
    """The answer is right and no half record is left."""
    assert outcomes[kind]["gap"] < EXACT
    assert outcomes[kind]["num_records"] == 0


def test_record_without_a_profile_is_still_used(outcomes: dict[str, Any]) -> None:
    """A profile that could not be measured makes the planner repair more, no more than that."""
    assert outcomes["profile"]["num_records"] > 0
    assert set(outcomes["without_profile"]["chunks"]) <= {"repaired", "reused", "exact"}


def test_nothing_is_left_behind(outcomes: dict[str, Any]) -> None:
    """After all faults nothing is pinned, reserved or running, and the books add up."""
    assert outcomes["leaks"] == {"num_pinned": 0, "num_reserved": 0, "num_running": 0}
    assert outcomes["check"] == []
