"""Feedback on the real default model: what it catches, and what it leaves alone. Minutes; -m slow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def figures(run_cell: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    return run_cell("breaker_cell.py")


def test_clean_traffic_trips_nothing(figures: dict[str, Any]) -> None:
    """Over 500 clean requests, all of them reused, no chunk is quarantined and the breaker stays shut."""
    clean = figures["clean"]
    assert clean["num_reuses"] == clean["num_requests"] == 500
    assert clean["num_examined"] >= 100 and clean["num_failed"] == clean["num_dropped"] == 0
    assert clean["num_quarantines"] == clean["num_breaker_openings"] == 0


def test_corrupted_chunk_is_caught(figures: dict[str, Any]) -> None:
    """Noise that moves the first token by 0.3 to 1.0 nats is found within 20 samples, and the blame is
    on the right chunk alone."""
    chunk = figures["chunk"]
    assert 0.3 <= chunk["kl_corrupt"] <= 1.0
    assert chunk["num_samples_to_catch"] <= 20
    assert chunk["quarantined"] == [chunk["victim"]]


def test_corrupted_chunk_falls_back_and_recovers(figures: dict[str, Any]) -> None:
    """It is computed once, reused again from its new record, and released; the answers are as before."""
    chunk = figures["chunk"]
    assert chunk["fallback"] == ["computed", "quarantined"]
    assert chunk["on_probation"] == [chunk["victim"]]
    assert chunk["after_recaching"] in ("reused", "repaired", "exact")
    assert (chunk["num_quarantines"], chunk["num_releases"]) == (1, 1)
    assert chunk["kl_after"] < 0.5 * chunk["kl_corrupt"]


def test_breaker_opens_and_closes(figures: dict[str, Any]) -> None:
    """With the whole store corrupted all requests go to full compute, until samples are good again."""
    store = figures["store"]
    assert store["num_samples_to_open"] <= 40
    assert store["reason"] == "quality_breaker"
    assert store["num_requests_to_close"] <= 120
    assert store["decision_after"] == "reuse"
