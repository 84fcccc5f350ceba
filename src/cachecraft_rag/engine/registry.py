"""One engine per set of equal settings in a process: a second one would find no memory left."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.engine.engine import CacheCraftEngine

_lock = threading.Lock()
# Weak, so that an engine ends with its last user and not with the process.
_engines: WeakValueDictionary[tuple[object, ...], CacheCraftEngine] = WeakValueDictionary()


def shared_engine(
    model: str | Path, config: CacheCraftConfig | None = None, **engine_args: Any
) -> CacheCraftEngine:
    """The live engine with these settings, made if there is none or it was closed.

    Args:
        engine_args: as of `CacheCraftEngine`.

    Raises:
        ConfigurationError: as `CacheCraftEngine`.
    """
    config = config or CacheCraftConfig()
    arguments = tuple(sorted((name, repr(value)) for name, value in engine_args.items()))
    key = (str(model), config, arguments)
    with _lock:
        engine = _engines.get(key)
        if engine is None or engine.is_closed:
            engine = _engines[key] = CacheCraftEngine(model, config=config, **engine_args)
        return engine
