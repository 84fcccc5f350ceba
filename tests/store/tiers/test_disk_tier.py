"""The disk tier: its folder, faults of the disk, damage, planted data and other processes."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

import cachecraft_rag
from cachecraft_rag.errors import ConfigurationError
from cachecraft_rag.store.tiers import TierError
from cachecraft_rag.store.tiers.disk import DiskTier
from cachecraft_rag.store.tiers.disk_index import BlobIndex
from cachecraft_rag.store.tiers.disk_uses import MAX_KEPT_USES, MAX_UNSAVED_USES, UnsavedUses

MakeTier = Callable[..., DiskTier]

BUDGET_BYTES = 8 * 2**20
FILE_BYTES = 10_000
SMALL, LARGE = b"small", random.Random(0).randbytes(FILE_BYTES)
SOURCES = str(Path(cachecraft_rag.__file__).parents[1])


def assert_sound(tier: DiskTier) -> None:
    assert tier.check() == []
    assert folder_bytes(tier.folder) <= BUDGET_BYTES


def assert_found_and_repaired(tier: DiskTier, sentence: str) -> None:
    assert any(sentence in fault for fault in tier.check()), tier.check()
    tier.check(repair=True)
    assert_sound(tier)


def folder_bytes(folder: Path) -> int:
    """Size of all files; those that vanish while they are counted are not there."""
    total = 0
    for entry in os.scandir(folder):
        try:
            total += entry.stat().st_size
        except FileNotFoundError:
            continue
    return total


def value_files(tier: DiskTier) -> list[Path]:
    return sorted(tier.folder.glob("*.val"))


def plant(folder: Path, statement: str, *arguments: object) -> None:
    with closing(sqlite3.connect(folder / "cache.db")) as connection, connection:
        connection.execute(statement, arguments)


def filled(make_disk_tier: MakeTier) -> DiskTier:
    tier = make_disk_tier()
    tier.put("small", SMALL)
    tier.put("large", LARGE)
    tier.flush()
    return tier


def test_the_folder_is_for_its_owner(make_disk_tier: MakeTier) -> None:
    """It is made with mode 0700, and given it again when it was opened up."""
    tier = filled(make_disk_tier)
    assert tier.folder.stat().st_mode & 0o777 == 0o700
    tier.close()
    tier.folder.chmod(0o755)
    assert make_disk_tier().folder.stat().st_mode & 0o777 == 0o700


def test_all_is_there_after_reopening(make_disk_tier: MakeTier) -> None:
    """Blobs and the order of their uses outlive the tier, whichever of its threads wrote them."""
    tier = filled(make_disk_tier)
    writer = threading.Thread(target=lambda: tier.put("thread", LARGE))
    writer.start()
    writer.join()
    tier.get("small")
    tier.close()
    tier = make_disk_tier()
    assert (tier.get("large"), tier.get("thread"), tier.get("small")) == (LARGE, LARGE, SMALL)
    assert_sound(tier)


def test_no_file_stays_behind(make_disk_tier: MakeTier) -> None:
    """Replaced, deleted and evicted blobs leave no file."""
    tier = filled(make_disk_tier)
    tier.put("large", LARGE[::-1])
    assert len(value_files(tier)) == 1
    tier.put("large", SMALL)
    assert value_files(tier) == []
    for number in range(12):
        tier.put(f"{number}", bytes(2**20))
    assert len(value_files(tier)) == tier.stats().num_blobs < 12
    tier.delete(list(tier.names()))
    assert value_files(tier) == []
    assert_sound(tier)


def test_a_smaller_budget_is_kept_from_the_opening_on(make_disk_tier: MakeTier) -> None:
    """Opening with less room evicts the blobs used longest ago."""
    tier = make_disk_tier()
    for number in range(6):
        tier.put(f"{number}", bytes(2**20))
    tier.close()
    tier = make_disk_tier(4 * 2**20)
    assert folder_bytes(tier.folder) <= 4 * 2**20
    assert sorted(tier.names()) == ["3", "4", "5"]


def test_a_budget_without_room_for_an_index_is_refused(make_disk_tier: MakeTier) -> None:
    """An index takes bytes too: less than it needs is a mistake in the settings."""
    with pytest.raises(ConfigurationError, match="budget_bytes"):
        make_disk_tier(2**20 - 1)


@pytest.mark.parametrize("content", ["file", "cache.db"])
def test_a_folder_of_somebody_else_is_left_alone(
    make_disk_tier: MakeTier, tmp_path: Path, content: str
) -> None:
    """A folder with files and without our mark is never taken over, opened up or moved."""
    folder = tmp_path / "tier"
    folder.mkdir(mode=0o755)
    (folder / content).write_text("precious")
    with pytest.raises(ConfigurationError, match="not a disk tier's"):
        make_disk_tier()
    assert (folder / content).read_text() == "precious"
    assert folder.stat().st_mode & 0o777 == 0o755


def test_a_folder_that_cannot_be(make_disk_tier: MakeTier, tmp_path: Path) -> None:
    """A file in the place of the folder, or of its parent, is a fault of the medium."""
    (tmp_path / "tier").write_text("a file")
    with pytest.raises(TierError, match="tier"):
        make_disk_tier()
    with pytest.raises(TierError, match="tier"):
        DiskTier(tmp_path / "tier" / "below", BUDGET_BYTES)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("function", ["fdatasync", "rename"])
def test_a_write_that_fails_changes_nothing(
    make_disk_tier: MakeTier, monkeypatch: pytest.MonkeyPatch, function: str, code: int
) -> None:
    """Disk full, read-only or broken: a fault, the old value stays, no file is left, it works again later."""
    tier = filled(make_disk_tier)

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, function, fail)
        for name in ("large", "new"):
            with pytest.raises(TierError, match=os.strerror(code)):
                tier.put(name, LARGE * 2)
        assert tier.get("large") == LARGE
    assert len(value_files(tier)) == 1
    assert sorted(tier.names()) == ["large", "small"]
    assert tier.put("new", LARGE * 2)
    assert tier.stats().num_errors == 2
    assert_sound(tier)


DISK_FULL = """
import resource, signal, sys
from cachecraft_rag.store.tiers import TierError
from cachecraft_rag.store.tiers.disk import DiskTier

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
tier = DiskTier(sys.argv[1], 8 * 2**20)
tier.put("before", bytes(10_000))
for limit in (0, 5_000, 20_000, 60_000, 100_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    num_faults = 0
    for number in range(40):
        for name, value in ((f"small {number}", b"v"), (f"large {number}", bytes(10_000))):
            try:
                tier.put(name, value)
            except TierError:
                num_faults += 1
        assert tier.get("before") == bytes(10_000)
    assert num_faults, limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert tier.check() == [], tier.check()
    assert tier.put("after", bytes(10_000))
    assert tier.get("after") == bytes(10_000)
"""


def test_the_kernel_refuses_writes_at_any_place(tmp_path: Path) -> None:
    """Real failing writes, to files, log and index (a limit on file sizes): then all is well again."""
    run_python(DISK_FULL, tmp_path / "tier").check()


def test_a_writer_who_never_ends(make_disk_tier: MakeTier) -> None:
    """While another process holds the write lock, writes fail by their timeout and reads do not notice."""
    tier = filled(make_disk_tier)
    tier.close()
    tier = make_disk_tier(timeout_s=0.05)
    with closing(sqlite3.connect(tier.folder / "cache.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for call in (lambda: tier.put("a", LARGE), lambda: tier.delete(["large"]), tier.flush):
            with pytest.raises(TierError, match=r"lock|busy"):
                call()
        assert (tier.get("large"), tier.get("small")) == (LARGE, SMALL)
        other.execute("ROLLBACK")
    assert tier.put("a", LARGE)
    assert_sound(tier)


def plans_of(tier: DiskTier, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> list[str]:
    """How SQLite carries out what a call asks of the index."""
    asked: list[tuple[str, tuple[object, ...]]] = []
    rows = BlobIndex.rows

    def note(index: BlobIndex, statement: str, *arguments: object) -> list[Any]:
        asked.append((statement, arguments))
        return rows(index, statement, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(BlobIndex, "rows", note)
        act()
    with closing(sqlite3.connect(tier.folder / "cache.db")) as other:
        return [
            step
            for statement, arguments in asked
            for *_, step in other.execute(f"EXPLAIN QUERY PLAN {statement}", arguments)
        ]


@pytest.mark.parametrize("prefix", ["t/", "", chr(0x10FFFF)])
def test_names_are_looked_up_not_searched_through(
    make_disk_tier: MakeTier, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    """A prefix is a range of the index, which is read from its beginning to its end and nowhere else."""
    tier = filled(make_disk_tier)
    (plan,) = plans_of(tier, monkeypatch, lambda: tier.names(prefix))
    assert plan == "SEARCH Cache USING COVERING INDEX Cache_key_raw (key>? AND key<?)"


def test_discarding_and_reading_look_up_one_row(
    make_disk_tier: MakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = filled(make_disk_tier)
    for act in (lambda: tier.get("large"), lambda: tier.discard("large", LARGE)):
        plans = plans_of(tier, monkeypatch, act)
        assert plans
        assert {plan.split(" (")[0] for plan in plans} == {"SEARCH Cache USING INDEX Cache_key_raw"}


@pytest.mark.parametrize("key", [b"large", b"\xff", 7, 1.5, None])
def test_what_is_no_text_is_no_name(make_disk_tier: MakeTier, key: object) -> None:
    """A planted key of another type stands outside every range of names."""
    tier = filled(make_disk_tier)
    plant(tier.folder, "UPDATE Cache SET key = ? WHERE key = 'large'", key)
    assert list(tier.names()) == ["small"]
    assert list(tier.names("l")) == []
    assert_found_and_repaired(tier, "is no name")


def test_discard_compares_when_nobody_else_can_write(
    make_disk_tier: MakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another process puts right after the blob was looked at stays."""
    tier, other = filled(make_disk_tier), make_disk_tier()
    read, pending = BlobIndex.read, [b"later"]

    def read_and_lag(index: BlobIndex, row: Any) -> bytes:
        value = read(index, row)
        if pending:
            other.put("small", pending.pop())
        return value

    with monkeypatch.context() as patch:
        patch.setattr(BlobIndex, "read", read_and_lag)
        assert not tier.discard("small", SMALL)
    assert tier.get("small") == b"later"


def oldest_name(tier: DiskTier) -> str:
    with closing(sqlite3.connect(tier.folder / "cache.db")) as other:
        ((name,),) = other.execute("SELECT key FROM Cache ORDER BY access_time LIMIT 1")
    return str(name)


def test_a_busy_lock_is_no_fault(make_disk_tier: MakeTier) -> None:
    """While another process writes, uses are kept for later, nothing is discarded and no fault counted."""
    tier = make_disk_tier()
    names = [f"{number}" for number in range(MAX_UNSAVED_USES + 10)]
    for name in names:
        tier.put(name, SMALL)
    with FileLock(tier.folder / "write.lock"):
        for name in names[1:]:
            assert tier.get(name) == SMALL
        tier.get("0")
        assert not tier.discard("0", SMALL)
        assert oldest_name(tier) == "0"
    stats = tier.stats()
    assert (stats.num_errors, stats.last_fault) == (0, "")
    tier.get("0")
    assert oldest_name(tier) == "1"
    assert_sound(tier)


def test_a_busy_index_is_no_fault(make_disk_tier: MakeTier) -> None:
    """The same while somebody holds SQLite's own lock."""
    tier = make_disk_tier(timeout_s=0.01)
    names = [f"{number}" for number in range(MAX_UNSAVED_USES)]
    for name in names:
        tier.put(name, SMALL)
    with closing(sqlite3.connect(tier.folder / "cache.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for name in reversed(names):
            tier.get(name)
        other.execute("ROLLBACK")
    assert tier.stats().num_errors == 0
    tier.get("0")
    assert oldest_name(tier) == names[-1]


def test_uses_are_kept_up_to_a_limit() -> None:
    """The latest use of each blob, and of too many blobs the latest used, in order."""
    uses = UnsavedUses()
    for number in range(MAX_KEPT_USES + 10):
        uses.note(f"{number}")
        uses.note("0")
    kept = uses.take()
    assert len(kept) == MAX_KEPT_USES
    assert list(kept)[:1] + list(kept)[-2:] == ["11", f"{MAX_KEPT_USES + 9}", "0"]
    assert list(kept.values()) == sorted(set(kept.values()))
    assert uses.take() == {}


def test_a_stalled_read_stops_nobody(make_disk_tier: MakeTier) -> None:
    """While one blob's file does not answer, other blobs are read, written and deleted."""
    tier = filled(make_disk_tier)
    (path,) = value_files(tier)
    path.unlink()
    os.mkfifo(path)
    got: list[bytes | None] = []
    reader = threading.Thread(target=lambda: got.append(tier.get("large")), daemon=True)
    reader.start()
    # Opening for writing waits until the reader has opened the pipe: from here on it is stalled.
    with open(path, "wb") as pipe:
        assert tier.get("small") == SMALL
        assert tier.put("other", LARGE)
        assert tier.get("other") == LARGE
        assert tier.delete(["small"]) == 1
        tier.flush()
        assert got == []
        pipe.write(LARGE)
    reader.join()
    assert got == [LARGE]


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


PICKLE_IN_ROW = "UPDATE Cache SET mode = 4, size = 0, filename = NULL, value = ? WHERE key = 'large'"
PICKLE_IN_FILE = "UPDATE Cache SET mode = 4 WHERE key = 'large'"
PICKLED_NAME = "UPDATE Cache SET raw = 0, key = ? WHERE key = 'large'"
TEXT_MODE = "UPDATE Cache SET mode = 3 WHERE key = 'large'"


@pytest.mark.parametrize("is_reopened", [False, True])
@pytest.mark.parametrize("statement", [PICKLE_IN_ROW, PICKLE_IN_FILE, PICKLED_NAME, TEXT_MODE])
def test_a_planted_pickle_never_executes(
    make_disk_tier: MakeTier, tmp_path: Path, statement: str, is_reopened: bool
) -> None:
    """A pickle in the index, in a file or as a name is a miss, is told by check and dropped by repair."""
    tier = filled(make_disk_tier)
    bomb, proof = pickle.dumps(Bomb(tmp_path / "proof")), tmp_path / "proof"
    value_files(tier)[0].write_bytes(bomb.ljust(FILE_BYTES, b"\0"))
    plant(tier.folder, statement, *([bomb] * statement.count("?")))
    if is_reopened:
        tier.close()
        tier = make_disk_tier()
    assert tier.get("large") is None
    assert list(tier.names()) in (["small"], ["large", "small"])
    assert is_reopened == (tier.check() == [])
    tier.check(repair=True)
    assert list(tier.names()) == ["small"]
    assert_sound(tier)
    assert not proof.exists()
    pickle.loads(bomb)
    assert proof.exists(), "the bomb would not have worked"


def test_a_planted_path_is_neither_read_nor_removed(make_disk_tier: MakeTier, tmp_path: Path) -> None:
    """A row that points out of the folder gives nothing away, and its repair deletes nothing outside."""
    tier = filled(make_disk_tier)
    (tmp_path / "secret.val").write_bytes(LARGE)
    plant(tier.folder, "UPDATE Cache SET filename = '../secret.val' WHERE key = 'large'")
    assert tier.get("large") is None
    assert_found_and_repaired(tier, "'large' has no file")
    assert (tmp_path / "secret.val").read_bytes() == LARGE


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda path: path.unlink(), "'large' has no file"),
        (lambda path: os.truncate(path, 5), "'large' has a file of 5 bytes"),
        (lambda path: path.with_name("0" * 32 + ".val").write_bytes(b"lost"), "belongs to no blob"),
        (lambda path: path.with_name("incoming.val").write_bytes(b"lost"), "belongs to no blob"),
        (lambda path: plant(path.parent, "UPDATE Settings SET value = 7 WHERE key = 'size'"), "the size of"),
        (lambda path: plant(path.parent, "DELETE FROM Settings WHERE key = 'count'"), "the count of"),
        (
            lambda path: plant(path.parent, "UPDATE Cache SET size = 'x' WHERE key = 'large'"),
            "instead of 'x'",
        ),
        (lambda path: plant(path.parent, "UPDATE Cache SET value = 1 WHERE key = 'small'"), "holds no bytes"),
    ],
)
def test_damage_is_found_and_repaired(make_disk_tier: MakeTier, damage: Any, sentence: str) -> None:
    """Whatever differs between index and folder is said, put right when asked, and never read as a blob."""
    tier = filled(make_disk_tier)
    damage(value_files(tier)[0])
    assert tier.get("large") in (None, LARGE)
    assert tier.get("small") in (None, SMALL)
    assert_found_and_repaired(tier, sentence)


