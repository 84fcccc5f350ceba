"""Both kinds of journal, a Redis server of the tests' own, and processes that can be stopped and killed."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cachecraft_rag.store.journal import Journal
from cachecraft_rag.store.journal.sqlite import SqliteJournal

PATIENT_S = 20.0
"""A busy machine is no fault of the journal."""


prefixes = (f"journal-{number}" for number in itertools.count())


class JournalMaker:
    """Makes journals of one kind; `again` opens what `new` made last once more, as another process would."""

    def __init__(self, kind: str, redis_url: str, tmp_path: Path) -> None:
        self.kind = kind
        self._redis_url = redis_url
        self._tmp_path = tmp_path
        self._opened: list[Journal] = []
        self._place = ""

    def new(self) -> Journal:
        """An empty journal without members, not even lost ones: in Redis, 1 ms after it began."""
        self._place = next(prefixes)
        self.again(max_lease_s=0.001).end()
        journal = self.again()
        while journal.waiting_for(journal.end()):
            threading.Event().wait(0.001)
        return journal

    def again(self, *, max_lease_s: float = 60.0) -> Journal:
        self._opened.append(open_journal(self.spec(), max_lease_s))
        return self._opened[-1]

    def spec(self) -> str:
        """The place of the journal, as `open_journal` takes it."""
        if self.kind == "sqlite":
            return str(self._tmp_path / self._place)
        return f"{self._redis_url} {self._place}"

    def close(self) -> None:
        for journal in self._opened:
            journal.close()


def open_journal(spec: str, max_lease_s: float = 60.0) -> Journal:
    if " " not in spec:
        return SqliteJournal(Path(spec), timeout_s=PATIENT_S, max_lease_s=max_lease_s)
    from cachecraft_rag.store.journal.redis import RedisJournal

    url, prefix = spec.split(" ")
    return RedisJournal(url, prefix=prefix, timeout_s=PATIENT_S, max_lease_s=max_lease_s)


@pytest.fixture(params=["sqlite", "redis"])
def journals(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[JournalMaker]:
    redis_url = request.getfixturevalue("redis_server").url if request.param == "redis" else ""
    maker = JournalMaker(request.param, redis_url, tmp_path)
    yield maker
    maker.close()


@pytest.fixture
def journal(journals: JournalMaker) -> Journal:
    return journals.new()


class Process:
    """A process that runs one of `journal_process.py`'s roles and answers lines of JSON."""

    def __init__(self, role: str, *arguments: str) -> None:
        command = [sys.executable, str(Path(__file__).with_name("journal_process.py")), role, *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def read(self) -> Any:
        """The next answer; None when the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        # A process that was killed may leave a piece of a line.
        return json.loads(line) if line.endswith("\n") else None

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def ask(self, line: str) -> Any:
        self.tell(line)
        return self.read()

    def send(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()


@pytest.fixture
def start_process() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start(role: str, *arguments: str) -> Process:
        started.append(Process(role, *arguments))
        return started[-1]

    yield start
    for process in started:
        process.end()


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    def wait_until(condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENT_S
        while not condition():
            assert time.monotonic() < deadline_s, "it did not come true"
            threading.Event().wait(0.01)

    return wait_until
