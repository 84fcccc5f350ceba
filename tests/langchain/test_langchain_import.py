"""What importing the adapter needs and loads."""

from __future__ import annotations

import subprocess
import sys

ADAPTER = "cachecraft_rag.langchain"


def run(script: str) -> str:
    """Standard output of a fresh interpreter."""
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_missing_langchain_names_the_extra() -> None:
    """Without langchain-core the error says how to install it."""
    script = (
        "import sys; sys.modules['langchain_core'] = None\n"
        "from cachecraft_rag.errors import MissingDependencyError\n"
        f"try: import {ADAPTER}\n"
        "except MissingDependencyError as error: print(error)"
    )
    assert "pip install 'cachecraft-rag[langchain]'" in run(script)


def test_adapter_loads_no_engine_and_no_other_framework() -> None:
    """Importing it and making a model load neither vLLM nor torch, FAISS or LlamaIndex."""
    script = (
        f"import sys; from {ADAPTER} import ChatCacheCraft; ChatCacheCraft(model='some-model')\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    loaded = set(run(script).split())
    assert "langchain_core" in loaded
    assert not loaded & {"faiss", "llama_index", "sentence_transformers", "torch", "transformers", "vllm"}