def test_a_foreign_format_is_moved_aside(make_disk_tier: MakeTier, tmp_path: Path) -> None:
    """A folder of another version is kept beside, never read; check says so until it repairs."""
    filled(make_disk_tier).close()
    (tmp_path / "tier" / "format").write_text("cachecraft-rag blobs 2\n")
    tier = make_disk_tier()
    assert list(tier.names()) == []
    assert_found_and_repaired(tier, "moved to")
    aside = tmp_path / "tier.aside-1"
    assert (aside / "format").read_text() == "cachecraft-rag blobs 2\n"
    assert len(list(aside.glob("*.val"))) == 1


def test_a_folder_in_use_is_not_moved_aside(make_disk_tier: MakeTier, tmp_path: Path) -> None:
    """While somebody has it open, opening an unusable folder fails instead."""
    tier = filled(make_disk_tier)
    (tmp_path / "tier" / "format").write_text("cachecraft-rag blobs 2\n")
    with pytest.raises(TierError, match="other processes have it open"):
        make_disk_tier()
    assert tier.get("large") == LARGE
    tier.close()
    assert list(make_disk_tier().names()) == []


def damaged_copies(folder: Path, num_copies: int, seed: int) -> Any:
    """Copies of a closed tier's folder, each with one bit of one file changed, or one file cut short."""
    choose = random.Random(seed)
    files = sorted(path.name for path in folder.iterdir() if path.stat().st_size)
    for number in range(num_copies):
        copy = folder.with_name(f"copy-{number}")
        shutil.copytree(folder, copy)
        # Most of what can break the index is in it.
        path = copy / choose.choice([*files, "cache.db", "cache.db"])
        content = bytearray(path.read_bytes())
        place = choose.randrange(len(content))
        if choose.random() < 0.15:
            content = content[:place]
        else:
            content[place] ^= 1 << choose.randrange(8)
        path.write_bytes(content)
        yield copy, path.name
        shutil.rmtree(copy)


