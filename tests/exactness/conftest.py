"""Runs the scripts beside this file, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunScript = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def run_script(run_python: RunScript) -> RunScript:
    """Runs a script, by its name, with arguments."""
    return lambda name, *arguments: run_python(Path(__file__).with_name(name), *arguments)
