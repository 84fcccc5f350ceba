"""Peak memory of this process and of the engine's processes."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from benchmarks.common.memory import HeldBytes

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
        held = HeldBytes.read()
        self.engine_bytes = max(self.engine_bytes, held.engine_bytes)
        self.driver_bytes = max(self.driver_bytes, held.driver_bytes)

    def _run(self) -> None:
        while not self._end.wait(PERIOD_S):
            self.sample()
