"""A model's hold on its engine: made by the first use, shared by copies, let go by `close`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.engine import ChatEngine, shared_engine
from cachecraft_rag.errors import EngineClosedError


class EngineHandle:
    """Holds an engine, or how to make one, until it is closed. Copying it, deeply too, gives the same
    handle: an engine is a resource of the process."""

    def __init__(
        self, engine: ChatEngine | None = None, make: Callable[[], ChatEngine] | None = None
    ) -> None:
        self._engine = engine
        self._make = make
        self._lock = threading.Lock()

    @classmethod
    def shared(cls, model: str, config: CacheCraftConfig, engine_args: Mapping[str, Any]) -> EngineHandle:
        """A handle on the process's one engine with these settings."""
        return cls(make=lambda: shared_engine(model, config, **engine_args))

    def get(self) -> ChatEngine:
        """The engine; does not start it.

        Raises:
            ConfigurationError: the settings make no engine.
            EngineClosedError: the handle was closed.
        """
        with self._lock:
            if self._engine is None and self._make is not None:
                self._engine = self._make()
            if self._engine is None:
                raise EngineClosedError("this CacheCraftLLM was closed: make a new one to go on")
            return self._engine

    def close(self) -> None:
        with self._lock:
            self._engine = self._make = None

    def __copy__(self) -> EngineHandle:
        return self

    def __deepcopy__(self, memo: Mapping[int, object]) -> EngineHandle:
        return self

    # Pickled without the engine: the model that holds it makes a new handle when it is unpickled.
    def __reduce__(self) -> tuple[type[EngineHandle], tuple[()]]:
        return EngineHandle, ()
