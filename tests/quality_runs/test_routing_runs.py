"""Where questions go on the real default model once `max_complexity` is set. -m slow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def counts(run_cell: Callable[[str], dict[str, Any]]) -> dict[str, dict[str, int]]:
    return run_cell("routing_cell.py")


def test_planted_hard_questions_go_to_full_compute(counts: dict[str, dict[str, int]]) -> None:
    """At least nine of ten, and each of them says why."""
    hard = counts["hard"]
    assert set(hard) <= {"full complex_question", "reuse"}
    assert hard["full complex_question"] >= 0.9 * sum(hard.values())


def test_plain_questions_are_reused(counts: dict[str, dict[str, int]]) -> None:
    """At least eight of ten of the demo's questions, each of which one passage answers."""
    plain = counts["plain"]
    assert plain["reuse"] >= 0.8 * sum(plain.values())
