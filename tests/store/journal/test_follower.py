"""The follower, on a journal and a clock that the test moves; no threads."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachecraft_rag.chunks import ChunkKey, DocumentRef
from cachecraft_rag.store.documents import DocumentRegistry
from cachecraft_rag.store.journal import Action, Entry, Follower, JournalError, Position
from cachecraft_rag.store.journal.sqlite import SqliteJournal

LEASE_S = 3.0
POLL_S = 0.5
RENEWAL_S = LEASE_S / 3


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class Hooked:
    """A journal that calls `hook` with the method's name ahead of each call, and once more behind it."""

    def __init__(self, journal: SqliteJournal) -> None:
        self._journal = journal
        self.hook: Callable[[str], object] = lambda _: None

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._journal, name)
        if not callable(attribute):
            return attribute

        def call(*arguments: Any, **options: Any) -> Any:
            self.hook(name)
            answer = attribute(*arguments, **options)
            self.hook(f"after {name}")
            return answer

        return call


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def journal(tmp_path: Path, clock: Clock) -> Iterator[SqliteJournal]:
    journal = SqliteJournal(tmp_path / "journal", clock=clock)
    yield journal
    journal.close()


@pytest.fixture
def make_follower(journal: SqliteJournal, clock: Clock) -> Callable[..., Follower]:
    def make(name: str = "me", **options: Any) -> Follower:
        settings_ = {"lease_s": LEASE_S, "poll_s": POLL_S, "clock": clock, "wait": clock.advance, **options}
        return Follower(settings_.pop("journal", journal), name, **settings_)

    return make


def invalidation(doc_id: str) -> Entry:
    return Entry(action=Action.INVALIDATE, tenant="a", doc_id=doc_id)


def replacement(version: str, *keys: str) -> Entry:
    return Entry(
        action=Action.REPLACE, tenant="a", doc_id="x", version=version, keys=tuple(map(ChunkKey, keys))
    )


def drained(follower: Follower) -> list[str]:
    """What `drain` gives: document ids, or `reset`."""
    return [entry.doc_id or entry.action for entry in follower.drain()]


def caught_up(follower: Follower) -> Follower:
    follower.poll()
    follower.drain()
    assert follower.is_current()
    return follower


# --- entries ----------------------------------------------------------------------------------


def test_entries_of_others_are_drained_once_in_order(
    journal: SqliteJournal, make_follower: Callable[..., Follower]
) -> None:
    """What was there and what came later, each given once after the round that read it."""
    journal.append([invalidation("before")])
    follower = make_follower()
    follower.poll()
    journal.append([invalidation("1"), invalidation("2")])
    assert drained(follower) == ["before"]
    follower.poll()
    assert drained(follower) == ["1", "2"]
    follower.poll()
    assert drained(follower) == []


def test_more_entries_than_a_page_are_all_drained(
    journal: SqliteJournal, make_follower: Callable[..., Follower]
) -> None:
    """One round reads to the end."""
    journal.append([invalidation(str(number)) for number in range(2500)])
    follower = make_follower()
    follower.poll()
    assert drained(follower) == [str(number) for number in range(2500)]


def test_own_entries_come_back_once_in_their_place(make_follower: Callable[..., Follower]) -> None:
    """A follower's own entries bear its name, so that they can be told from others'."""
    me, other = make_follower("me"), make_follower("other")
    me.append([invalidation("1")])
    other.append([invalidation("2")])
    me.append([invalidation("3")])
    me.poll()
    entries = me.drain()
    assert [(entry.doc_id, entry.author == me.name) for entry in entries] == [
        ("1", True),
        ("2", False),
        ("3", True),
    ]
    me.poll()
    assert me.drain() == []


def test_replacements_at_the_same_time_end_the_same_everywhere(
    make_follower: Callable[..., Follower],
) -> None:
    """All processes that apply what they drain hold the version that came last in the journal."""
    followers = [make_follower("me"), make_follower("other")]
    followers[0].append([replacement("v1", "k1")])
    followers[1].append([replacement("v2", "k2")])
    for follower in followers:
        registry = DocumentRegistry()
        follower.poll()
        for entry in follower.drain():
            registry.replace(entry.tenant, entry.doc_id, entry.version, entry.keys)
        assert registry.is_current("a", DocumentRef("x", "v2"))


