"""What feedback samples lead to, as pure state machines: the budget's scale, the breaker, the ward.

Breaker   CLOSED ──mean of the last samples below the threshold──► OPEN
          OPEN ──good samples in a row──► CLOSED

ChunkWard (chunk) CLEAR ──blamed──► SUSPECT ──blamed again within its next samples──► QUARANTINED
                  SUSPECT ──samples without blame──► CLEAR
                  QUARANTINED ──computed and stored anew──► PROBATION
                  PROBATION ──samples without blame──► CLEAR, ──blamed──► QUARANTINED
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from cachecraft_rag.chunks import ChunkKey

CONTROLLER_GAIN = 0.1
SCALE_RANGE = (0.5, 2.0)
QUALITY_MOMENTUM = 0.95
"""Weight of the past in the running mean: some 20 samples are remembered."""
NUM_WATCHED_SAMPLES = 3
"""Samples without blame that clear a suspected or a re-cached chunk."""
MAX_WATCHED_CHUNKS = 4096


@dataclass(slots=True)
class BudgetController:
    """Scale of the recompute budget: scale <- scale * (1 + 0.1 * (target - measured)), clamped.

    Cache-Craft's alpha controller (design section 5), applied to the share to recompute as well:
    below the target more is recomputed. `measured` is the running mean of quality.
    """

    target: float
    scale: float = 1.0
    measured: float | None = None

    def add(self, quality: float) -> None:
        past = quality if self.measured is None else self.measured
        self.measured = QUALITY_MOMENTUM * past + (1 - QUALITY_MOMENTUM) * quality
        low, high = SCALE_RANGE
        change = 1 + CONTROLLER_GAIN * (self.target - self.measured)
        self.scale = min(max(self.scale * change, low), high)


@dataclass(slots=True)
class Breaker:
    """Opens when the mean quality of the last `window` samples is below `threshold`, and not before
    there are so many; closes after `num_good_to_close` samples in a row at or above it."""

    threshold: float
    window: int = 20
    num_good_to_close: int = 5
    is_open: bool = False
    num_openings: int = 0
    _last: deque[float] = field(default_factory=deque)
    _num_good: int = 0

    def add(self, quality: float) -> None:
        if self.is_open:
            self._add_while_open(quality)
            return
        self._last.append(quality)
        if len(self._last) > self.window:
            self._last.popleft()
        if len(self._last) == self.window and sum(self._last) / self.window < self.threshold:
            self.is_open, self._num_good = True, 0
            self.num_openings += 1
            self._last.clear()

    def _add_while_open(self, quality: float) -> None:
        self._num_good = self._num_good + 1 if quality >= self.threshold else 0
        self.is_open = self._num_good < self.num_good_to_close


class ChunkState(enum.StrEnum):
    CLEAR = "clear"
    SUSPECT = "suspect"
    QUARANTINED = "quarantined"
    PROBATION = "probation"


@dataclass(slots=True)
class _Watched:
    state: ChunkState
    num_clean: int = 0


class ChunkWard:
    """Which chunks are under suspicion. Clear chunks take no memory; at most `max_chunks` others do,
    those not sampled for longest being forgotten first, yet never a quarantined one before the rest.

    One blame is not enough: of clean traffic a few samples are off by chance.
    """

    def __init__(self, max_chunks: int = MAX_WATCHED_CHUNKS) -> None:
        self._max_chunks = max_chunks
        self._watched: OrderedDict[ChunkKey, _Watched] = OrderedDict()
        self.num_quarantines = 0
        self.num_releases = 0

    def state(self, key: ChunkKey) -> ChunkState:
        watched = self._watched.get(key)
        return watched.state if watched else ChunkState.CLEAR

    def keys_in(self, state: ChunkState) -> tuple[ChunkKey, ...]:
        # Copied at one go, as any thread may ask.
        return tuple(key for key, watched in tuple(self._watched.items()) if watched.state is state)

    def needs_sample(self, keys: Iterable[ChunkKey]) -> bool:
        """Whether a request with these chunks is to be sampled whatever the share."""
        return any(self.state(key) in (ChunkState.SUSPECT, ChunkState.PROBATION) for key in keys)

    def add(self, keys: Iterable[ChunkKey], blamed: ChunkKey | None) -> bool:
        """Take in one sample whose answer reused the chunks `keys`; whether `blamed` is quarantined
        by it."""
        for key in keys:
            if key != blamed:
                self._acquit(key)
        return blamed is not None and self._blame(blamed)

    def restored(self, key: ChunkKey) -> None:
        """A quarantined chunk was computed and stored anew."""
        if self.state(key) is ChunkState.QUARANTINED:
            self._set(key, ChunkState.PROBATION)

    def _acquit(self, key: ChunkKey) -> None:
        watched = self._watched.get(key)
        if watched is None or watched.state is ChunkState.QUARANTINED:
            return
        self._watched.move_to_end(key)
        watched.num_clean += 1
        if watched.num_clean >= NUM_WATCHED_SAMPLES:
            self.num_releases += watched.state is ChunkState.PROBATION
            del self._watched[key]

    def _blame(self, key: ChunkKey) -> bool:
        state = self.state(key)
        if state is ChunkState.CLEAR:
            self._set(key, ChunkState.SUSPECT)
        elif state is not ChunkState.QUARANTINED:
            self._set(key, ChunkState.QUARANTINED)
            self.num_quarantines += 1
            return True
        return False

    def _set(self, key: ChunkKey, state: ChunkState) -> None:
        self._watched[key] = _Watched(state)
        self._watched.move_to_end(key)
        while len(self._watched) > self._max_chunks:
            self._forget_one()

    def _forget_one(self) -> None:
        free = (k for k, w in self._watched.items() if w.state is not ChunkState.QUARANTINED)
        del self._watched[next(free, next(iter(self._watched)))]
