"""Followers in processes of their own, which are stopped and killed, over both journals."""

from __future__ import annotations

import signal
from typing import Any

from cachecraft_rag.store.journal import Action, Entry, Follower, Position

LEASE_S = 0.5


def invalidation(doc_id: str) -> Entry:
    return Entry(action=Action.INVALIDATE, tenant="t", doc_id=doc_id)


def test_a_stopped_process_is_not_current_when_it_goes_on(
    journals: Any, start_process: Any, eventually: Any
) -> None:
    """Nobody waits for it beyond its lease; it has to drain what it missed first."""
    journal = journals.new()
    other = start_process("follow", journals.spec(), "other", str(LEASE_S))
    eventually(lambda: other.ask("drain") == [] and other.ask("current"))
    other.send(signal.SIGSTOP)
    me = Follower(journal, "me", lease_s=20.0, poll_s=0.02)
    assert me.append_and_wait([invalidation("x")], timeout_s=20.0)
    other.tell("current")
    other.send(signal.SIGCONT)
    assert other.read() is False
    eventually(lambda: other.ask("drain") == ["x"])
    eventually(lambda: other.ask("drain") == [] and other.ask("current"))


def test_a_killed_process_is_waited_for_until_its_lease_is_over(
    journals: Any, start_process: Any, eventually: Any
) -> None:
    """Not passed over before, and not waited for after."""
    journal = journals.new()
    other = start_process("follow", journals.spec(), "other", "30")
    name = other.ask("name")
    eventually(lambda: other.ask("drain") == [] and other.ask("current"))
    other.send(signal.SIGKILL)
    assert other.read() is None
    position = journal.append([invalidation("x")])
    assert journal.waiting_for(position) == (name,)
    # What is left of its lease, made short.
    journal.acknowledge(name, Position(position.epoch, 0), 0.05)
    me = Follower(journal, "me", lease_s=20.0, poll_s=0.02)
    assert me.append_and_wait([invalidation("y")], timeout_s=20.0)


def test_four_processes_never_miss_what_another_has_made_binding(journals: Any, start_process: Any) -> None:
    """Each appends and drains; no drain begun after an `append_and_wait` returned lacks its entry."""
    journals.new()
    names = "abcd"
    processes = [start_process("exchange", journals.spec(), name, "6", "20") for name in names]
    assert [process.read() for process in processes] == ["ready"] * 4
    for process in processes:
        process.tell("go")
    assert [process.read() for process in processes] == ["done"] * 4
    logs = [process.ask("end") for process in processes]
    returned = [(time_s, doc_id) for log in logs for kind, time_s, doc_id, *_ in log if kind == "returned"]
    assert sorted(doc_id for _, doc_id in returned) == [f"{name}-{n}" for name in names for n in range(6)]
    for log in logs:
        assert_nothing_missed(log, returned)


def assert_nothing_missed(log: list[Any], returned: list[tuple[float, str]]) -> None:
    seen: set[str] = set()
    num_checked = 0
    for kind, start_s, is_current, *doc_ids in log:
        if kind != "drain":
            continue
        seen.update(*doc_ids)
        binding = {doc_id for time_s, doc_id in returned if time_s < start_s}
        if is_current:
            assert binding <= seen
            num_checked += bool(binding)
    assert num_checked > 0, "no drain came after an entry had become binding"
