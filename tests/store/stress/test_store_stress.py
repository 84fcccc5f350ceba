"""Processes and threads that write, read and drop variants on one folder and one Redis, all at once.

`STORE_STRESS_S` sets the seconds of the long run, which is marked `slow`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def load_module(path: Path) -> Any:
    """The tests' folders are no packages, see import-mode in pyproject.toml."""
    spec = importlib.util.spec_from_file_location(f"stress_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


HERE = Path(__file__).parent
SCRIPT = HERE / "stress_process.py"
stress = load_module(HERE / "stress_records.py")

NUM_PROCESSES = 4
NUM_THREADS = 8
DISK_BYTES = 6 << 20
REDIS_BYTES = 4 << 20
"""Room for about a tenth of all variants, so that there is eviction all the time."""
ACTIONS = ("load", "put", "put_shared", "drop", "drop_shared", "drop_tenant")
MOST_STALLED_P99_S = 0.010
LONG_RUN_S = float(os.environ.get("STORE_STRESS_S", "60"))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What all processes saw, and the folder and Redis they left."""

    settings: Any
    faults: list[str]
    counts: Counter[str]
    load_times: list[tuple[float, float]]
    stall: tuple[float, float] | None
    errors: list[str]

    def load_times_s(self, during_stall: bool) -> list[float]:
        """Of loads of which a part fell into the time when one read was stalled, or of those without."""
        assert self.stall is not None
        start_s, end_s = self.stall
        return [
            took_s
            for at_s, took_s in self.load_times
            if (at_s >= start_s and at_s - took_s <= end_s) is during_stall
        ]

    @property
    def num_loads_late_in_stall(self) -> int:
        """Loads begun when the read had been stalled for long, and done when it still was."""
        assert self.stall is not None
        start_s, end_s = self.stall
        middle_s = (start_s + end_s) / 2
        return sum(at_s - took_s > middle_s and at_s < end_s for at_s, took_s in self.load_times)


class Processes:
    """Those of one run; what is left of them is killed."""

    def __init__(self) -> None:
        self._all: list[subprocess.Popen[str]] = []

    def start(self, settings: Any) -> None:
        command = [sys.executable, str(SCRIPT), json.dumps(asdict(settings))]
        self._all.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))

    def tell(self) -> None:
        for process in self._all:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()

    def answers(self) -> list[Any]:
        """One of each; a process that ends instead, by its watchdog too, fails the test."""
        lines = []
        for process in self._all:
            assert process.stdout is not None
            lines.append(process.stdout.readline())
        assert all(lines), "a process ended early: see its error output"
        return [json.loads(line) for line in lines]

    def kill(self) -> None:
        for process in self._all:
            process.kill()
            process.communicate()


@pytest.fixture
def processes() -> Iterator[Processes]:
    """With a watchdog, see `run`: whatever lock the test itself waits for, it does not wait for ever."""
    before = signal.signal(signal.SIGALRM, give_up)
    started = Processes()
    yield started
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    started.kill()


def give_up(*_: object) -> None:
    raise TimeoutError("the stress run came to no end: somebody waits for ever")


def run(processes: Processes, settings: Any) -> Outcome:
    """Run the processes, and give them and the checks after them so much time."""
    # Later than their own watchdogs, which say where each thread waits.
    signal.setitimer(signal.ITIMER_REAL, settings.duration_s + 2 * stress.WATCHDOG_SPARE_S)
    stress.Presence.create(Path(settings.state_file), settings.num_processes * settings.num_threads)
    for number in range(settings.num_processes):
        processes.start(replace(settings, process=number))
    assert processes.answers() == ["ready"] * settings.num_processes
    processes.tell()
    assert processes.answers() == ["done"] * settings.num_processes
    processes.tell()
    reports = processes.answers()
    return Outcome(
        settings,
        faults=[fault for report in reports for fault in report["faults"]],
        counts=sum((Counter(report["counts"]) for report in reports), Counter()),
        load_times=[tuple(times) for report in reports for times in report["load_times"]],
        stall=next((report["stall"] for report in reports if report["stall"]), None),
        errors=[f"{name}: {error}" for report in reports for name, error in report["errors"].items()],
    )


def settings_in(folder: Path, redis_url: str, duration_s: float, stall_s: float) -> Any:
    return stress.Settings(
        folder=str(folder / "tier"),
        disk_bytes=DISK_BYTES,
        redis_url=redis_url,
        redis_bytes=REDIS_BYTES,
        state_file=str(folder / "presence"),
        process=0,
        num_processes=NUM_PROCESSES,
        num_threads=NUM_THREADS,
        duration_s=duration_s,
        stall_s=stall_s,
    )


def assert_all_was_tried(outcome: Outcome) -> None:
    """Or the run has shown nothing."""
    assert all(outcome.counts[action] for action in ACTIONS), outcome.counts
    assert outcome.counts["load_record"] > outcome.counts["load_nothing"], outcome.counts


def assert_left_sound(outcome: Outcome) -> None:
    """The books add up, what is there is whole, and what is dropped now is gone for a newcomer too."""
    cold = stress.open_cold(outcome.settings)
    presence = stress.Presence(outcome.settings.state_file, NUM_PROCESSES * NUM_THREADS)
    assert cold.check() == []
    assert presence.all_faults(cold) == []
    assert num_sound_records(cold) > 0
    for tenant in (stress.SHARED, *(f"t{writer}" for writer in range(presence.num_writers))):
        cold.drop_tenant(tenant)
    assert {name: stats.num_blobs for name, stats in cold.stats().items()} == {"disk": 0, "redis": 0}
    assert cold.check() == []
    cold.close()


def num_sound_records(cold: Any) -> int:
    """Checks all records of all tenants."""
    num_records = 0
    for tenant in (stress.SHARED, *(f"t{writer}" for writer in range(NUM_PROCESSES * NUM_THREADS))):
        for key in range(stress.NUM_KEYS):
            for variant in cold.find(tenant, f"k{key}"):
                record = cold.load(variant, 0, stress.form_of(variant.meta.key))
                assert record is None or stress.is_same(record, variant.meta, 0)
                num_records += record is not None
    return num_records


def test_short_stress_leaves_a_sound_store(tmp_path: Path, redis_server: Any, processes: Processes) -> None:
    """Every record is its own bit by bit, nothing dropped comes back, and a stalled read stops nobody."""
    outcome = run(processes, settings_in(tmp_path, redis_server.url, duration_s=3.0, stall_s=1.0))
    assert outcome.faults == []
    assert_all_was_tried(outcome)
    assert outcome.num_loads_late_in_stall > 0, "nobody loaded anything while one read was stalled"
    assert_left_sound(outcome)


@pytest.mark.slow
def test_long_stress_leaves_a_sound_store(tmp_path: Path, redis_server: Any, processes: Processes) -> None:
    """As the short one; and of the loads while one read is stalled for 2 s, 99 of 100 take under 10 ms."""
    outcome = run(processes, settings_in(tmp_path, redis_server.url, LONG_RUN_S, stall_s=2.0))
    print_figures(outcome)
    assert outcome.faults == []
    assert_all_was_tried(outcome)
    assert_left_sound(outcome)
    assert np.percentile(outcome.load_times_s(during_stall=True), 99) < MOST_STALLED_P99_S


def print_figures(outcome: Outcome) -> None:
    print(f"\n{LONG_RUN_S:g} s: {dict(outcome.counts)}", *outcome.errors, sep="\n")
    for name, during_stall in (("while one read was stalled", True), ("otherwise", False)):
        times_ms = [1000 * took_s for took_s in outcome.load_times_s(during_stall)]
        shares = ", ".join(f"P{share} {np.percentile(times_ms, share):.2f}" for share in (50, 90, 99, 100))
        print(f"{len(times_ms)} loads {name}, in ms: {shares}")