def check_damage(make_disk_tier: MakeTier, tmp_path: Path, num_copies: int, seed: int) -> None:
    tier = make_disk_tier()
    stored = {f"t/{number:064}/1of2": bytes([number]) * (100 + 700 * number) for number in range(20)}
    for name, value in stored.items():
        tier.put(name, value)
    tier.close()
    for copy, file in damaged_copies(tier.folder, num_copies, seed):
        damaged = DiskTier(copy, BUDGET_BYTES)
        for name in {*stored, *damaged.names()}:
            value = damaged.get(name)
            # Flipped bits inside a value are for the record format's checksum to find.
            assert value is None or len(value) in {len(v) for v in stored.values()}, (file, name)
        damaged.put("new", LARGE)
        assert damaged.get("new") == LARGE, file
        damaged.check(repair=True)
        assert_sound(damaged)
        damaged.close()


def test_a_damaged_folder_opens(make_disk_tier: MakeTier, tmp_path: Path) -> None:
    """One bit of any file, or its end: the folder opens, repaired or empty, answers and can be written."""
    check_damage(make_disk_tier, tmp_path, num_copies=40, seed=1)


@pytest.mark.slow
def test_a_damaged_folder_opens_500_times(make_disk_tier: MakeTier, tmp_path: Path) -> None:
    """The same over many more places."""
    check_damage(make_disk_tier, tmp_path, num_copies=500, seed=2)


