"""Resident memory of this process and of those it started."""

from __future__ import annotations

import gc
from contextlib import suppress
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """
    Attributes:
        driver_bytes: of this process.
        engine_bytes: of all its children together; pages that they share count for each.
    """

    driver_bytes: int
    engine_bytes: int

    @classmethod
    def read(cls) -> HeldBytes:
        driver, engine_bytes = psutil.Process(), 0
        for child in driver.children(recursive=True):
            with suppress(psutil.Error):  # it may end between the two questions
                engine_bytes += child.memory_info().rss
        return cls(driver.memory_info().rss, engine_bytes)


def resident_bytes() -> int:
    """Of this process, after a search for garbage."""
    gc.collect()
    return int(psutil.Process().memory_info().rss)
