"""A short soak on a real engine: too short for its course, long enough for leaks and wrong answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.engine
def test_two_hundred_requests_leave_nothing_behind(tmp_path: Path) -> None:
    figures = tmp_path / "soak.json"
    command = [sys.executable, "-m", "benchmarks.soak", "--requests", "200", "--json", str(figures)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found = json.loads(figures.read_text())
    assert set(found["leaks"].values()) == {0}
    assert found["counts"]["num_evictions"] > 0
    assert found["num_aborted"] > 0
    assert found["num_checked_with_stored"] > 0
