"""The loop in its own thread, by itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator

import pytest

from cachecraft_rag.engine.loop import EngineLoop
from cachecraft_rag.errors import EngineClosedError


@pytest.fixture
def loop():
    loop = EngineLoop()
    yield loop
    loop.stop()


async def thread_name() -> str:
    return threading.current_thread().name


async def fail() -> None:
    raise ValueError("broken")


class Numbers:
    """Counts up to `end`, and notes when it is closed."""

    def __init__(self, end: int) -> None:
        self.end = end
        self.closed = threading.Event()

    async def generate(self) -> AsyncGenerator[int, None]:
        try:
            for number in range(1, self.end + 1):
                yield number
        finally:
            self.closed.set()


def test_coroutines_run_on_the_loop_s_thread(loop: EngineLoop) -> None:
    """Whoever calls, the coroutine runs on the engine's thread."""
    assert loop.run(thread_name()) == "cachecraft-engine"


async def test_awaiting_leaves_the_caller_s_loop_free(loop: EngineLoop) -> None:
    """While one awaits the engine's loop, other tasks of the caller's loop go on."""
    release = threading.Event()

    async def wait() -> str:
        return str(await asyncio.to_thread(release.wait))

    task = asyncio.create_task(loop.arun(wait()))
    await asyncio.sleep(0)
    release.set()
    assert await task == "True"


def test_errors_come_back_to_the_caller(loop: EngineLoop) -> None:
    """An exception on the loop is raised in the caller's thread."""
    with pytest.raises(ValueError, match="broken"):
        loop.run(fail())


async def test_streams_give_every_item_in_order(loop: EngineLoop) -> None:
    """Blocking and awaited iteration give the same items."""
    assert list(loop.stream(Numbers(4).generate)) == [1, 2, 3, 4]
    assert [item async for item in loop.astream(Numbers(4).generate)] == [1, 2, 3, 4]


def test_closed_stream_closes_its_source(loop: EngineLoop) -> None:
    """Leaving a stream early closes the generator behind it."""
    numbers = Numbers(100)
    stream = loop.stream(numbers.generate)
    assert next(stream) == 1
    stream.close()
    assert numbers.closed.wait(timeout=10)


def test_stop_cancels_before_it_runs_the_last_step(loop: EngineLoop) -> None:
    """What was submitted has ended when the last step runs."""
    order: list[str] = []
    begun = threading.Event()

    async def forever() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            order.append("cancelled")

    async def last() -> None:
        order.append("last")

    future = loop.submit(forever())
    assert begun.wait(timeout=10)
    loop.stop(last)
    assert order == ["cancelled", "last"]
    assert future.cancelled()


def test_stopped_loop_refuses_work(loop: EngineLoop) -> None:
    """After `stop`, and after a second one, nothing is taken any more."""
    loop.run(thread_name())
    loop.stop()
    loop.stop()
    with pytest.raises(EngineClosedError):
        loop.run(thread_name())