# --- the lease --------------------------------------------------------------------------------


def test_nothing_is_current_before_the_first_drain(make_follower: Callable[..., Follower]) -> None:
    """Stored KV may be used once everything was read and drained, not before."""
    follower = make_follower()
    follower.drain()
    assert not follower.is_current()
    follower.poll()
    assert not follower.is_current()
    follower.drain()
    assert follower.is_current()


def test_a_follower_that_polls_stays_current(make_follower: Callable[..., Follower], clock: Clock) -> None:
    """The lease is renewed in time, whether there is news or not."""
    follower = caught_up(make_follower())
    for _ in range(20):
        clock.advance(POLL_S)
        follower.poll()
        assert follower.is_current()
        follower.drain()


def test_a_follower_that_stops_polling_is_current_for_its_lease_only(
    make_follower: Callable[..., Follower], clock: Clock
) -> None:
    """However often it drains."""
    follower = caught_up(make_follower())
    clock.advance(LEASE_S - 0.01)
    follower.drain()
    assert follower.is_current()
    clock.advance(0.01)
    follower.drain()
    assert not follower.is_current()


def test_after_a_lapse_what_was_missed_is_drained_before_anything_is_current(
    make_follower: Callable[..., Follower], clock: Clock
) -> None:
    """Reading again is not enough: the entries must have been handed out."""
    follower, other = caught_up(make_follower()), make_follower("other")
    clock.advance(LEASE_S)
    assert other.append_and_wait([invalidation("missed")], timeout_s=0.0)
    follower.poll()
    assert not follower.is_current()
    assert drained(follower) == ["missed"]
    assert follower.is_current()


def test_a_closed_follower_is_not_current_and_not_waited_for(
    journal: SqliteJournal, make_follower: Callable[..., Follower]
) -> None:
    """It leaves at once, and later rounds do not bring it back."""
    follower = caught_up(make_follower())
    follower.close()
    follower.poll()
    follower.drain()
    assert not follower.is_current()
    assert journal.waiting_for(journal.append([invalidation("x")])) == ()


def test_a_thread_follows_until_close(make_follower: Callable[..., Follower], eventually: Any) -> None:
    """`start` reads at once and goes on in a thread; `close` ends it."""
    follower = make_follower(poll_s=0.001)
    follower.append([invalidation("before")])
    follower.start()
    assert drained(follower) == ["before"]
    follower.append([invalidation("after")])
    eventually(lambda: drained(follower) == ["after"])
    follower.close()
    follower.append([invalidation("late")])
    assert drained(follower) == []


# --- waiting ----------------------------------------------------------------------------------


def test_append_and_wait_returns_when_all_have_the_entry_in_their_inbox(
    make_follower: Callable[..., Follower], clock: Clock
) -> None:
    """The others' next drain has it, and so has the author's own; no lease had to run out."""
    others = [caught_up(make_follower(name)) for name in ("b", "c")]
    rounds = iter(others)

    def wait(seconds: float) -> None:
        clock.advance(seconds)
        next(rounds).poll()

    me = caught_up(make_follower(wait=wait))
    assert me.append_and_wait([invalidation("x")], timeout_s=60.0)
    assert [drained(follower) for follower in (me, *others)] == [["x"]] * 3
    assert all(follower.is_current() for follower in (me, *others))


def test_append_and_wait_waits_for_a_dead_member_no_longer_than_its_lease(
    make_follower: Callable[..., Follower], clock: Clock
) -> None:
    """From the last renewal on; by then the dead one is not current any more."""
    dead = caught_up(make_follower("dead"))
    me = caught_up(make_follower("me"))
    started_s = clock()
    assert me.append_and_wait([invalidation("x")], timeout_s=60.0)
    assert LEASE_S <= clock() - started_s <= LEASE_S + POLL_S
    assert not dead.is_current()


def test_append_and_wait_gives_up_after_its_time(
    journal: SqliteJournal, make_follower: Callable[..., Follower], clock: Clock
) -> None:
    """A member that renews its lease without taking the entry is not passed over."""
    start = journal.join("stuck", LEASE_S)

    def wait(seconds: float) -> None:
        clock.advance(seconds)
        journal.acknowledge("stuck", start, LEASE_S)

    me = make_follower(wait=wait)
    assert not me.append_and_wait([invalidation("x")], timeout_s=10.0)
    journal.leave("stuck")
    assert me.append_and_wait([invalidation("y")], timeout_s=10.0)


