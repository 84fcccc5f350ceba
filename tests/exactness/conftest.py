"""Runs the scripts beside this file, each in a process of its own, as an engine needs one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunScript = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def run_script() -> RunScript:
    """Runs a script with arguments and gives what it prints behind `RESULT `."""
    return _run_script


def _run_script(name: str, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(name)), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return result
    raise AssertionError(f"{name} died:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
