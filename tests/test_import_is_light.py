"""Importing the package, its nouns or its planner must not load a framework."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {
    "accelerate",
    "faiss",
    "gguf",
    "langchain_core",
    "llama_index",
    "sentence_transformers",
    "torch",
    "transformers",
    "vllm",
}


def modules_loaded_by(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after `statement`."""
    script = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    finished = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return set(finished.stdout.split())


def assert_loads_none_of(names: set[str], statement: str) -> None:
    loaded = modules_loaded_by(statement)
    assert "cachecraft_rag" in loaded
    assert not loaded & names


@pytest.mark.parametrize(
    "statement",
    [
        "import cachecraft_rag",
        "from cachecraft_rag import CacheCraftConfig, Chunk, ReuseReport",
        "from cachecraft_rag import __version__, default_dtype, default_model",
    ],
)
def test_package_and_nouns_load_nothing_heavy(statement: str) -> None:
    """The package and its nouns load neither numpy nor any framework."""
    assert_loads_none_of(HEAVY | {"numpy"}, statement)


@pytest.mark.parametrize("module", ["planner", "store", "segments", "embeddings"])
def test_inner_layers_load_no_framework(module: str) -> None:
    """Planner, store, segments and the embeddings helper can be imported without torch or vLLM."""
    assert_loads_none_of(HEAVY, f"import cachecraft_rag.{module}")
