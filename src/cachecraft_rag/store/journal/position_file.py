"""Up to where cold records on a disk have followed the journal, kept beside them."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from cachecraft_rag.store.journal.base import Position

UNKNOWN = Position("unknown", 0)
"""Of records that no position was kept for: no journal continues it."""


class PositionFile:
    """One small JSON file, replaced as a whole. Faults are no errors: an older position is safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._saved: Position | None = None

    def load(self) -> Position:
        """The position kept; `UNKNOWN` where there is none or it cannot be read."""
        with suppress(OSError, ValueError, TypeError, KeyError):
            data = json.loads(self._path.read_text(encoding="ascii"))
            return Position(str(data["epoch"]), int(data["seq"]))
        return UNKNOWN

    def save(self, position: Position) -> None:
        if position == self._saved:
            return
        scratch = self._path.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            scratch.write_text(json.dumps({"epoch": position.epoch, "seq": position.seq}), encoding="ascii")
            scratch.replace(self._path)
            self._saved = position