class Python:
    """A process that runs a program with the arguments as text; `check` waits and fails as it did."""

    def __init__(self, program: str, *arguments: object) -> None:
        environment = {**os.environ, "PYTHONPATH": SOURCES}
        command = [sys.executable, "-c", program, *map(str, arguments)]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    def check(self) -> None:
        output, _ = self.process.communicate()
        assert self.process.returncode == 0, output


def run_python(program: str, *arguments: object) -> Python:
    return Python(program, *arguments)


BUSY = """
import random, sys
from cachecraft_rag.store.tiers.disk import DiskTier

folder, seed, num_steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
choose = random.Random(seed)
tier = DiskTier(folder, 8 * 2**20, timeout_s=60)
for _ in range(num_steps):
    name, action = str(choose.randrange(30)), choose.random()
    if action < 0.5:
        assert tier.put(name, name.encode().ljust(2) * choose.choice((10, 5_000, 500_000)))
    elif action < 0.9:
        value = tier.get(name)
        assert value is None or value == name.encode().ljust(2) * (len(value) // 2), name
    elif action < 0.95:
        tier.delete([name])
    else:
        tier.flush()
tier.close()
"""


def test_two_processes_never_exceed_the_budget(make_disk_tier: MakeTier) -> None:
    """Two writers on one folder, watched all the time: bytes stay in the budget, blobs whole, books right."""
    tier = make_disk_tier()
    writers = [run_python(BUSY, tier.folder, seed, 80) for seed in (1, 2)]
    most_bytes = 0
    while any(writer.process.poll() is None for writer in writers):
        most_bytes = max(most_bytes, folder_bytes(tier.folder))
    for writer in writers:
        writer.check()
    assert BUDGET_BYTES // 2 < most_bytes <= BUDGET_BYTES
    assert_sound(tier)


