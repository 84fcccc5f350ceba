"""Runs the scripts beside this file, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def run_cell(run_python: Callable[..., dict[str, Any]]) -> Callable[[str], dict[str, Any]]:
    """Runs a script, by its name, and prints its figures."""

    def run(name: str) -> dict[str, Any]:
        figures = run_python(Path(__file__).with_name(name), OMP_NUM_THREADS="1")
        print(figures)
        return figures

    return run