def test_append_and_wait_says_false_when_the_entry_may_be_lost(
    journal: SqliteJournal, make_follower: Callable[..., Follower], clock: Clock, tmp_path: Path
) -> None:
    """The journal was lost while it waited: the others may never read the entry."""
    journal.join("other", LEASE_S)

    def lose(seconds: float) -> None:
        clock.advance(seconds)
        for path in (tmp_path / "journal").glob("journal-1*"):
            path.unlink()

    assert not caught_up(make_follower(wait=lose)).append_and_wait([invalidation("x")], timeout_s=60.0)
    assert clock() < 1000 + 60.0


def test_appending_compacts_from_time_to_time(
    journal: SqliteJournal, make_follower: Callable[..., Follower]
) -> None:
    """Whoever appends across a multiple of `compact_every` folds what nobody needs."""
    follower = make_follower(compact_every=1500)
    for _ in range(3):
        follower.append([invalidation(str(number)) for number in range(900)])
    follower.poll()
    assert len(drained(follower)) == 2700 - 800


# --- starting over ----------------------------------------------------------------------------


def test_a_lapsed_follower_that_missed_compacted_entries_starts_over(
    journal: SqliteJournal, make_follower: Callable[..., Follower], clock: Clock
) -> None:
    """It gets a reset, then the present state, and is not current before it has drained both."""
    journal.append([replacement("v1", "k1")])
    follower = caught_up(make_follower())
    clock.advance(LEASE_S)
    journal.append([invalidation("x"), replacement("v2", "k2"), invalidation("y")])
    journal.compact(keep=1)
    follower.poll()
    follower.drain()
    assert not follower.is_current()
    follower.poll()
    entries = follower.drain()
    assert [(entry.action, entry.version) for entry in entries] == [
        (Action.RESET, None),
        (Action.REPLACE, "v2"),
        (Action.INVALIDATE, None),
    ]
    assert follower.is_current()


def test_a_follower_that_lapsed_at_the_very_start_starts_over(
    journal: SqliteJournal, make_follower: Callable[..., Follower], clock: Clock
) -> None:
    """Entries that came and were compacted to nothing would not show in what it reads."""
    follower = caught_up(make_follower())
    clock.advance(LEASE_S)
    journal.append([replacement("v1", "k1"), invalidation("x")])
    journal.compact(keep=0)
    follower.poll()
    assert drained(follower) == ["reset"]
    assert follower.is_current()


def test_a_reset_journal_resets(tmp_path: Path, clock: Clock) -> None:
    """The process that found the damage drops its cold records; one that finds all sound does not."""
    SqliteJournal(tmp_path / "j", clock=clock).close()
    (tmp_path / "j" / "journal-1.sqlite3").write_bytes(b"not a database" * 1000)
    answers = []
    for _ in range(2):
        journal = SqliteJournal(tmp_path / "j", clock=clock)
        follower = Follower(journal, "me", clock=clock)
        follower.poll()
        answers.append(drained(follower))
        journal.close()
    assert answers == [["reset"], []]


# --- faults -----------------------------------------------------------------------------------


def test_a_journal_that_fails_ends_the_lease_and_no_more(
    journal: SqliteJournal, make_follower: Callable[..., Follower], clock: Clock
) -> None:
    """Rounds do not raise, the fault is told, and all goes on when the journal answers again."""
    hooked = Hooked(journal)
    follower = caught_up(make_follower(journal=hooked))

    def fail(_: str) -> None:
        raise JournalError("gone")

    hooked.hook = fail
    clock.advance(POLL_S)
    follower.poll()
    assert (follower.last_fault, follower.is_current()) == ("gone", True)
    clock.advance(LEASE_S)
    follower.poll()
    follower.drain()
    assert not follower.is_current()
    with pytest.raises(JournalError, match="gone"):
        follower.append([invalidation("x")])
    hooked.hook = lambda _: None
    caught_up(follower)
    assert follower.last_fault == ""