WRITER = """
import json, random, sys
from cachecraft_rag.store.tiers.disk import DiskTier

folder, seed = sys.argv[1], int(sys.argv[2])
choose = random.Random(seed)
tier = DiskTier(folder, 8 * 2**20, timeout_s=60)
print("open", flush=True)
for step in range(10_000):
    name, action = str(choose.randrange(8)), choose.random()
    if action < 0.7:
        size = choose.choice((20, 6_000, 60_000))
        print(json.dumps(["put", name, step, size]), flush=True)
        assert tier.put(name, f"{step:5}".encode() * size)
        print('["done"]', flush=True)
    elif action < 0.85:
        print(json.dumps(["delete", name]), flush=True)
        tier.delete([name])
        print('["done"]', flush=True)
    else:
        tier.flush()
"""


def kill_writers(make_disk_tier: MakeTier, num_kills: int, seed: int) -> None:
    """Kill writers at random moments and compare with what they said they did.

    The budget is never reached, so each blob is what the last finished call left, or what the one that was
    cut short would have left, or nothing if that was a put.
    """
    choose = random.Random(seed)
    tier = make_disk_tier()
    folder = tier.folder
    left: dict[str, bytes | None] = {}
    tier.close()
    for number in range(num_kills):
        writer = run_python(WRITER, folder, seed + number).process
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(choose.randrange(1, 60))]
        try:
            writer.wait(choose.random() * 0.01)
        except subprocess.TimeoutExpired:
            writer.send_signal(signal.SIGKILL)
        lines += writer.stdout.readlines()
        writer.wait()
        running = replay(lines[1:], left)
        tier = make_disk_tier()
        check_what_is_left(tier, left, running)
        tier.close()


