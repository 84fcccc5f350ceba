"""What only a journal in a file has to stand: damage, other formats, a machine that was started again."""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cachecraft_rag.chunks import ChunkKey
from cachecraft_rag.store.journal import Action, Entry, JournalError, Position, StartOverError
from cachecraft_rag.store.journal.base import LOST_MEMBERS, lease_clock
from cachecraft_rag.store.journal.sqlite import SqliteJournal
from cachecraft_rag.store.journal.sqlite_file import _sealed

LEASE_S = 3.0


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def open_journal(place: Path) -> Iterator[Callable[..., SqliteJournal]]:
    opened: list[SqliteJournal] = []

    def open_one(**options: Any) -> SqliteJournal:
        opened.append(SqliteJournal(place, **options))
        return opened[-1]

    yield open_one
    for journal in opened:
        journal.close()


def replacement(doc_id: str) -> Entry:
    return Entry(action=Action.REPLACE, tenant="a", doc_id=doc_id, version="v", keys=(ChunkKey("k" * 32),))


def entries_of(journal: SqliteJournal) -> list[Entry]:
    return journal.read(Position(journal.end().epoch, 0))


def filled(journal: SqliteJournal) -> list[Entry]:
    """A journal with a compacted past, entries behind it and a member; closed."""
    journal.append([replacement(str(number % 30)) for number in range(60)])
    journal.compact(keep=20)
    journal.join("me", LEASE_S)
    entries = entries_of(journal)
    journal.close()
    return entries


def change_row(path: Path, statement: str, *arguments: object) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement, arguments)


def test_what_append_returned_is_synced(open_journal: Any) -> None:
    """Only a sync at each commit survives a crash of the machine; renewing a lease needs none."""
    journal = open_journal()
    with journal._folder.writing(durable=True) as rows:
        assert rows._connection.execute("PRAGMA synchronous").fetchone() == (2,)
        assert rows._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_the_folder_is_for_its_owner_only(place: Path, open_journal: Any) -> None:
    """Even if it was there before with another mode."""
    place.mkdir(mode=0o755)
    open_journal()
    assert place.stat().st_mode & 0o777 == 0o700


def test_a_new_folder_has_no_members_to_wait_for(open_journal: Any) -> None:
    """The first invalidation in a new folder is binding at once."""
    journal = open_journal()
    assert journal.waiting_for(journal.append([replacement("x")])) == ()
    assert not journal.was_reset


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:18] + b"\3" + path.read_bytes()[19:]),
        lambda path: path.write_bytes(path.read_bytes()[:39] + b"\x08" + path.read_bytes()[40:]),
        lambda path: change_row(path, "INSERT INTO entries SELECT 1000, body FROM entries WHERE seq = 60"),
        lambda path: path.write_bytes(b"not a database" * 1000),
        lambda path: path.write_bytes(path.read_bytes()[:5000]),
        lambda path: change_row(path, "UPDATE entries SET body = replace(body, 'replace', 'register')"),
        lambda path: change_row(path, "UPDATE entries SET seq = seq + 1 WHERE seq = 60"),
        lambda path: change_row(path, "DELETE FROM entries WHERE seq = 50"),
        lambda path: change_row(path, "DELETE FROM entries WHERE seq < 40"),
        lambda path: change_row(path, "DELETE FROM books WHERE name = 'state'"),
        lambda path: change_row(path, "UPDATE books SET name = 'member you' WHERE name = 'member me'"),
        lambda path: change_row(path, "DROP TABLE books"),
        lambda path: change_row(path, "UPDATE entries SET body = x'ff' WHERE seq = 60"),
    ],
)
def test_a_damaged_file_is_left_aside_for_a_new_one(place: Path, open_journal: Any, damage: Any) -> None:
    """The new journal is empty, of another epoch, and waits for the members of the lost one."""
    journal = open_journal()
    old_epoch = journal.end().epoch
    filled(journal)
    damage(place / "journal-1.sqlite3")
    again = open_journal()
    assert again.was_reset
    assert entries_of(again) == []
    assert again.end().epoch != old_epoch
    assert again.waiting_for(again.append([replacement("x")])) == (LOST_MEMBERS,)
    assert not open_journal().was_reset


def flip_and_read(place: Path, sound: bytes, entries: list[Entry], position: int, bit: int) -> None:
    for path in place.glob("journal-*"):
        path.unlink()
    damaged = bytearray(sound)
    damaged[position] ^= 1 << bit
    (place / "journal-1.sqlite3").write_bytes(damaged)
    journal = SqliteJournal(place)
    assert journal.was_reset or entries_of(journal) == entries
    journal.append([replacement("after")])
    assert journal.check() == []
    journal.close()


def flip_many(place: Path, open_journal: Any, num_flips: int) -> None:
    entries = filled(open_journal())
    sound = (place / "journal-1.sqlite3").read_bytes()
    source = random.Random(num_flips)
    positions = [*range(100), *(source.randrange(len(sound)) for _ in range(num_flips))]
    for position in source.sample(positions, num_flips):
        flip_and_read(place, sound, entries, position, source.randrange(8))


