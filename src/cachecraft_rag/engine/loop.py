"""One asyncio loop in one daemon thread: where an engine's requests live, whoever calls.

Callers may be plain threads, threads with a running loop of their own (notebooks), or coroutines of
any loop. `nest_asyncio` was rejected: it patches asyncio for the whole program.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Generic, TypeVar

from cachecraft_rag.errors import EngineClosedError

T = TypeVar("T")
_CANCEL_TIMEOUT_S = 5.0
_STOP_TIMEOUT_S = 40.0


class EngineLoop:
    """An event loop in its own thread, started by the first use."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_stopped = False
        self._ours: weakref.WeakSet[Coroutine[Any, Any, Any]] = weakref.WeakSet()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run to the end and return the result, blocking only the calling thread.

        Raises:
            EngineClosedError: the loop was stopped, before or during the run.
        """
        future = self.submit(coroutine)
        try:
            return future.result()
        except concurrent.futures.CancelledError as error:
            raise _closed() from error
        finally:
            future.cancel()

    async def arun(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """As `run`, awaitable from any other loop; cancelling the caller cancels the coroutine."""
        future = self.submit(coroutine)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if self._is_stopped and not (task and task.cancelling()):
                raise _closed() from error
            raise

    def stream(self, make: Callable[[], AsyncGenerator[T, None]]) -> Iterator[T]:
        """Iterate over an async generator that runs on the loop; closing the iterator closes it."""
        source = _Source(make())
        try:
            while (item := self.run(source.next())) is not None:
                yield item
        finally:
            self._close_soon(source)

    async def astream(self, make: Callable[[], AsyncGenerator[T, None]]) -> AsyncIterator[T]:
        """As `stream`, for a consumer on any other loop."""
        source = _Source(make())
        try:
            while (item := await self.arun(source.next())) is not None:
                yield item
        finally:
            self._close_soon(source)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Schedule `coroutine` on the loop, without waiting for it.

        Raises:
            EngineClosedError: the loop was stopped.
        """
        with self._lock:
            if self._is_stopped:
                coroutine.close()
                raise _closed()
            self._ours.add(coroutine)
            return asyncio.run_coroutine_threadsafe(coroutine, self._started())

    def stop(self, last: Callable[[], Coroutine[Any, Any, object]] | None = None) -> None:
        """Cancel what was submitted, run `last`, and end the thread. Further calls do nothing."""
        with self._lock:
            loop, thread, self._is_stopped = self._loop, self._thread, True
            self._loop = None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._finish(last), loop)
        # On the loop's own thread, where a garbage-collected engine may end, there is no waiting.
        if thread is not threading.current_thread():
            thread.join(_STOP_TIMEOUT_S)

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            # Daemon, so that a program that forgot `close()` can still exit.
            self._thread = threading.Thread(
                target=_run_loop, args=(self._loop,), name="cachecraft-engine", daemon=True
            )
            self._thread.start()
        return self._loop

    async def _finish(self, last: Callable[[], Coroutine[Any, Any, object]] | None) -> None:
        try:
            # Only our own tasks: vLLM keeps some on this loop, which `last` ends in vLLM's own order.
            await _cancel({task for task in asyncio.all_tasks() if task.get_coro() in self._ours})
            if last is not None:
                await last()
            await _cancel(asyncio.all_tasks())
        finally:
            asyncio.get_running_loop().stop()

    def _close_soon(self, source: _Source[Any]) -> None:
        # Not waited for: a garbage-collected iterator may be closed on the loop's own thread.
        with contextlib.suppress(EngineClosedError):
            self.submit(source.close())


class _Source(Generic[T]):
    """An async generator that can be closed while one `next` is being cancelled."""

    def __init__(self, generator: AsyncGenerator[T, None]) -> None:
        self._generator = generator
        self._lock = asyncio.Lock()

    async def next(self) -> T | None:
        async with self._lock:
            return await anext(self._generator, None)

    async def close(self) -> None:
        async with self._lock:
            await self._generator.aclose()


def _closed() -> EngineClosedError:
    return EngineClosedError("the engine was closed: make a new CacheCraftEngine to go on")


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


async def _cancel(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancel all but the current task, and wait until they have ended."""
    others = tasks - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=_CANCEL_TIMEOUT_S)
