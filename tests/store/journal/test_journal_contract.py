"""What every journal promises, run over both."""

from __future__ import annotations

import copy
import itertools
import signal
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachecraft_rag.chunks import ChunkKey, DocumentRef
from cachecraft_rag.errors import ConfigurationError
from cachecraft_rag.store.documents import DocumentRegistry
from cachecraft_rag.store.journal import Action, Entry, Journal, JournalError, Position, StartOverError
from cachecraft_rag.store.journal.base import LOST_MEMBERS, DamagedJournalError, decode, encode
from cachecraft_rag.store.journal.snapshot import folded

TENANTS, DOC_IDS, VERSIONS = ["a", "b"], ["d1", "d2"], [None, "v1", "v2"]
LONG_S = 60.0

chunk_keys = st.sampled_from([ChunkKey("k1"), ChunkKey("k2"), ChunkKey("k3")])
changes = st.builds(
    Entry,
    action=st.sampled_from(
        [Action.REGISTER] * 3
        + [Action.REPLACE] * 2
        + [Action.INVALIDATE, Action.INVALIDATE_CHUNKS, Action.PURGE]
    ),
    tenant=st.sampled_from(TENANTS),
    doc_id=st.sampled_from(DOC_IDS),
    version=st.sampled_from(VERSIONS),
    keys=st.lists(chunk_keys, max_size=3, unique=True).map(tuple),
)


def invalidation(doc_id: str, tenant: str = "a") -> Entry:
    return Entry(action=Action.INVALIDATE, tenant=tenant, doc_id=doc_id)


def replacement(doc_id: str, version: str, *keys: str) -> Entry:
    return Entry(
        action=Action.REPLACE, tenant="a", doc_id=doc_id, version=version, keys=tuple(map(ChunkKey, keys))
    )


def of_a_later_version(tenant: str = "a") -> Entry:
    """What a process of a later version appends: its action is none that this one knows."""
    return Entry(action="embargo", tenant=tenant, doc_id="x")  # type: ignore[arg-type]


def doc_ids(entries: Iterable[Entry]) -> list[str]:
    return [entry.doc_id for entry in entries]


def start_of(journal: Journal) -> Position:
    return Position(journal.end().epoch, 0)


def all_entries(journal: Journal) -> list[Entry]:
    return journal.read(start_of(journal))


def registry_of(entries: Iterable[Entry]) -> DocumentRegistry:
    registry = DocumentRegistry()
    for entry in entries:
        apply(registry, entry)
    return registry


def apply(registry: DocumentRegistry, entry: Entry) -> None:
    if entry.action is Action.REGISTER:
        for key in entry.keys:
            registry.register(entry.tenant, key, DocumentRef(entry.doc_id, entry.version))
    elif entry.action is Action.REPLACE:
        registry.replace(entry.tenant, entry.doc_id, entry.version, entry.keys)
    elif entry.action is Action.INVALIDATE:
        registry.invalidate(entry.tenant, entry.doc_id, entry.version)
    elif entry.action is Action.INVALIDATE_CHUNKS:
        registry.invalidate_chunks(entry.tenant, entry.keys)
    else:
        registry.purge(entry.tenant)


def behaviour(registry: DocumentRegistry) -> list[Any]:
    """What the registry answers: which versions are current, and which keys any invalidations orphan."""
    answers: list[Any] = [
        registry.is_current(tenant, DocumentRef(doc_id, version))
        for tenant, doc_id, version in itertools.product(TENANTS, DOC_IDS, VERSIONS)
    ]
    for tenant in TENANTS:
        for first, second in itertools.permutations(DOC_IDS):
            for versions in (["v1", "v2", None], ["v2", "v1", None], [None]):
                tried = copy.deepcopy(registry)
                answers += [sorted(tried.invalidate(tenant, first, version)) for version in versions]
                answers += [sorted(tried.invalidate(tenant, second, version)) for version in versions]
    return answers


def assert_same_documents(entries: Iterable[Entry], expected: Iterable[Entry]) -> None:
    assert behaviour(registry_of(entries)) == behaviour(registry_of(expected))


# --- entries ----------------------------------------------------------------------------------


