"""The contract every tier of blobs keeps."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from cachecraft_rag.errors import ConfigurationError, StoreError

Buffer = bytes | bytearray | memoryview
"""What offers its bytes contiguously; `memoryview(array)` for a NumPy array."""

Blob = bytes | Sequence[Buffer]
"""A value to put: bytes, or buffers that are stored one behind the other."""


class TierError(StoreError):
    """A tier's medium failed: disk full, folder not writable, damaged index, connection lost, timeout."""


class DamagedBlobError(TierError):
    """One blob is damaged, the medium is not: tiers answer it with a miss, and never let it out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Counts of a tier at one moment.

    What is stored is counted over all processes that share the tier, what happened (hits, misses,
    evictions, errors, skips) over this object only.

    Attributes:
        num_blobs: blobs stored.
        num_bytes: bytes of the values and of whatever index is kept; at most `budget_bytes`.
        num_hits: calls of `get` that found the blob.
        num_misses: calls of `get` that did not.
        num_evictions: blobs that gave way to another one.
        num_errors: faults of the medium, and blobs found damaged.
        num_skips: calls that an open circuit breaker answered without asking the medium.
        last_fault: text of the last fault of the medium; empty if there was none.
    """

    num_blobs: int = 0
    num_bytes: int = 0
    budget_bytes: int = 0
    num_hits: int = 0
    num_misses: int = 0
    num_evictions: int = 0
    num_errors: int = 0
    num_skips: int = 0
    last_fault: str = ""


class BlobTier(Protocol):
    """Blobs by name, sized in bytes. The least recently used go first.

    Thread-safe, and shared by processes where the medium is. All calls block: they belong into side
    threads, never into the thread that schedules requests.

    Every method but `stats` and `close` raises `TierError` when the medium fails; nothing else of the
    medium (OSError, errors of its library) gets out.
    """

    def get(self, name: str) -> bytes | None:
        """The blob, and count it as used now; None when it is not there or found damaged."""
        ...

    def put(self, name: str, value: Blob) -> bool:
        """Store a blob, in the place of one of the same name, evicting others if needed.

        A tier that keeps the old value until the new one is there makes room for both.
        Readers see the old value or the new one, never a part. After a crash of this process it is
        the old one, the new one or none.

        Returns:
            False, and nothing is changed, when the value is larger than the budget allows.
        """
        ...

    def delete(self, names: Iterable[str]) -> int:
        """Remove blobs; no later call, of any process and after any crash, finds them.

        Returns:
            How many there were.
        """
        ...

    def discard(self, name: str, seen: bytes) -> bool:
        """Remove a blob if it is still the one that was seen: it may have been replaced meanwhile.

        Compared and removed in one step. Never waits for others who write: then it may stay.

        Returns:
            Whether it was removed.
        """
        ...

    def names(self, prefix: str = "") -> Iterator[str]:
        """Names of the blobs stored at this moment that start with `prefix`, each once, in any order.

        O(log n + hits).
        """
        ...

    def stats(self) -> TierStats: ...

    def flush(self) -> None:
        """What was put before survives a crash (as far as the medium can promise it; see each tier)."""
        ...

    def check(self, repair: bool = False) -> list[str]:
        """What is wrong with the books, one sentence each; empty when they are sound. O(blobs).

        With `repair` it is put right as well: damaged blobs are dropped, sums are recounted.
        """
        ...

    def close(self) -> None:
        """Release files and connections. Calls after it raise `TierError`; closing again does nothing."""
        ...


class Counters:
    """Thread-safe counts of what happened to one tier object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_hits = self.num_misses = self.num_evictions = self.num_errors = 0
        self.last_fault = ""

    def found(self, is_hit: bool) -> None:
        with self._lock:
            self.num_hits += is_hit
            self.num_misses += not is_hit

    def evicted(self, num_blobs: int) -> None:
        with self._lock:
            self.num_evictions += num_blobs

    def failed(self, fault: str) -> None:
        with self._lock:
            self.num_errors += 1
            self.last_fault = fault

    def stats(self, *, num_blobs: int, num_bytes: int, budget_bytes: int) -> TierStats:
        with self._lock:
            return TierStats(
                num_blobs=num_blobs,
                num_bytes=num_bytes,
                budget_bytes=budget_bytes,
                num_hits=self.num_hits,
                num_misses=self.num_misses,
                num_evictions=self.num_evictions,
                num_errors=self.num_errors,
                last_fault=self.last_fault,
            )


def checked_budget(budget_bytes: int) -> int:
    """The budget.

    Raises:
        ConfigurationError: it is below zero.
    """
    if budget_bytes < 0:
        raise ConfigurationError(f"budget_bytes is {budget_bytes}; give zero or more")
    return budget_bytes


def prefix_end(prefix: str) -> str | None:
    """The least text above all that start with `prefix`, by code points; None if there is none."""
    kept = prefix.rstrip(chr(sys.maxunicode))
    if not kept:
        return None
    after = ord(kept[-1]) + 1
    # Surrogates are no characters: there is no text that holds one and can be stored.
    return kept[:-1] + chr(0xE000 if after == 0xD800 else after)


def as_buffers(value: Blob) -> list[memoryview]:
    """The value's bytes as flat views, empty ones left out; nothing is copied."""
    parts = [value] if isinstance(value, bytes) else value
    views = (memoryview(part) for part in parts)
    return [view.cast("B") for view in views if view.nbytes]


def as_bytes(value: Blob) -> bytes:
    """The value in one piece; copied only if it is not one already."""
    return value if isinstance(value, bytes) else b"".join(as_buffers(value))
