"""What the tests run in processes of their own: `python journal_process.py ROLE JOURNAL ...`."""

from __future__ import annotations

import importlib.util
import json
import select
import sys
import threading
import time
from pathlib import Path
from typing import Any

from cachecraft_rag.chunks import ChunkKey
from cachecraft_rag.store.journal import Action, Entry, Follower, Journal

# The tests' folder is no package, see import-mode in pyproject.toml.
_spec = importlib.util.spec_from_file_location("journal_conftest", Path(__file__).with_name("conftest.py"))
assert _spec is not None and _spec.loader is not None
conftest: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(conftest)


def say(answer: object) -> None:
    print(json.dumps(answer), flush=True)


def invalidation(doc_id: str) -> Entry:
    return Entry(action=Action.INVALIDATE, tenant="t", doc_id=doc_id)


def append_batches(journal: Journal, name: str, num_batches: str, batch_size: str) -> None:
    """Append batches and say each when `append` has returned."""
    say("ready")
    for batch in range(int(num_batches)):
        keys = (ChunkKey(f"{name}-{batch}"),)
        entries = [
            Entry(action=Action.REPLACE, tenant=name, doc_id=f"{batch}/{number}", version="v", keys=keys)
            for number in range(int(batch_size))
        ]
        say([batch, journal.append(entries).seq])


def follow(journal: Journal, name: str, lease_s: str) -> None:
    """Answer `drain` with documents and `current` with a truth, until the input ends."""
    follower = Follower(journal, name, lease_s=float(lease_s), poll_s=0.02)
    follower.start()
    for line in sys.stdin:
        if line.strip() == "drain":
            say([entry.doc_id for entry in follower.drain()])
        elif line.strip() == "current":
            say(follower.is_current())
        elif line.strip() == "name":
            say(follower.name)


def exchange(journal: Journal, name: str, num_changes: str, lease_s: str) -> None:
    """Append and wait in a side thread while draining in this one, and say what was when.

    Lines are ["drain", start, is_current, new documents] and ["returned", time, document]; the clock is the
    same in all processes of the machine.
    """
    follower = Follower(journal, name, lease_s=float(lease_s), poll_s=0.005)
    follower.start()
    say("ready")
    sys.stdin.readline()
    log: list[object] = []
    done = threading.Event()

    def change() -> None:
        for number in range(int(num_changes)):
            doc_id = f"{name}-{number}"
            if follower.append_and_wait([invalidation(doc_id)], 30.0):
                log.append(["returned", time.monotonic(), doc_id])
        done.set()

    def drain() -> None:
        start_s = time.monotonic()
        doc_ids = [entry.doc_id for entry in follower.drain()]
        is_current = follower.is_current()
        log.append(["drain", start_s, is_current, doc_ids])

    threading.Thread(target=change, daemon=True).start()
    while not done.wait(0.002):
        drain()
    say("done")
    # The others may still be at work.
    while not _is_told(0.002):
        drain()
    drain()
    say(log)
    follower.close()


def _is_told(timeout_s: float) -> bool:
    return bool(select.select([sys.stdin], [], [], timeout_s)[0])


if __name__ == "__main__":
    roles = {"append_batches": append_batches, "follow": follow, "exchange": exchange}
    roles[sys.argv[1]](conftest.open_journal(sys.argv[2]), *sys.argv[3:])
