"""One process of the stress test: `python stress_process.py SETTINGS`, a JSON object.

It says "ready", works when told to, says "done", looks for what must be gone when told to, and says what it
saw. Whatever it sees that may not be is a sentence in `faults`.
"""

from __future__ import annotations

import faulthandler
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

from stress_records import (
    NUM_KEYS,
    NUM_PREFIXES,
    NUM_RANKS,
    PATIENT_S,
    SHARED,
    STALLED,
    WATCHDOG_SPARE_S,
    Presence,
    Settings,
    form_of,
    is_same,
    meta_of,
    open_cold,
    put,
)

from cachecraft_rag.chunks import ChunkKey
from cachecraft_rag.store.cold import ColdStore, ColdVariant

ACTIONS = {"load": 180, "put": 24, "put_shared": 6, "drop": 6, "drop_shared": 2, "drop_tenant": 2}


@dataclass(slots=True)
class Report:
    """`load_times`: end of each load by the clock all processes share, and its seconds."""

    faults: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    load_times: list[tuple[float, float]] = field(default_factory=list)
    stall: tuple[float, float] | None = None
    errors: dict[str, str] = field(default_factory=dict)


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
            self._add_faults([f"ended: {error!r}"])

    def load(self) -> None:
        """Find any chunk of anybody, and load what was found."""
        writer, key = self._dice.randrange(self._presence.num_writers), self._dice.randrange(NUM_KEYS)
        if self._dice.random() < 0.1:
            variants = self._cold.find(SHARED, ChunkKey(f"k{key}"))
        else:
            variants, faults = self._presence.find(self._cold, writer, key)
            self._add_faults(faults)
        for variant in variants:
            self._load(variant, writer, key)

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
        if meta.tenant != SHARED and self._presence.was_gone(before, writer, key):
            self._add_faults([f"loaded {variant.name}, which was dropped"])
        if not is_same(record, meta, rank):
            self._add_faults([f"loaded other bits than those of {variant.name}"])

    def _add_faults(self, faults: list[str]) -> None:
        self.faults += [f"{self._tenant} {fault}" for fault in faults]


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
    report.faults += presence.all_faults(cold)
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