def replay(lines: list[str], left: dict[str, bytes | None]) -> tuple[str, bytes | None] | None:
    """Take over the finished calls; the call that was running, with the value it would have left."""
    running = None
    for line in lines:
        # The last line may be cut short as well.
        call = json.loads(line) if line.endswith("\n") else ["cut"]
        if call[0] == "put":
            running = (call[1], f"{call[2]:5}".encode() * call[3])
        elif call[0] == "delete":
            running = (call[1], None)
        elif call[0] == "done" and running:
            left[running[0]] = running[1]
            running = None
    return running


def check_what_is_left(
    tier: DiskTier, left: dict[str, bytes | None], running: tuple[str, bytes | None] | None
) -> None:
    assert_sound(tier)
    for name, value in left.items():
        if running is None or running[0] != name:
            assert tier.get(name) == value, name
    if running:
        name, value = running
        found = tier.get(name)
        assert found in (left.get(name), value), name
        left[name] = found


def test_killed_writers_lose_nothing(make_disk_tier: MakeTier) -> None:
    """A writer killed at any moment leaves a folder that opens, is sound, and holds what was put."""
    kill_writers(make_disk_tier, num_kills=5, seed=1)


@pytest.mark.slow
def test_two_hundred_killed_writers_lose_nothing(make_disk_tier: MakeTier) -> None:
    """The same two hundred times on one folder."""
    kill_writers(make_disk_tier, num_kills=200, seed=1000)


