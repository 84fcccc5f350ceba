"""Peak memory of this process and of the engine's processes."""

from __future__ import annotations

import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

import psutil

PERIOD_S = 0.25


class PeakMemory:
    """Samples resident memory while it is entered.

    Pages that engine processes share count once for each of them.

    Attributes:
        engine_bytes: most that all child processes held together.
        driver_bytes: most that this process held.
    """

    def __init__(self) -> None:
        self.engine_bytes = 0
        self.driver_bytes = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    def sample(self) -> None:
        process = psutil.Process()
        held = 0
        for child in process.children(recursive=True):
            with suppress(psutil.Error):  # it may end between the two questions
                held += child.memory_info().rss
        self.engine_bytes = max(self.engine_bytes, held)
        self.driver_bytes = max(self.driver_bytes, process.memory_info().rss)

    def _run(self) -> None:
        while not self._end.wait(PERIOD_S):
            self.sample()