def test_what_was_appended_is_read_in_order(journals: Any) -> None:
    """Another process reads every field of every entry, at dense places."""
    written = [
        Entry(
            action=Action.REPLACE,
            tenant="Mandant ü\n",
            doc_id="文档\0",
            version="",
            keys=(ChunkKey("k1"),),
            author="me",
        ),
        Entry(action=Action.PURGE, tenant="a"),
    ]
    journals.new().append(written)
    read = all_entries(journals.again())
    assert [entry.seq for entry in read] == [1, 2]
    assert [(e.action, e.tenant, e.doc_id, e.version, e.keys, e.author) for e in read] == [
        (e.action, e.tenant, e.doc_id, e.version, e.keys, e.author) for e in written
    ]


def test_append_says_the_place_of_the_last_entry(journal: Journal) -> None:
    """The position that `append` returns is where a reader has everything of it behind."""
    position = journal.append([invalidation("x"), invalidation("y")])
    assert position == journal.end()
    assert journal.read(position) == []
    assert doc_ids(journal.read(Position(position.epoch, 1))) == ["y"]


def test_reading_page_by_page_gives_every_entry_once(journal: Journal) -> None:
    """Pages of the limit's size follow each other without gap or overlap."""
    journal.append([invalidation(str(number)) for number in range(7)])
    position, pages = start_of(journal), []
    while page := journal.read(position, 3):
        pages.append(doc_ids(page))
        position = Position(position.epoch, page[-1].seq)
    assert pages == [["0", "1", "2"], ["3", "4", "5"], ["6"]]


def test_a_position_of_no_present_history_starts_over(journal: Journal) -> None:
    """Neither another epoch nor a place ahead of the end is answered with entries."""
    end = journal.append([invalidation("x")])
    for strange in (Position("another", 1), Position(end.epoch, 2)):
        with pytest.raises(StartOverError):
            journal.read(strange)
        with pytest.raises(StartOverError):
            journal.acknowledge("me", strange, LONG_S)
    with pytest.raises(StartOverError):
        journal.waiting_for(Position("another", 1))


def test_entries_of_two_processes_at_once_are_all_seen_in_order(journals: Any, start_process: Any) -> None:
    """A reader that follows two writers at work sees every entry, and none behind a later one."""
    journal = journals.new()
    writers = [start_process("append_batches", journals.spec(), name, "40", "2") for name in "ab"]
    assert [writer.read() for writer in writers] == ["ready", "ready"]
    position, seen = start_of(journal), []
    while len(seen) < 160:
        for entry in journal.read(position, 7):
            seen.append(entry)
            position = Position(position.epoch, entry.seq)
    assert [entry.seq for entry in seen] == list(range(1, 161))
    for name in "ab":
        written = [f"{batch}/{number}" for batch in range(40) for number in range(2)]
        assert [entry.doc_id for entry in seen if entry.tenant == name] == written


def crash_while_appending(journals: Any, start_process: Any, num_batches_before: int) -> None:
    """Kill a writer when it has said so many batches; look for torn and for lost ones."""
    batch_size = 20
    journals.new()
    writer = start_process("append_batches", journals.spec(), "a", "100000", str(batch_size))
    said = [writer.read() for _ in range(num_batches_before + 1)]
    writer.send(signal.SIGKILL)
    while (line := writer.read()) is not None:
        said.append(line)
    found = doc_ids(all_entries_of_any_number(journals.again()))
    num_batches = len(found) // batch_size
    assert found == [f"{batch}/{n}" for batch in range(num_batches) for n in range(batch_size)]
    assert num_batches >= len(said) - 1, "a batch that append had returned is lost"


def all_entries_of_any_number(journal: Journal) -> list[Entry]:
    return journal.read(start_of(journal), 10**6)


def test_a_process_killed_while_appending_leaves_whole_batches(journals: Any, start_process: Any) -> None:
    """All or none of each append is there, and all of those that had returned."""
    for num_batches_before in (0, 3):
        crash_while_appending(journals, start_process, num_batches_before)


@pytest.mark.slow
def test_processes_killed_at_many_moments_leave_whole_batches(journals: Any, start_process: Any) -> None:
    """The same at 40 other moments."""
    for num_batches_before in range(40):
        crash_while_appending(journals, start_process, num_batches_before)


# --- members ----------------------------------------------------------------------------------


