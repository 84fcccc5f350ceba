"""Making, starting, sharing and ending an engine."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import threading
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.engine import CacheCraftEngine, shared_engine, start
from cachecraft_rag.errors import (
    ConfigurationError,
    EngineClosedError,
    EngineStartError,
    MissingDependencyError,
)


@pytest.mark.parametrize("model", ["", None])
def test_empty_model_is_refused(model) -> None:
    """The model must be named."""
    with pytest.raises(ConfigurationError, match="model is empty"):
        CacheCraftEngine(model)


@pytest.mark.parametrize("model", ["/no/such/folder", "./no-such-folder", Path("/no/such/folder")])
def test_missing_model_folder_is_refused(model) -> None:
    """A path that does not exist is found when the engine is made."""
    with pytest.raises(ConfigurationError, match="does not exist"):
        CacheCraftEngine(model)


def test_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    """A folder without config.json is no model."""
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        CacheCraftEngine(tmp_path)


@pytest.mark.parametrize("name", ["kv_transfer_config", "worker_extension_cls"])
def test_arguments_that_attach_the_connector_are_ours(model_folder: Path, name: str) -> None:
    """What attaches our connector cannot be set by the user."""
    with pytest.raises(ConfigurationError, match=name):
        CacheCraftEngine(model_folder, **{name: "x"})


def test_unknown_strategy_is_refused(model_folder: Path) -> None:
    """The strategy of "auto" must exist."""
    with pytest.raises(ConfigurationError, match="strategy is 'wishful'"):
        CacheCraftEngine(model_folder, config=CacheCraftConfig(strategy="wishful"))


def test_closed_engine_says_so(engine: CacheCraftEngine, backend) -> None:
    """After `close` every call says that the engine was closed; closing again does nothing."""
    engine.start()
    engine.close()
    engine.close()
    assert backend.is_shut_down
    for call in (lambda: engine.complete("Hello"), engine.stats, engine.start):
        with pytest.raises(EngineClosedError):
            call()


def test_fault_of_the_last_write_leaves_no_vllm_running(engine: CacheCraftEngine, backend, caplog) -> None:
    """What cannot be written any more is logged, and vLLM is ended all the same."""
    engine.start()
    backend.replies["flush"] = OSError("disk full")
    engine.close()
    assert backend.is_shut_down
    assert "disk full" in caplog.text


def test_engine_that_breaks_as_it_ends_is_shut_down(engine: CacheCraftEngine, backend, monkeypatch) -> None:
    """Also an error that nobody thought of leaves no vLLM behind."""
    engine.start()
    monkeypatch.setattr(backend, "send_control", AsyncMock(side_effect=RuntimeError("broken")))
    with pytest.raises(RuntimeError, match="broken"):
        engine.close()
    assert backend.is_shut_down
    with pytest.raises(EngineClosedError):
        engine.complete("Hello")


def test_engine_closed_before_its_start_never_starts(engine: CacheCraftEngine) -> None:
    """A closed engine is not started by the next call."""
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.start()


async def test_call_in_flight_ends_when_the_engine_is_closed(engine, backend) -> None:
    """A call that runs while the engine is closed ends with EngineClosedError, and is aborted."""
    backend.gate = asyncio.Event()
    task = asyncio.create_task(engine.acomplete("Hello"))
    while not backend.requests:
        await asyncio.sleep(0)
    await asyncio.to_thread(engine.close)
    with pytest.raises(EngineClosedError):
        await task
    assert backend.num_aborted == 1


def test_forgotten_engine_is_ended(make_engine, backend, model_folder) -> None:
    """An engine that nobody holds ends vLLM without being closed."""
    make_engine()  # installs the fake start
    forgotten = CacheCraftEngine(model_folder, config=CacheCraftConfig(self_test=False))
    forgotten.complete("Hello")
    del forgotten
    gc.collect()
    assert backend.is_shut_down


def test_threads_start_one_engine(make_engine, backend, monkeypatch) -> None:
    """Calls from several threads at once start vLLM once."""
    engine, starts = make_engine(), []
    from cachecraft_rag.engine import lifecycle

    original = lifecycle.start_engine
    monkeypatch.setattr(lifecycle, "start_engine", lambda *a: starts.append(1) or original(*a))
    threads = [threading.Thread(target=engine.complete, args=("Hello",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(starts), len(backend.requests)) == (1, 8)


def test_failed_start_can_be_tried_again(engine, backend, monkeypatch) -> None:
    """A start that failed leaves an engine that can still start."""
    from cachecraft_rag.engine import lifecycle

    def fail(*_: object) -> None:
        raise EngineStartError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(lifecycle, "start_engine", fail)
        with pytest.raises(EngineStartError, match="no memory"):
            engine.start()
    assert engine.complete("Hello").text == "one two"


def test_any_failure_of_vllm_is_a_start_error_with_advice(model_folder, monkeypatch) -> None:
    """What vLLM raises is chained to an error that says what to try."""

    async def fail(*_: object) -> None:
        raise RuntimeError("Engine core initialization failed")

    monkeypatch.setattr(start, "_start", fail)
    with pytest.raises(EngineStartError, match="max_model_len") as caught:
        CacheCraftEngine(model_folder).start()
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "initialization failed" in str(caught.value)


def test_missing_main_guard_is_explained(model_folder, monkeypatch) -> None:
    """A start inside a child that imports the main script names the missing guard."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(EngineStartError, match="__main__"):
        CacheCraftEngine(model_folder).start()


def test_missing_vllm_names_the_extra(model_folder, monkeypatch) -> None:
    """Without vLLM the error holds the command that installs it."""
    monkeypatch.setattr(start.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingDependencyError, match="pip install"):
        CacheCraftEngine(model_folder).start()


def test_equal_settings_share_an_engine(model_folder: Path) -> None:
    """Equal settings give the same engine, other settings another one."""
    config = CacheCraftConfig(preset="fast")
    first = shared_engine(model_folder, config, max_model_len=256)
    assert shared_engine(str(model_folder), CacheCraftConfig(preset="fast"), max_model_len=256) is first
    assert shared_engine(model_folder, config, max_model_len=512) is not first
    assert shared_engine(model_folder, max_model_len=256) is not first


def test_closed_engine_is_not_shared(model_folder: Path) -> None:
    """After `close` the same settings give a new engine."""
    first = shared_engine(model_folder)
    first.close()
    assert shared_engine(model_folder) is not first
