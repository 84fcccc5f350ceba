"""What uninitialised memory holds never reaches an answer of a model with windowed layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.engine

CELL = {
    "model": "gemma3",
    "dtype": "float32",
    "eager": True,
    "in_process": True,
    "tensor_parallel_size": 1,
    "num_prompts": 20,
}


@pytest.fixture(scope="module")
def run_with_nan_left(
    run_script: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[bool], dict[str, Any]]:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("the scratch memory in question is that of vLLM's CPU attention kernel")
    root = str(tmp_path_factory.mktemp("tiny-models"))
    return lambda divided: run_script(
        "scratch_cell.py", json.dumps({**CELL, "root": root, "divided": divided})
    )


def test_nan_in_scratch_memory_never_reaches_an_answer(
    run_with_nan_left: Callable[[bool], dict[str, Any]],
) -> None:
    result = run_with_nan_left(False)
    assert result["left_nan"]
    assert result["num_finite"] == result["num_tries"] > 0


def test_dividing_a_context_over_threads_would_let_it_through(
    run_with_nan_left: Callable[[bool], dict[str, Any]],
) -> None:
    """Why `compat.kernel_environment` forbids it. If this fails, vLLM is mended and it may go."""
    result = run_with_nan_left(True)
    if result["num_threads"] == 1:
        pytest.skip("one thread divides nothing")
    assert result["num_finite"] < result["num_tries"]
