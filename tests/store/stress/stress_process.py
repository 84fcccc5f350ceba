"""One process of the stress test: `python stress_process.py SETTINGS`, a JSON object.

It says "ready", works when told to, says "done", looks for what must be gone when told to, and says what it
saw. Whatever it sees that may not be is a sentence in `faults`.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cachecraft_rag.chunks import AttentionProfile, ChunkKey, RecordMeta
from cachecraft_rag.store.cold import ColdRecord, ColdStore, ColdVariant
from cachecraft_rag.store.record_format import KV, ArrayForm
from cachecraft_rag.store.tiers import BlobTier, GuardedTier
from cachecraft_rag.store.tiers.disk import DiskTier

NUM_RANKS = 2
NUM_KEYS = 6
NUM_PREFIXES = 2
SHARED = "shared"
"""Tenant whose chunks everybody writes and drops at once; each other tenant has one writer."""
STALLED = "stalled"
STALLED_TOKENS = 251
"""More than any other record has: its file is known by its size."""
WATCHDOG_SPARE_S = 90.0
PATIENT_S = 60.0
"""A busy machine is no fault of the store."""

ACTIONS = {"load": 180, "put": 24, "put_shared": 6, "drop": 6, "drop_shared": 2, "drop_tenant": 2}


@dataclass(frozen=True, slots=True)
class Settings:
    """`stall_s`: how long the first process has one read of the disk stalled, 0 for not at all."""

    folder: str
    disk_bytes: int
    redis_url: str
    redis_bytes: int
    state_file: str
    process: int
    num_processes: int
    num_threads: int
    duration_s: float
    stall_s: float = 0.0


@dataclass(slots=True)
class Report:
    """`load_times`: end of each load by the clock all processes share, and its seconds."""

    faults: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    load_times: list[tuple[float, float]] = field(default_factory=list)
    stall: tuple[float, float] | None = None
    errors: dict[str, str] = field(default_factory=dict)


def num_tokens_of(key: str) -> int:
    """One of several lengths; the shortest records are below the size from which disk values are files."""
    return STALLED_TOKENS if key == STALLED else (3, 40, 90, 150, 200, 250)[int(key[1:]) % NUM_KEYS]


def form_of(key: str) -> dict[str, ArrayForm]:
    return {KV: ArrayForm("bfloat16", (2, 2, num_tokens_of(key), 2, 32))}


def bits(size: int, *name: object) -> np.ndarray:
    """Bits that follow from a name alone."""
    seed = int.from_bytes(hashlib.blake2b(repr(name).encode(), digest_size=8).digest(), "little")
    return np.random.default_rng(seed).integers(0, 1 << 16, size, np.uint16)


def kv_of(meta: RecordMeta, rank: int) -> np.ndarray:
    form = form_of(meta.key)[KV]
    flat = bits(form.num_bytes // 2, meta.tenant, meta.key, meta.prefix_hash, rank)
    return flat.view(ml_dtypes.bfloat16).reshape(form.shape)


def scores_of(meta: RecordMeta) -> np.ndarray:
    return bits(meta.num_tokens, meta.tenant, meta.key, meta.prefix_hash, "scores").astype(np.float32)


def meta_of(tenant: str, key: str, prefix: int) -> RecordMeta:
    return RecordMeta(
        record_id=0,
        key=ChunkKey(key),
        tenant=tenant,
        num_tokens=num_tokens_of(key),
        start=prefix,
        size_bytes=1,
        prefix_hash=f"p{prefix}",
        profile=AttentionProfile(0.5, 0.5, (), np.zeros(0, np.float32)),
    )


def put(cold: ColdStore, meta: RecordMeta) -> None:
    """Both ranks' shares, then the manifest where both were taken, as the scheduler side does it."""
    parts = [cold.put_part(meta, rank, kv_of(meta, rank), scores_of(meta)) for rank in range(NUM_RANKS)]
    tiers = frozenset.intersection(*(frozenset(tiers) for _, tiers in parts))
    cold.publish(meta, [entry for entry, _ in parts], tiers)


def is_same(record: ColdRecord, meta: RecordMeta, rank: int) -> bool:
    """Bit by bit: KV that is not a number is KV too."""
    return (
        record.token_scores is not None
        and record.kv.tobytes() == kv_of(meta, rank).tobytes()
        and record.token_scores.tobytes() == scores_of(meta).tobytes()
    )


