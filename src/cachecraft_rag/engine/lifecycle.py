"""An engine's life: lazy start, self-test, and an end that cannot be forgotten."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.engine.audit_log import AuditLog
from cachecraft_rag.engine.loop import EngineLoop
from cachecraft_rag.engine.options import check_tenant
from cachecraft_rag.engine.start import EngineSettings, start_engine
from cachecraft_rag.errors import EngineClosedError
from cachecraft_rag.segments.known import KnownChunks

if TYPE_CHECKING:
    from cachecraft_rag.engine.running import RunningEngine


@dataclass(slots=True)
class _Live:
    """What must be ended with an engine; holds no reference to it."""

    loop: EngineLoop = field(default_factory=EngineLoop)
    running: RunningEngine | None = None
    owner_pid: int = field(default_factory=os.getpid)


class EngineLifecycle:
    """Base of `CacheCraftEngine`: everything but the calls.

    vLLM ends with `close()`, with the context manager, when the engine is garbage-collected, or with
    the program, whichever comes first.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        config: CacheCraftConfig | None = None,
        tokenizer: str | Path | None = None,
        in_process: bool = False,
        tool_parser: str | None = None,
        **vllm_engine_args: Any,
    ) -> None:
        if tokenizer is not None:
            vllm_engine_args["tokenizer"] = str(tokenizer)
        self._config = config or CacheCraftConfig()
        self._settings = EngineSettings(
            str(model) if model else "", self._config, vllm_engine_args, in_process, tool_parser
        )
        self._known = KnownChunks(self._config.max_known_chunks)
        self._audit_log = AuditLog(self._config.audit_log)
        self._live = _Live()
        # Re-entrant: the self-test makes ordinary calls while `start` holds it.
        self._start_lock = threading.RLock()
        self._is_ready = False
        self._is_closed = False
        self._shut_down = weakref.finalize(self, _shut_down, self._live)

    @property
    def config(self) -> CacheCraftConfig:
        return self._config

    @property
    def model_name(self) -> str:
        return self._settings.model

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together; starts the engine."""
        return self._started().max_model_len

    @property
    def has_tool_parser(self) -> bool:
        """Whether tool calls are read out of answers that were not bound to be one. Starts the engine where
        no `tool_parser` was given: then the model's chat template decides."""
        return self._settings.tool_parser is not None or self._started().has_tool_parser

    @property
    def is_started(self) -> bool:
        return self._is_ready and not self._is_closed

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def encode(self, text: str) -> list[int]:
        """Token ids of a text by itself: no special token is added, and none that it spells is read as one.
        Starts the engine."""
        return list(self._started().segment_tokenizer.encode_chunk(text, remember=False))

    def start(self) -> None:
        """Start vLLM now instead of at the first call. Does nothing if it runs.

        Raises:
            ConfigurationError: an engine argument or a tool parser that vLLM does not know, or a tool
                parser that does not fit the model.
            MissingDependencyError: vLLM is not installed.
            UnsupportedVersionError: vLLM is outside the tested range.
            EngineStartError: vLLM did not start; the cause is chained.
            EngineClosedError: the engine was closed.
        """
        self._started()

    def close(self) -> None:
        """End vLLM and its processes; calls that still run end with EngineClosedError."""
        try:
            if self.is_started:
                self._end()
        finally:
            self._is_closed = True
            with self._start_lock:
                self._shut_down()
            self._audit_log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _running(self) -> RunningEngine | None:
        return self._live.running

    def _started(self) -> RunningEngine:
        if self.is_started and self._running is not None:
            return self._running
        with self._start_lock:
            self._refuse_if_closed()
            return self._running or self._start()

    async def _astarted(self) -> RunningEngine:
        if self.is_started and self._running is not None:
            return self._running
        return await asyncio.to_thread(self._started)

    def _start(self) -> RunningEngine:
        running = self._live.running = start_engine(self._settings, self._live.loop, self._known)
        running.audit_log = self._audit_log
        # `weakref.finalize` alone would come after `multiprocessing`, which waits for vLLM to end. What
        # is registered last runs first, and by now vLLM has imported `multiprocessing`.
        atexit.register(self._shut_down)
        self._test_once(running)
        running.counters.clear()
        self._is_ready = True
        return running

    def _test_once(self, running: RunningEngine) -> None:
        """Called with the start lock held, before any other thread sees the engine."""

    def _end(self) -> None:
        """The engine is about to be closed."""

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise EngineClosedError("this engine was closed: make a new CacheCraftEngine to go on")

    def _tenant(self, tenant: str | None) -> str:
        check_tenant(tenant)
        return tenant or self._config.default_tenant

    def _control(self, action: str, **arguments: Any) -> Any:
        """The scheduler side's answer; None where there is none, as nothing was ever stored."""
        self._refuse_if_closed()
        if self._running is None or not self._running.is_attached:
            return None
        return self._live.loop.run(self._running.control(action, **arguments))


def _shut_down(live: _Live) -> None:
    """End vLLM and its loop."""
    if os.getpid() != live.owner_pid:
        return  # a forked child: the engine is its parent's
    live.loop.stop(live.running.shutdown if live.running else None)