def test_flipped_bits_are_detected_or_harmless(place: Path, open_journal: Any) -> None:
    """Whichever bit of the file flips: it opens, and tells all entries or none."""
    flip_many(place, open_journal, 40)


@pytest.mark.slow
def test_many_flipped_bits_are_detected_or_harmless(place: Path, open_journal: Any) -> None:
    """The same for 1,500 bits."""
    flip_many(place, open_journal, 1500)


def test_a_process_at_work_notices_that_another_began_anew(place: Path, open_journal: Any) -> None:
    """Its next call goes to the new file, where its place means nothing."""
    mine = open_journal()
    end = mine.append([replacement("x")])
    change_row(place / "journal-1.sqlite3", "UPDATE entries SET body = 'damage'")
    other = open_journal()
    with pytest.raises(StartOverError):
        mine.waiting_for(end)
    other.append([replacement("y")])
    assert [entry.doc_id for entry in entries_of(mine)] == ["y"]


def test_damage_met_at_work_is_left_aside_at_the_next_call(place: Path, open_journal: Any) -> None:
    """The call that meets it fails; the one after it finds a sound journal."""
    journal = open_journal()
    end = journal.append([replacement("x"), replacement("y")])
    change_row(place / "journal-1.sqlite3", "UPDATE entries SET body = 'damage' WHERE seq = 2")
    with pytest.raises(JournalError, match="damaged"):
        journal.read(Position(end.epoch, 1))
    assert journal.end() == Position(journal.end().epoch, 0)
    assert journal.was_reset


def test_only_the_last_damaged_file_is_kept(place: Path, open_journal: Any) -> None:
    """Damage again and again does not fill the disk."""
    for number in range(1, 4):
        open_journal().close()
        (place / f"journal-{number}.sqlite3").write_bytes(b"damage")
    open_journal()
    assert sorted(path.name for path in place.glob("*.sqlite3")) == ["journal-3.sqlite3", "journal-4.sqlite3"]


def test_a_removed_folder_begins_a_new_journal(place: Path, open_journal: Any) -> None:
    """Somebody removed the folder under a process at work: it loses its place, not its mind."""
    journal = open_journal()
    end = journal.append([replacement("x")])
    shutil.rmtree(place)
    with pytest.raises(StartOverError):
        journal.read(end)
    assert journal.was_reset


def test_another_format_is_neither_read_nor_touched(place: Path, open_journal: Any) -> None:
    """A newer version's processes may be using it."""
    open_journal().close()
    state = {"format": 2, "epoch": "e"}
    change_row(
        place / "journal-1.sqlite3",
        "UPDATE books SET body = ? WHERE name = 'state'",
        _sealed("state", json.dumps(state)),
    )
    with pytest.raises(JournalError, match="format 2, this version reads 1"):
        open_journal()
    assert [path.name for path in place.glob("*.sqlite3")] == ["journal-1.sqlite3"]


def test_leases_from_before_the_machine_started_are_over(open_journal: Any) -> None:
    """The clock begins again; a lease that seems to end in days is none."""
    before = open_journal(clock=lambda: 1_000_000.0)
    before.join("me", LEASE_S)
    position = before.append([replacement("x")])
    assert before.waiting_for(position) == ("me",)
    assert open_journal(clock=lambda: 10.0).waiting_for(position) == ()


def test_the_lease_clock_does_not_go_back() -> None:
    """It is the machine's, not one of this process's."""
    assert lease_clock() <= lease_clock()
    assert lease_clock() > 0


def test_a_writer_that_takes_too_long_is_a_fault(place: Path, open_journal: Any) -> None:
    """Reading goes on beside it; writing fails after its time and works again later."""
    journal = open_journal(timeout_s=0.01)
    with closing(sqlite3.connect(place / "journal-1.sqlite3", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(JournalError, match="locked"):
            journal.append([replacement("x")])
        assert entries_of(journal) == []
    journal.append([replacement("x")])
    assert not journal.was_reset


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere; run the tests as another user")
def test_a_folder_that_cannot_be_written_is_a_fault(tmp_path: Path) -> None:
    """Nothing but `JournalError` gets out."""
    tmp_path.chmod(0o500)
    with pytest.raises(JournalError):
        SqliteJournal(tmp_path / "journal")


def test_a_place_that_is_no_folder_is_a_fault(place: Path, open_journal: Any) -> None:
    """Nothing but `JournalError` gets out."""
    place.write_text("a file")
    with pytest.raises(JournalError):
        open_journal()


def test_a_full_disk_is_a_fault_that_undoes_the_append(open_journal: Any) -> None:
    """All or none, and no damage."""
    journal = open_journal()
    with journal._folder.connection() as rows:
        rows._connection.execute("PRAGMA max_page_count = 4")
    with pytest.raises(JournalError, match="full"):
        journal.append([replacement(str(number)) for number in range(1000)])
    assert entries_of(journal) == []
    journal.append([replacement("x")])
    assert not journal.was_reset