def test_an_entry_waits_for_those_who_have_not_acknowledged_it(journal: Journal) -> None:
    """A new member has taken nothing; an acknowledgement covers all up to its position."""
    first = journal.join("first", LONG_S)
    journal.join("second", LONG_S)
    old = journal.append([invalidation("x")])
    new = journal.append([invalidation("y")])
    assert journal.waiting_for(new) == ("first", "second")
    journal.acknowledge("first", old, LONG_S)
    assert journal.waiting_for(old) == ("second",)
    journal.acknowledge("second", new, LONG_S)
    assert (journal.waiting_for(old), journal.waiting_for(new)) == ((), ("first",))
    assert first == start_of(journal)


def test_nobody_waits_for_a_member_that_left(journal: Journal) -> None:
    """Leaving ends the membership at once, and may be repeated."""
    journal.join("me", LONG_S)
    position = journal.append([invalidation("x")])
    journal.leave("me")
    journal.leave("me")
    assert journal.waiting_for(position) == ()


def test_nobody_waits_longer_than_a_lease(journal: Journal, eventually: Any) -> None:
    """A member that does not renew its lease is given up, but comes back with an acknowledgement."""
    journal.join("me", LONG_S)
    position = journal.append([invalidation("x")])
    journal.acknowledge("me", Position(position.epoch, 0), 0.05)
    eventually(lambda: journal.waiting_for(position) == ())
    journal.acknowledge("me", Position(position.epoch, 0), LONG_S)
    assert journal.waiting_for(position) == ("me",)


def test_a_lease_longer_than_the_longest_is_refused(journals: Any) -> None:
    """The grace time after a loss counts on it."""
    journals.new()
    journal = journals.again(max_lease_s=2.0)
    for lease_s in (2.1, 0.0, -1.0):
        with pytest.raises(ConfigurationError, match="lease_s"):
            journal.join("me", lease_s)
        with pytest.raises(ConfigurationError, match="lease_s"):
            journal.acknowledge("me", start_of(journal), lease_s)


# --- compaction -------------------------------------------------------------------------------


@settings(max_examples=150)
@given(st.lists(changes, max_size=14), st.data())
def test_folding_in_steps_keeps_the_documents(entries: list[Entry], data: st.DataObject) -> None:
    """Folded any number of times on the way, the entries lead to the same documents, at growing places."""
    numbered = [
        Entry(action=e.action, tenant=e.tenant, doc_id=e.doc_id, version=e.version, keys=e.keys, seq=seq)
        for seq, e in enumerate(entries, 1)
    ]
    left: list[Entry] = []
    for entry in numbered:
        left.append(entry)
        if data.draw(st.booleans()):
            left = folded(left)
    seqs = [entry.seq for entry in left]
    assert seqs == sorted(set(seqs))
    assert_same_documents(left, entries)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.lists(changes, min_size=1, max_size=4) | st.integers(0, 5), max_size=8))
def test_a_compacted_journal_tells_the_same_documents(journals: Any, steps: list[Any]) -> None:
    """`read` from the start leads to the documents of all entries, compactions at whatever points."""
    journal = journals.new()
    appended: list[Entry] = []
    for step in steps:
        if isinstance(step, int):
            journal.compact(keep=step)
        else:
            journal.append(step)
            appended += step
    assert_same_documents(all_entries(journals.again()), appended)
    assert journal.end().seq == len(appended)
    assert journal.check() == []


def test_compaction_leaves_what_is_left_of_the_past(journal: Journal) -> None:
    """Superseded entries go, the last ones stay as they are, and the number that went is told."""
    journal.append([replacement("x", "v1", "k1"), replacement("x", "v2", "k2"), invalidation("x")])
    journal.append([replacement("y", "v1", "k3"), replacement("y", "v2", "k4"), invalidation("z")])
    assert journal.compact(keep=1) == 4
    left = all_entries(journal)
    assert [(e.action, e.doc_id, e.version, e.keys) for e in left] == [
        (Action.REPLACE, "y", "v2", ("k4",)),
        (Action.INVALIDATE, "z", None, ()),
    ]
    assert journal.compact(keep=1) == 0


def test_the_compacted_past_is_given_whole(journal: Journal) -> None:
    """A limit cuts behind the compacted past only, so that paging never stops inside it."""
    journal.append([replacement(str(number), "v", "k") for number in range(6)])
    journal.compact(keep=2)
    page = journal.read(start_of(journal), 1)
    assert doc_ids(page) == ["0", "1", "2", "3", "4"]
    assert doc_ids(journal.read(Position(start_of(journal).epoch, page[-1].seq))) == ["5"]


