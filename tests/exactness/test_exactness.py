"""Recompute-all equals full prefill, exact reuse is exact, and reuse never poisons vLLM's own cache.

Every cell runs in a process of its own (`cell.py`): models, dtypes, eager and compiled, one process
or several, tensor parallel 1 and 2. `make exactness` runs all cells, `make test` four, and CI with
these a fourth of them, with fewer prompts, in which every two values meet.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

# The large one first, so that it does not run alone at the end.
MODELS = ("default", "llama", "qwen2", "qwen3", "mistral", "gemma3")
MODES = {
    "eager-inproc": {"eager": True, "in_process": True, "tensor_parallel_size": 1},
    "eager-mp": {"eager": True, "in_process": False, "tensor_parallel_size": 1},
    "eager-mp-tp2": {"eager": True, "in_process": False, "tensor_parallel_size": 2},
    "compiled-inproc": {"eager": False, "in_process": True, "tensor_parallel_size": 1},
    "compiled-mp": {"eager": False, "in_process": False, "tensor_parallel_size": 1},
    "compiled-mp-tp2": {"eager": False, "in_process": False, "tensor_parallel_size": 2},
}
NUM_PROMPTS = 50
NUM_PAIRWISE_PROMPTS = 15
"""Most of a cell's time on a slow machine goes into its prompts; what a setting breaks shows in few."""
FLOAT32_LOGPROB_GAP = 1e-3
TIE = 1e-3
"""Two candidates closer than this are a tie in float32: rounding in another batch shape may turn it."""

# SmolLM2 has 9 query and 3 key/value heads: they cannot be split over 2 ranks.
CELLS = [
    (model, dtype, mode)
    for model in MODELS
    for dtype in ("float32", "bfloat16")
    for mode in MODES
    if not (model == "default" and mode.endswith("tp2"))
]
SMALL = [
    ("llama", "float32", "eager-inproc"),
    ("gemma3", "float32", "eager-mp"),
    ("qwen3", "float32", "eager-mp-tp2"),
    ("qwen2", "bfloat16", "eager-inproc"),
]
# With SMALL each model once in each layout, which is the fewest cells in which every two values can meet.
PAIRWISE = [
    # What runs where a user sets nothing. The large ones first, so that neither runs alone at the end.
    ("default", "bfloat16", "eager-mp"),
    ("default", "float32", "compiled-inproc"),
    ("llama", "float32", "compiled-mp"),
    ("llama", "bfloat16", "compiled-mp-tp2"),
    ("qwen2", "float32", "eager-mp"),
    ("qwen2", "float32", "compiled-mp-tp2"),
    ("qwen3", "bfloat16", "compiled-inproc"),
    ("qwen3", "bfloat16", "eager-mp"),
    ("mistral", "float32", "compiled-inproc"),
    ("mistral", "bfloat16", "compiled-mp"),
    ("mistral", "bfloat16", "eager-mp-tp2"),
    # NaN in a kernel's scratch memory once came up in this cell only: see test_scratch_memory.py.
    ("gemma3", "float32", "eager-inproc"),
    ("gemma3", "bfloat16", "compiled-mp-tp2"),
]

Cell = tuple[str, str, str]
RunCell = Callable[[dict[str, Any]], dict[str, Any]]
CheckCell = Callable[[str, str, str, int], None]


@pytest.fixture(scope="session")
def run_cell(run_script: Callable[..., dict[str, Any]]) -> RunCell:
    return lambda cell: run_script("cell.py", json.dumps(cell))


@pytest.fixture(scope="session")
def bfloat16_noise(run_cell: RunCell, models_root: str) -> Callable[[str, int], float]:
    """How far two full prefills of a model are apart that are cut at 512 and at 8192 tokens."""

    @functools.cache
    def measure(model: str, num_prompts: int) -> float:
        cell = {**MODES["eager-inproc"], "model": model, "dtype": "bfloat16", "root": models_root}
        return float(run_cell({**cell, "num_prompts": num_prompts, "noise_only": True})["noise"])

    return measure


@pytest.fixture(scope="session")
def models_root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("tiny-models"))


def assert_same_answers(result: dict[str, Any], kind: str) -> None:
    assert max(result["gaps"][kind]) <= FLOAT32_LOGPROB_GAP, result["differences"]
    assert all(tie <= TIE for tie in result["ties"].get(kind, ())), result["differences"]


def assert_within_noise(result: dict[str, Any], kind: str, noise: float) -> None:
    assert max(result["gaps"][kind]) <= 2 * noise


