"""Concurrency changes nothing: interleaved requests give what each gives alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TIE = 1e-3


@pytest.mark.engine
def test_requests_in_flight_give_what_each_gives_alone(
    run_script: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """200 mixed requests, 8 in flight, with preemptions and with aborts in the middle of a load."""
    result = run_script("concurrency_cell.py", str(tmp_path))
    assert result["num_answers"] == 200
    assert all(difference["tie"] < TIE for difference in result["differing"]), result["differing"]
    assert result["same_decisions"] == 200
    assert result["moved_chunks"] >= 60
    assert result["preemptions"] >= 20
    assert result["aborts_in_load"] >= 20
    assert result["leaks"] == {"num_pinned": 0, "num_reserved": 0, "num_running": 0}
    assert result["lost_blocks"] == 0
    assert result["check"] == []
    assert result["worker_records"] == result["num_records"]