def test_an_acknowledgement_that_takes_long_counts_from_its_beginning(
    journal: SqliteJournal, make_follower: Callable[..., Follower], clock: Clock
) -> None:
    """The lease cannot be believed to last longer than the journal grants it."""
    hooked = Hooked(journal)
    follower = make_follower(journal=hooked)
    hooked.hook = lambda name: clock.advance(2.0 if name == "after join" else 0.0)
    caught_up(follower)
    clock.advance(LEASE_S - 2.0)
    assert not follower.is_current()


def test_what_came_between_a_late_reading_and_its_acknowledgement_is_not_missed(
    journal: SqliteJournal, make_follower: Callable[..., Follower], clock: Clock
) -> None:
    """The lease ran out in between, so that the acknowledgement alone does not make it current."""
    hooked = Hooked(journal)
    follower = make_follower(journal=hooked)
    journal.append([invalidation("read")])

    def lapse(name: str) -> None:
        if name == "after read":
            clock.advance(LEASE_S)
            assert journal.waiting_for(journal.append([invalidation("between")])) == ()

    hooked.hook = lapse
    follower.poll()
    hooked.hook = lambda _: None
    assert drained(follower) == ["read"]
    assert not follower.is_current()
    follower.poll()
    assert drained(follower) == ["between"]
    assert follower.is_current()


class Interleaving:
    """Two followers and an author; between any two calls to the journal anything may happen.

    `binding` are the entries of which the author would have said that they are binding.
    """

    NAMES = ("b", "c")

    def __init__(self, journal: SqliteJournal, clock: Clock, data: st.DataObject) -> None:
        self.journal = journal
        self.clock = clock
        self.data = data
        self.appended: list[Position] = []
        self.binding: set[int] = set()
        self.followers: dict[str, Follower] = {}
        self.seen: dict[str, set[int]] = {name: set() for name in self.NAMES}
        self.was_current = dict.fromkeys(self.NAMES, False)
        for name in self.NAMES:
            hooked = Hooked(journal)
            hooked.hook = self.interrupt
            self.followers[name] = Follower(hooked, name, lease_s=LEASE_S, clock=clock)  # type: ignore[arg-type]

    def interrupt(self, _: str) -> None:
        for _ in range(self.data.draw(st.sampled_from([0, 0, 0, 1, 1, 2, 4]))):
            self.act(self.data.draw(st.sampled_from(["advance", "append", "drain", "compact"])))

    def act(self, action: str) -> None:
        if action == "advance":
            self.clock.advance(self.data.draw(st.sampled_from([0.1, RENEWAL_S, LEASE_S, 2 * LEASE_S])))
        elif action == "append":
            self.appended.append(self.journal.append([invalidation(str(len(self.appended)))]))
        elif action == "compact":
            self.journal.compact(keep=self.data.draw(st.integers(0, 1)))
        elif action == "drain":
            for name in self.NAMES:
                self.drain(name)
        else:
            self.followers[action].poll()
        self.binding.update(p.seq for p in self.appended if not self.journal.waiting_for(p))

    def drain(self, name: str) -> None:
        binding = set(self.binding)
        follower = self.followers[name]
        entries = follower.drain()
        self.seen[name] |= {entry.seq for entry in entries}
        # A reset drops all stored KV now; and before it was first current, a process has used none.
        if any(entry.action is Action.RESET for entry in entries) or not self.was_current[name]:
            self.seen[name] |= {position.seq for position in self.appended}
        if follower.is_current():
            self.was_current[name] = True
            assert binding <= self.seen[name], "a binding entry is missing from a current process"


def interleave(tmp_path: Path, data: st.DataObject) -> None:
    clock = Clock()
    # A folder of its own: an example is run more than once.
    journal = SqliteJournal(Path(tempfile.mkdtemp(dir=tmp_path)), clock=clock)
    run = Interleaving(journal, clock, data)
    for action in data.draw(
        st.lists(st.sampled_from(["b", "b", "c", "append", "drain", "advance"]), max_size=12)
    ):
        run.act(action)
        run.act("drain")
    journal.close()


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_no_current_process_misses_a_binding_entry(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever happens between any two calls to the journal, and however long they take."""
    interleave(tmp_path, data)


@pytest.mark.slow
@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_no_current_process_misses_a_binding_entry_in_many_runs(tmp_path: Path, data: st.DataObject) -> None:
    """The same in many more runs."""
    interleave(tmp_path, data)