def test_a_reader_behind_a_compaction_starts_over(journal: Journal) -> None:
    """It would miss invalidations; a reader at its end misses nothing."""
    end = journal.append([replacement("x", "v1", "k1"), invalidation("x"), invalidation("y")])
    behind, ahead = Position(end.epoch, 1), Position(end.epoch, 2)
    assert journal.continues(behind)
    journal.compact(keep=1)
    assert not journal.continues(behind)
    with pytest.raises(StartOverError):
        journal.read(behind)
    assert journal.continues(ahead)
    assert doc_ids(journal.read(ahead)) == ["y"]
    assert not journal.continues(start_of(journal))


def test_compaction_waits_for_members_with_a_lease(journal: Journal, eventually: Any) -> None:
    """What a live member has not acknowledged stays readable for it; a dead one holds up nothing."""
    journal.join("me", LONG_S)
    end = journal.append([invalidation(str(number)) for number in range(4)])
    taken = Position(end.epoch, 2)
    journal.acknowledge("me", taken, LONG_S)
    journal.compact(keep=0)
    assert doc_ids(journal.read(taken)) == ["2", "3"]
    journal.acknowledge("me", taken, 0.02)
    eventually(lambda: journal.compact(keep=0) > 0)
    with pytest.raises(StartOverError):
        journal.read(taken)


def test_a_position_of_an_empty_journal_continues_until_it_is_compacted(journal: Journal) -> None:
    """Seq 0 is a place like others: entries that came and went behind it were missed."""
    start = start_of(journal)
    assert journal.continues(start)
    journal.append([replacement("x", "v1", "k1"), invalidation("x")])
    assert journal.continues(start)
    journal.compact(keep=0)
    assert all_entries(journal) == []
    assert not journal.continues(start)


# --- later versions ---------------------------------------------------------------------------


def test_what_a_later_version_wrote_is_read_as_unknown(journals: Any) -> None:
    """It is no damage: the entries around it are read, and nothing begins anew."""
    journals.new().append([invalidation("1"), of_a_later_version(), invalidation("3")])
    journal = journals.again()
    entries = all_entries(journal)
    assert [entry.action for entry in entries] == [Action.INVALIDATE, Action.UNKNOWN, Action.INVALIDATE]
    assert (entries[1].tenant, entries[1].seq) == ("a", 2)
    assert journal.check() == []
    assert not journal.was_reset


def test_what_only_a_later_version_knows_is_not_folded_away(journals: Any) -> None:
    """Compaction is left to a process that knows what the entry says."""
    journals.new().append([replacement("x", "v1", "k1"), of_a_later_version(), replacement("x", "v2", "k2")])
    journal = journals.again()
    assert journal.compact(keep=0) == 0
    assert len(all_entries(journal)) == 3


@pytest.mark.parametrize("action", ["reset", "unknown"])
def test_actions_that_are_never_written_are_unknown(action: str) -> None:
    """A journal that holds one was not written by this version; it must not reset everybody."""
    text = encode(Entry(action=action, tenant="a"))  # type: ignore[arg-type]
    assert decode(1, text).action is Action.UNKNOWN


def test_an_action_that_is_no_text_is_damage() -> None:
    with pytest.raises(DamagedJournalError):
        decode(1, '[1,"a","",null,"",[]]')


# --- the object -------------------------------------------------------------------------------


def test_a_sound_journal_has_no_faults(journal: Journal) -> None:
    """`check` is silent about entries, members and compactions."""
    journal.join("me", LONG_S)
    journal.append([replacement("x", "v1", "k1"), invalidation("y")])
    journal.acknowledge("me", journal.end(), LONG_S)
    journal.compact(keep=0)
    assert journal.check() == []
    assert not journal.was_reset


def test_a_closed_journal_answers_nothing(journal: Journal) -> None:
    """Every call raises `JournalError`, and closing again does nothing."""
    start = start_of(journal)
    journal.close()
    journal.close()
    calls: list[Callable[[], object]] = [
        journal.end,
        lambda: journal.append([invalidation("x")]),
        lambda: journal.read(start),
        lambda: journal.join("me", LONG_S),
        lambda: journal.waiting_for(start),
        journal.compact,
    ]
    for call in calls:
        with pytest.raises(JournalError):
            call()


def test_lost_members_are_named_apart() -> None:
    """No member can have the name: members' names end in a unique part."""
    assert ":" not in LOST_MEMBERS
