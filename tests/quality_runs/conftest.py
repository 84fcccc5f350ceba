"""Runs the scripts beside this file, each in a process of its own, as an engine needs one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def run_cell() -> Callable[[str], dict[str, Any]]:
    """Runs a script and gives what it prints behind `RESULT `."""
    return _run_cell


def _run_cell(name: str) -> dict[str, Any]:
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    script = Path(__file__).with_name(name)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, env=environment
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            print(line)
            result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return result
    raise AssertionError(f"{name} died:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