def open_cold(settings: Settings) -> ColdStore:
    """Of its own for each process, as each vLLM process has one."""
    tiers: dict[str, BlobTier] = {
        "disk": DiskTier(settings.folder, settings.disk_bytes, timeout_s=PATIENT_S),
    }
    if settings.redis_url:
        from cachecraft_rag.store.tiers.redis import RedisTier

        tiers["redis"] = RedisTier(settings.redis_url, settings.redis_bytes, timeout_s=PATIENT_S)
    return ColdStore({name: GuardedTier(tier) for name, tier in tiers.items()}, "model", NUM_RANKS)


class Presence:
    """What each tenant's writer says of its chunks, in memory that all processes share.

    An even number: the chunk was dropped, or never stored, and must not be found. An odd one: it may be
    found. Only the writer changes it, to odd before it writes and to even after it has dropped; the same
    even number before and after a look means that the chunk was gone all the while.
    """

    def __init__(self, path: str, num_writers: int) -> None:
        self._numbers = np.memmap(path, np.int64, "r+", shape=(num_writers, NUM_KEYS))
        self.num_writers = num_writers

    @staticmethod
    def create(path: Path, num_writers: int) -> None:
        path.write_bytes(bytes(8 * num_writers * NUM_KEYS))

    def number(self, writer: int, key: int) -> int:
        return int(self._numbers[writer, key])

    def may_be(self, writer: int, key: int) -> None:
        self._numbers[writer, key] |= 1

    def is_gone(self, writer: int, key: int) -> None:
        self._numbers[writer, key] += self._numbers[writer, key] & 1


class Worker:
    """One thread: the writer of a tenant of its own, and a reader of all."""

    def __init__(self, cold: ColdStore, presence: Presence, writer: int) -> None:
        self._cold = cold
        self._presence = presence
        self._writer = writer
        self._tenant = f"t{writer}"
        self._dice = random.Random(writer)
        self.faults: list[str] = []
        self.counts: Counter[str] = Counter()
        self.load_times: list[tuple[float, float]] = []

    def run(self, duration_s: float) -> None:
        end_s = time.monotonic() + duration_s
        names, weights = list(ACTIONS), list(ACTIONS.values())
        try:
            while time.monotonic() < end_s:
                (action,) = self._dice.choices(names, weights)
                getattr(self, action)()
                self.counts[action] += 1
        except Exception as error:
            self.faults.append(f"{self._tenant}: {error!r}")

    def load(self) -> None:
        """Find any chunk of anybody, and load what was found."""
        writer, key = self._dice.randrange(self._presence.num_writers), self._dice.randrange(NUM_KEYS)
        if self._dice.random() < 0.1:
            variants = self._cold.find(SHARED, ChunkKey(f"k{key}"))
        else:
            variants = self.find(writer, key)
        for variant in variants:
            self._load(variant, writer, key)

    def find(self, writer: int, key: int) -> list[ColdVariant]:
        before = self._presence.number(writer, key)
        variants = self._cold.find(f"t{writer}", ChunkKey(f"k{key}"))
        if variants and self._was_gone(before, writer, key):
            self.faults.append(f"{self._tenant} found {variants[0].name}, which was dropped")
        return variants

    def put(self) -> None:
        key = self._dice.randrange(NUM_KEYS)
        self._presence.may_be(self._writer, key)
        put(self._cold, meta_of(self._tenant, f"k{key}", self._dice.randrange(NUM_PREFIXES)))

    def put_shared(self) -> None:
        key = self._dice.randrange(NUM_KEYS)
        put(self._cold, meta_of(SHARED, f"k{key}", self._dice.randrange(NUM_PREFIXES)))

    def drop(self) -> None:
        key = self._dice.randrange(NUM_KEYS)
        self._cold.drop(self._tenant, [ChunkKey(f"k{key}")])
        self._presence.is_gone(self._writer, key)

    def drop_shared(self) -> None:
        self._cold.drop(SHARED, [ChunkKey(f"k{self._dice.randrange(NUM_KEYS)}")])

    def drop_tenant(self) -> None:
        self._cold.drop_tenant(self._tenant)
        for key in range(NUM_KEYS):
            self._presence.is_gone(self._writer, key)

    def _load(self, variant: ColdVariant, writer: int, key: int) -> None:
        meta, rank = variant.meta, self._dice.randrange(NUM_RANKS)
        before = self._presence.number(writer, key)
        start_s = time.monotonic()
        record = self._cold.load(variant, rank, form_of(meta.key))
        end_s = time.monotonic()
        self.load_times.append((end_s, end_s - start_s))
        if record is None:
            self.counts["load_nothing"] += 1
            return
        self.counts["load_record"] += 1
        if meta.tenant != SHARED and self._was_gone(before, writer, key):
            self.faults.append(f"{self._tenant} loaded {variant.name}, which was dropped")
        if not is_same(record, meta, rank):
            self.faults.append(f"{self._tenant} loaded other bits than those of {variant.name}")

    def _was_gone(self, before: int, writer: int, key: int) -> bool:
        return before % 2 == 0 and self._presence.number(writer, key) == before