STEPS = frozenset(
    {"execute", "executemany", "open", "write", "fdatasync", "fsync", "rename", "unlink", "close"}
)


def die_at_step(folder: Path, last_step: int, act: Callable[[DiskTier], object]) -> bool:
    """Act in a process that ends before its `last_step`-th step on the disk; whether it came so far."""
    child = os.fork()
    if child == 0:
        try:
            tier = DiskTier(folder, BUDGET_BYTES)
            num_steps = 0

            def count(frame: object, event: str, function: Any) -> None:
                nonlocal num_steps
                if event == "c_call" and function.__name__ in STEPS:
                    num_steps += 1
                    if num_steps == last_step:
                        os._exit(7)

            sys.setprofile(count)
            act(tier)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 7


ACTIONS: dict[str, tuple[Callable[[DiskTier], object], dict[str, Any]]] = {
    "new": (lambda tier: tier.put("new", LARGE * 2), {"new": [None, LARGE * 2]}),
    "replace": (lambda tier: tier.put("large", LARGE * 2), {"large": [LARGE, LARGE * 2]}),
    "shrink": (lambda tier: tier.put("large", SMALL), {"large": [LARGE, SMALL]}),
    "delete": (
        lambda tier: tier.delete(["large", "small"]),
        {"large": [LARGE, None], "small": [SMALL, None]},
    ),
    "evict": (
        lambda tier: tier.put("new", bytes(7_000_000)),
        {"large": [LARGE, None], "small": [SMALL, None]},
    ),
    "flush": (lambda tier: tier.flush(), {}),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_a_crash_at_every_step(make_disk_tier: MakeTier, tmp_path: Path, action: str) -> None:
    """Whichever step is the last, the old value or the new one is found, and nothing else was touched."""
    act, outcomes = ACTIONS[action]
    expected: dict[str, list[Any]] = {"small": [SMALL], "large": [LARGE], **outcomes}
    step = 1
    is_cut = True
    while is_cut:
        tier = filled(make_disk_tier)
        tier.close()
        is_cut = die_at_step(tier.folder, step, act)
        tier = make_disk_tier()
        for name, values in expected.items():
            assert tier.get(name) in values, (step, name)
        assert_sound(tier)
        tier.close()
        shutil.rmtree(tier.folder)
        step += 1
    assert step > 5