def assert_reuse_was_real(result: dict[str, Any], num_prompts: int) -> None:
    counts = result["counts"]
    assert counts["recomputed_tokens"] > 50 * num_prompts
    assert counts["exact_reused_tokens"] > 50 * num_prompts
    assert counts["shifted_reused_tokens"] > 50 * counts["moved_requests"]
    assert counts["approximate_requests"] == counts["moved_requests"] >= num_prompts // 5
    assert counts["follow_up_prefix_hits"] == counts["follow_ups"] > 0
    # Reuse without repair must differ somewhere, or the comparison could not see an error at all.
    assert result["approximation"] > FLOAT32_LOGPROB_GAP


def assert_live_selection_repeats(result: dict[str, Any]) -> None:
    """Tokens chosen by the workers while the request runs are the same ones the next time."""
    for strategy in ("focus", "cacheblend"):
        assert result["counts"][f"{strategy}_tokens"] > 0
        assert max(result["gaps"][f"{strategy}_again"]) <= FLOAT32_LOGPROB_GAP, result["differences"]


def assert_nothing_leaked(result: dict[str, Any]) -> None:
    assert result["check"] == []
    assert result["leaks"] == {"num_pinned": 0, "num_reserved": 0, "num_running": 0}


@pytest.fixture(scope="session")
def check_cell(run_cell: RunCell, bfloat16_noise: Callable[[str, int], float], models_root: str) -> CheckCell:
    """Runs one cell and checks all that must hold in it."""

    def check(model: str, dtype: str, mode: str, num_prompts: int) -> None:
        cell = {"model": model, "dtype": dtype, "root": models_root, "num_prompts": num_prompts}
        result = run_cell({**MODES[mode], **cell})
        assert_reuse_was_real(result, num_prompts)
        assert_live_selection_repeats(result)
        assert_nothing_leaked(result)
        for kind in ("recompute_all", "exact", "exact_after_reuse", "follow_up"):
            if dtype == "float32":
                assert_same_answers(result, kind)
            else:
                assert_within_noise(result, kind, bfloat16_noise(model, num_prompts))

    return check


def grouped(cells: Sequence[Cell]) -> list[Any]:
    """Cells of one model and dtype run in one worker, which measures their noise once."""
    return [pytest.param(*cell, marks=pytest.mark.xdist_group("-".join(cell[:2]))) for cell in cells]


def pairs_of(cells: Iterable[Cell]) -> set[tuple[object, ...]]:
    """All pairs of values of two settings that meet in a cell."""
    found: set[tuple[object, ...]] = set()
    for model, dtype, mode in cells:
        way = MODES[mode]
        layout = (way["in_process"], way["tensor_parallel_size"])
        settings = (("model", model), ("dtype", dtype), ("eager", way["eager"]), ("layout", layout))
        found.update(combinations(settings, 2))
    return found


def test_every_two_values_meet_in_ci() -> None:
    """Any two values of model, dtype, compilation and layout that the matrix has together, CI has too;
    and each dtype in each way of running the engine."""
    in_ci = [*SMALL, *PAIRWISE]
    assert len(set(in_ci)) == len(in_ci)  # none runs twice
    assert set(in_ci) <= set(CELLS)
    assert pairs_of(in_ci) == pairs_of(CELLS)
    assert {cell[1:] for cell in in_ci} == {cell[1:] for cell in CELLS}


@pytest.mark.exactness
@pytest.mark.parametrize(("model", "dtype", "mode"), grouped(CELLS))
def test_matrix(check_cell: CheckCell, model: str, dtype: str, mode: str) -> None:
    """Every model, dtype and way of running the engine keeps the invariants on 50 prompts."""
    check_cell(model, dtype, mode, NUM_PROMPTS)


@pytest.mark.pairwise
@pytest.mark.parametrize(("model", "dtype", "mode"), grouped(PAIRWISE))
def test_pairwise(check_cell: CheckCell, model: str, dtype: str, mode: str) -> None:
    """Cells in which, with those of `test_small_matrix`, every two settings meet, on fewer prompts."""
    check_cell(model, dtype, mode, NUM_PAIRWISE_PROMPTS)


@pytest.mark.engine
@pytest.mark.parametrize(("model", "dtype", "mode"), SMALL)
def test_small_matrix(check_cell: CheckCell, model: str, dtype: str, mode: str) -> None:
    """Four cells of the matrix, in every test run."""
    check_cell(model, dtype, mode, NUM_PROMPTS)