class Stall:
    """A record whose file blocks who reads it: a pipe stands in its place, to which nobody writes."""

    def __init__(self, cold: ColdStore, folder: str) -> None:
        self._cold = cold
        self._folder = Path(folder)
        self._pipe = self._folder.with_name("stalled-pipe")
        self.faults: list[str] = []
        self.interval: tuple[float, float] | None = None

    def run(self, stall_s: float) -> None:
        os.mkfifo(self._pipe)
        end_s = time.monotonic() + PATIENT_S
        try:
            # It may be evicted before it is read.
            while self.interval is None and time.monotonic() < end_s:
                self._stall(stall_s)
        except Exception as error:
            self.faults.append(f"the stalled read: {error!r}")

    def _stall(self, stall_s: float) -> None:
        meta = meta_of(STALLED, STALLED, 0)
        put(self._cold, meta)
        for variant in self._cold.find(STALLED, meta.key):
            content = self._replace_file(variant)
            start_s = time.monotonic()
            writer = threading.Timer(stall_s, self._write, [content])
            writer.start()
            record = self._cold.load(variant, 0, form_of(STALLED))
            end_s = time.monotonic()
            writer.join()
            if end_s - start_s >= stall_s:
                self.interval = (start_s, end_s)
                if record is None or not is_same(record, meta, 0):
                    self.faults.append("the stalled read gave no record, or another")
        self._cold.drop_tenant(STALLED)

    def _replace_file(self, variant: ColdVariant) -> bytes:
        """Put the pipe where the file of rank 0 is; what that held, empty if it was evicted."""
        for path in self._folder.glob("*.val"):
            content = content_of(path, variant.blobs[0].size_bytes)
            if b'"rank":0' in content[:4096]:
                # By another name of it: the one in the folder may go while it is read.
                spare = self._folder.with_name("stalled-spare")
                os.link(self._pipe, spare)
                spare.replace(path)
                return content
        return b""

    def _write(self, content: bytes) -> None:
        # Nobody reads it if the record was evicted first.
        with suppress(OSError):
            descriptor = os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK)
            os.set_blocking(descriptor, True)
            with os.fdopen(descriptor, "wb") as pipe:
                pipe.write(content)


def content_of(path: Path, size_bytes: int) -> bytes:
    """What a file of this size holds; nothing if it has another, or was removed meanwhile."""
    with suppress(FileNotFoundError):
        if path.stat().st_size == size_bytes:
            return path.read_bytes()
    return b""


def work(settings: Settings, cold: ColdStore, presence: Presence) -> Report:
    first = settings.process * settings.num_threads
    workers = [Worker(cold, presence, first + number) for number in range(settings.num_threads)]
    threads = [threading.Thread(target=each.run, args=[settings.duration_s]) for each in workers]
    stall = Stall(cold, settings.folder)
    if settings.stall_s and settings.process == 0:
        threads.append(threading.Timer(settings.duration_s / 4, stall.run, [settings.stall_s]))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = sum((each.counts for each in workers), Counter())
    load_times = [time for each in workers for time in each.load_times]
    faults = [fault for each in (*workers, stall) for fault in each.faults]
    return Report(faults, dict(counts), load_times, stall.interval)


def look_for_dropped(cold: ColdStore, presence: Presence) -> list[str]:
    """What is found though its writer has dropped it, when nobody writes any more."""
    looker = Worker(cold, presence, 0)
    for writer in range(presence.num_writers):
        for key in range(NUM_KEYS):
            looker.find(writer, key)
    return looker.faults


def say(answer: object) -> None:
    print(json.dumps(answer), flush=True)


def main(settings: Settings) -> None:
    faulthandler.dump_traceback_later(settings.duration_s + WATCHDOG_SPARE_S, exit=True)
    presence = Presence(settings.state_file, settings.num_processes * settings.num_threads)
    cold = open_cold(settings)
    say("ready")
    sys.stdin.readline()
    report = work(settings, cold, presence)
    say("done")
    sys.stdin.readline()
    report.faults += look_for_dropped(cold, presence)
    report.errors = {
        name: f"{stats.num_errors} errors, {stats.num_skips} skips: {stats.last_fault}"
        for name, stats in cold.stats().items()
        if stats.num_errors or stats.num_skips
    }
    cold.close()
    say(asdict(report))


def settings_of(text: str) -> Settings:
    values: dict[str, Any] = json.loads(text)
    return Settings(**values)


if __name__ == "__main__":
    main(settings_of(sys.argv[1]))
