"""What holds for all tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# A busy machine is no fault of the code: examples are not timed. Without a parent of its own the
# profile inherits all else from the one that is in force, such as Hypothesis's "ci".
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="module")
def one_faiss_thread() -> Iterator[None]:
    """For tests with many small searches: on a busy machine faiss's threads wait for each other in each."""
    faiss = pytest.importorskip("faiss")
    num_threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(num_threads)


@pytest.fixture(scope="session")
def run_python() -> Callable[..., dict[str, Any]]:
    """Runs a script in a process of its own, as an engine needs one; what it prints behind `RESULT `.
    Keywords are variables of its environment, where that does not set them."""
    return _run_python


def _run_python(script: Path, *arguments: str, **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**environment, **os.environ},
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return result
    raise AssertionError(f"{script.name} died:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
