"""Chunk-level KV-cache reuse for retrieval-augmented generation with vLLM.

Names are loaded at first use, so that importing the package costs nothing and needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cachecraft_rag.chunks import Chunk
    from cachecraft_rag.config import CacheCraftConfig
    from cachecraft_rag.engine import CacheCraftEngine
    from cachecraft_rag.events import ReuseReport
    from cachecraft_rag.models import default_dtype, default_model

    __version__: str

__all__ = [
    "CacheCraftConfig",
    "CacheCraftEngine",
    "Chunk",
    "ReuseReport",
    "__version__",
    "default_dtype",
    "default_model",
]

_MODULES = {
    "CacheCraftConfig": "config",
    "CacheCraftEngine": "engine",
    "Chunk": "chunks",
    "ReuseReport": "events",
    "default_dtype": "models",
    "default_model": "models",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        value: object = _installed_version()
    elif name in _MODULES:
        from importlib import import_module

        value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _installed_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("cachecraft-rag")
    except PackageNotFoundError:
        # A source tree on the path that was never installed.
        return "0+unknown"
