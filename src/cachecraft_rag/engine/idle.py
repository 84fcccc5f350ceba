"""Work for the time in which no request runs: it gives way at once when one comes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

IDLE_BEFORE_WORK_S = 0.2
"""Work starts when no request came for so long: in a client's pause between two questions its
prefill would hold up the second by one engine step."""


class IdleJob(Protocol):
    """A source of work, asked for one piece at a time.

    A piece is cancelled when a request comes, so what is not done by then stays to be done. It handles
    its own faults, as there is no user to tell, and gets on with each of them, so that work ends.
    """

    @property
    def has_work(self) -> bool: ...
    async def do_piece(self) -> None: ...


class IdleWork:
    """Does the pieces of its jobs, those of the first job first. Belongs to the engine's loop."""

    def __init__(self, *, idle_before_work_s: float = IDLE_BEFORE_WORK_S) -> None:
        self._jobs: Sequence[IdleJob] = ()
        self._drained: list[IdleJob] = []
        self._idle_before_work_s = idle_before_work_s
        self._num_running = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._is_stopped = False
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def add(self, job: IdleJob) -> None:
        self._jobs = (*self._jobs, job)

    @contextmanager
    def traffic(self) -> Iterator[None]:
        """Around every request: stops work under way, and lets it go on after the last one."""
        self._num_running += 1
        self._is_idle.clear()
        self._stop_work()
        try:
            yield
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._is_idle.set()
                self.work_soon()

    def work_soon(self) -> None:
        """There may be work: start on it after a while, unless a request runs or comes by then."""
        if self._timer is not None:
            self._timer.cancel()
        if self._is_idle.is_set() and not self._is_stopped and any(job.has_work for job in self._jobs):
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._idle_before_work_s, self._start_work)

    async def drain(self, job: IdleJob) -> None:
        """Do all that a job has to do now, or as soon as no request runs; other jobs wait meanwhile."""
        self._drained.append(job)
        try:
            while job.has_work and not self._is_stopped:
                await self._is_idle.wait()
                await asyncio.wait([self._start_work()])
        finally:
            self._drained.remove(job)
            self.work_soon()

    async def pause(self) -> None:
        """End the piece under way, and wait until it has ended; work goes on after a while."""
        await self._end_work()
        self.work_soon()

    async def stop(self) -> None:
        """End the piece under way for good; the engine is about to close."""
        self._is_stopped = True
        await self._end_work()

    async def _end_work(self) -> None:
        self._stop_work()
        if self._task is not None:
            await asyncio.wait([self._task])

    def _start_work(self) -> asyncio.Task[None]:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())
        return self._task

    def _stop_work(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None and not self._task.done():
            self._task.cancel()

    async def _work(self) -> None:
        while (job := self._next_job()) is not None:
            await job.do_piece()

    def _next_job(self) -> IdleJob | None:
        return next((job for job in self._drained or self._jobs if job.has_work), None)
