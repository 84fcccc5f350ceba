"""A circuit breaker over any tier, so that a dead tier costs next to nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from cachecraft_rag.store.tiers.base import Blob, BlobTier, TierError, TierStats

T = TypeVar("T")


class _SkippedError(TierError):
    """The breaker is open: the medium was not asked."""


class GuardedTier:
    """A tier behind a circuit breaker.

        CLOSED ──`max_faults` faults in a row──► OPEN for `min_pause_s`
        OPEN ──pause over──► one trial call ──► CLOSED, or OPEN for twice as long, up to `max_pause_s`

    While it is open the medium is not asked. `put` answers False, at a fault as well: it never raises
    `TierError`. `get`, `delete`, `discard`, `names` and `flush` raise it, as an answer made up would
    look complete: what is not there may be forgotten, what cannot be asked for may not. `check` says
    the fault in a sentence.
    """

    def __init__(
        self,
        tier: BlobTier,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_faults: int = 3,
        min_pause_s: float = 1.0,
        max_pause_s: float = 60.0,
    ) -> None:
        self._tier = tier
        self._clock = clock
        self._max_faults = max_faults
        self._min_pause_s = min_pause_s
        self._max_pause_s = max_pause_s
        self._lock = threading.Lock()
        self._num_faults_in_a_row = 0
        self._pause_s = 0.0
        self._open_until_s = 0.0
        self._trial_runs = False
        self._num_skips = 0
        self._last_fault = ""
        self._last_stats = TierStats()

    @property
    def is_open(self) -> bool:
        """Whether the next call would be answered without asking the medium, or be the trial."""
        return self._pause_s > 0

    def get(self, name: str) -> bytes | None:
        return self._guarded(lambda: self._tier.get(name))

    def put(self, name: str, value: Blob) -> bool:
        with suppress(TierError):
            return self._guarded(lambda: self._tier.put(name, value))
        return False

    def delete(self, names: Iterable[str]) -> int:
        return self._guarded(lambda: self._tier.delete(names))

    def discard(self, name: str, seen: bytes) -> bool:
        return self._guarded(lambda: self._tier.discard(name, seen))

    def names(self, prefix: str = "") -> Iterator[str]:
        return self._guarded(lambda: self._tier.names(prefix))

    def flush(self) -> None:
        self._guarded(self._tier.flush)

    def check(self, repair: bool = False) -> list[str]:
        try:
            return self._guarded(lambda: self._tier.check(repair))
        except TierError as fault:
            return [str(fault)]

    def stats(self) -> TierStats:
        """The tier's own counts, as last known while the medium cannot be asked."""
        # Looking at the counts is no use of the tier: it is neither a skipped call nor a trial.
        if not self.is_open:
            with suppress(TierError):
                self._last_stats = self._guarded(self._tier.stats)
        with self._lock:
            last_fault = self._last_fault or self._last_stats.last_fault
            return replace(self._last_stats, num_skips=self._num_skips, last_fault=last_fault)

    def close(self) -> None:
        self._tier.close()

    def _guarded(self, call: Callable[[], T]) -> T:
        is_trial = self._enter()
        try:
            answer = call()
        except TierError as fault:
            self._failed(str(fault), is_trial)
            raise
        except BaseException:
            # Not the medium's fault, so it says nothing about it: another call is the trial.
            self._trial_runs = self._trial_runs and not is_trial
            raise
        self._went_well(is_trial)
        return answer

    def _enter(self) -> bool:
        """Whether this call is the trial.

        Raises:
            TierError: the breaker is open and this call is not the trial.
        """
        with self._lock:
            if not self._pause_s:
                return False
            if self._trial_runs or self._clock() < self._open_until_s:
                self._num_skips += 1
                raise _SkippedError(
                    f"the tier is not asked for {self._pause_s:g} s after: {self._last_fault}"
                )
            self._trial_runs = True
            return True

    def _failed(self, fault: str, is_trial: bool) -> None:
        with self._lock:
            self._last_fault = fault
            self._num_faults_in_a_row += 1
            if is_trial:
                self._open(self._pause_s * 2)
            elif not self._pause_s and self._num_faults_in_a_row >= self._max_faults:
                self._open(self._min_pause_s)

    def _open(self, pause_s: float) -> None:
        self._trial_runs = False
        self._pause_s = min(pause_s, self._max_pause_s)
        self._open_until_s = self._clock() + self._pause_s

    def _went_well(self, is_trial: bool) -> None:
        # A call that began before the breaker opened may end well after: only the trial closes it.
        with self._lock:
            if is_trial:
                self._trial_runs = False
                self._pause_s = 0.0
            if not self._pause_s:
                self._num_faults_in_a_row = 0
