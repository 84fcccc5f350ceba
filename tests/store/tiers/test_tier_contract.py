"""What every tier of blobs promises, run over all of them."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from cachecraft_rag.errors import ConfigurationError
from cachecraft_rag.store.tiers import BlobTier, MemoryTier, TierError

BLOB_BYTES = 128 * 1024
BLOB = random.Random(0).randbytes(BLOB_BYTES)
ODD_NAMES = (
    "a/b/1of2",
    "../up",
    "*?[x]\\",
    "50%_",
    "with space",
    "Zürich 上海 🏙",
    "line\nbreak",
    "x" * 400,
    "",
)


def assert_sound(tier: BlobTier) -> None:
    assert tier.check() == []
    stats = tier.stats()
    assert stats.num_blobs == len(list(tier.names()))
    assert 0 <= stats.num_bytes <= stats.budget_bytes
    assert stats.num_errors == 0, stats.last_fault


def assert_holds(tier: BlobTier, *names: str) -> None:
    assert sorted(tier.names()) == sorted(names)
    assert_sound(tier)


def test_what_was_put_is_got(tiers: Any) -> None:
    """A blob comes back byte for byte, be it in the index or in a file of its own; a miss is None."""
    tier = tiers.new()
    for value in (b"", b"x", BLOB[:4095], BLOB[:4096], BLOB):
        assert tier.put("n", value)
        assert tier.get("n") == value
    assert tier.get("other") is None
    stats = tier.stats()
    assert (stats.num_hits, stats.num_misses, stats.num_evictions) == (5, 1, 0)
    assert_holds(tier, "n")


def test_buffers_are_stored_one_behind_the_other(tiers: Any) -> None:
    """Buffers of any kind are joined, and what happens to them afterwards does not matter."""
    tier = tiers.new()
    array = np.arange(6000, dtype=np.int16).reshape(2, 3000)
    buffer = bytearray(b"later changed")
    expected = b"head" + array.tobytes() + bytes(buffer)
    assert tier.put("n", [b"head", memoryview(array), b"", memoryview(np.empty((0, 3))), buffer])
    buffer[:5] = b"XXXXX"
    assert tier.get("n") == expected
    assert tier.put("none", [])
    assert tier.get("none") == b""


def test_names_may_hold_any_text(tiers: Any) -> None:
    """A name is text and nothing more: no path, no pattern, no statement."""
    tier = tiers.new()
    for number, name in enumerate(ODD_NAMES):
        assert tier.put(name, f"{number}".encode())
    for number, name in enumerate(ODD_NAMES):
        assert tier.get(name) == f"{number}".encode()
        assert name in set(tier.names(name))
    assert list(tier.names("*?[")) == ["*?[x]\\"]
    assert list(tier.names("50%")) == ["50%_"]
    assert tier.delete(ODD_NAMES) == len(ODD_NAMES)
    assert_holds(tier)


def test_names_are_listed_by_prefix(tiers: Any) -> None:
    """The prefix is compared letter by letter, with its case."""
    tier = tiers.new()
    for name in ("t/1", "t/2", "T/1", "u/t/1"):
        tier.put(name, b"v")
    assert sorted(tier.names("t/")) == ["t/1", "t/2"]
    assert sorted(tier.names()) == ["T/1", "t/1", "t/2", "u/t/1"]
    assert list(tier.names("none")) == []


LAST = chr(0x10FFFF)
NEIGHBOURS = (
    "",
    "a",
    "a/",
    "a/b",
    "a0",
    "a\x00",
    "\ud7ff",
    "\ud7ff x",
    "\ue000",
    "z",
    f"z{LAST}",
    f"z{LAST}{LAST}x",
    "{",
    LAST,
    f"{LAST}{LAST}",
    f"{LAST}x",
)


def test_a_prefix_ends_where_the_next_one_begins(tiers: Any) -> None:
    """Whatever stands beside it in the order of names: separators, nothing, the last character there is."""
    tier = tiers.new()
    for name in NEIGHBOURS:
        tier.put(name, b"v")
    for prefix in NEIGHBOURS:
        expected = sorted(name for name in NEIGHBOURS if name.startswith(prefix))
        assert sorted(tier.names(prefix)) == expected, repr(prefix)
    assert_holds(tier, *NEIGHBOURS)


def test_more_names_than_one_answer_holds(tiers: Any) -> None:
    """Each is listed once, and none of another prefix."""
    tier = tiers.new()
    listed = [f"a/{number}" for number in range(1001)]
    for name in ("a", *listed, "b"):
        tier.put(name, b"")
    assert sorted(tier.names("a/")) == sorted(listed)


def test_discard_spares_what_came_later(tiers: Any) -> None:
    """Only the very bytes that were seen are removed, be they in the index or in a file of their own."""
    tier = tiers.new()
    for seen, later in ((b"seen", b"later"), (BLOB, BLOB[::-1]), (b"", b"x")):
        tier.put("n", later)
        assert not tier.discard("n", seen)
        assert tier.get("n") == later
        tier.put("n", seen)
        assert tier.discard("n", seen)
        assert not tier.discard("n", seen)
        assert tier.get("n") is None
    assert_holds(tier)


def test_delete_is_complete(tiers: Any) -> None:
    """Deleted blobs are gone and counted; names that are unknown, or said twice, count once or not at all."""
    tier = tiers.new()
    for number in range(1200):
        tier.put(f"{number}", b"v")
    kept = ["1100", "1101"]
    assert tier.delete(f"{number}" for number in range(1100)) == 1100
    assert tier.delete(["none", "1102", "1102", *(f"{n}" for n in range(1103, 1200))]) == 98
    assert tier.get("5") is None
    assert_holds(tier, *kept)


def test_least_recently_used_go_first(tiers: Any) -> None:
    """A get and a put of the same name count as uses; the blob not used for longest gives way."""
    tier = tiers.new(num_blobs=4)
    for name in "abcd":
        tier.put(name, BLOB)
    assert tier.stats().num_evictions == 0
    tier.get("a")
    tier.put("b", BLOB[::-1])
    tier.put("e", BLOB)
    assert_holds(tier, "a", "b", "d", "e")
    tier.put("f", BLOB)
    assert_holds(tier, "a", "b", "e", "f")
    assert tier.stats().num_evictions == 2
    assert tier.get("b") == BLOB[::-1]


def test_a_blob_over_the_budget_changes_nothing(tiers: Any) -> None:
    """It is refused without an eviction, and a blob of its name stays as it was."""
    tier = tiers.new(num_blobs=2)
    tier.put("a", BLOB)
    tier.put("b", b"old")
    assert not tier.put("b", BLOB * 4)
    assert not tier.put("c", BLOB * 4)
    assert tier.get("b") == b"old"
    assert_holds(tier, "a", "b")


def test_a_larger_value_takes_the_place_of_others_not_of_itself(tiers: Any) -> None:
    """Replacing needs room like any put, and ends with the new value alone under its name."""
    tier = tiers.new(num_blobs=3)
    for name in "abc":
        tier.put(name, BLOB)
    assert tier.put("b", BLOB * 3)
    assert tier.get("b") == BLOB * 3
    assert_holds(tier, "b")


def test_small_blobs_keep_the_budget_too(tiers: Any) -> None:
    """The entries of many small blobs count: names and index are bytes as well."""
    tier = tiers.new(num_blobs=2)
    for number in range(1500):
        assert tier.put(f"{number:0200}", b"v" * 200)
        if number % 100 == 0:
            assert_sound(tier)
    assert 0 < len(list(tier.names())) < 1500
    assert tier.get(f"{1499:0200}") == b"v" * 200
    assert_sound(tier)


def test_a_closed_tier_refuses(tiers: Any) -> None:
    """After close every call says so, and closing again does nothing."""
    tier = tiers.new() if tiers.kind != "guarded" else MemoryTier(10_000)
    tier.put("a", b"v")
    tier.flush()
    tier.close()
    tier.close()
    calls = (
        lambda: tier.get("a"),
        lambda: tier.put("a", b"v"),
        lambda: tier.delete(["a"]),
        lambda: tier.discard("a", b"v"),
        tier.names,
        tier.flush,
        tier.check,
    )
    for call in calls:
        with pytest.raises(TierError):
            call()


def test_a_shared_medium_is_seen_by_all(tiers: Any) -> None:
    """What one opener puts or deletes, the other finds or does not; uses of both count."""
    if not tiers.is_shared:
        pytest.skip("kept by one process only")
    one = tiers.new(num_blobs=3)
    two = tiers.again()
    for name in "abc":
        one.put(name, BLOB)
    assert two.get("a") == BLOB
    assert two.put("d", BLOB)
    assert one.get("b") is None
    assert two.delete(["c"]) == 1
    assert one.get("c") is None
    assert_holds(one, "a", "d")
    assert_holds(two, "a", "d")


def test_threads_see_whole_blobs_only(tiers: Any) -> None:
    """Eight threads on one tier: every blob got is one that was put, and the books add up afterwards."""
    tier = tiers.new(num_blobs=4)
    faults: list[object] = []

    def work(seed: int) -> None:
        choose = random.Random(seed)
        try:
            for _ in range(40):
                name = f"{choose.randrange(8)}"
                action = choose.random()
                if action < 0.45:
                    size = choose.choice((100, BLOB_BYTES // 2, BLOB_BYTES))
                    faults.extend([] if tier.put(name, name.encode() * size) else [f"refused {size}"])
                elif action < 0.9:
                    value = tier.get(name)
                    faults.extend([] if value in (None, name.encode() * len(value or b"")) else ["torn"])
                elif action < 0.97:
                    tier.delete([name])
                else:
                    faults.extend(tier.check())
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert_sound(tier)


def test_a_budget_below_zero_is_refused() -> None:
    """A tier of less than nothing is a mistake in the settings."""
    with pytest.raises(ConfigurationError, match="budget_bytes"):
        MemoryTier(-1)


names = st.sampled_from(["a", "b", "c/1", "c/2", "d"])
sizes = st.sampled_from([0, 1, 5000, BLOB_BYTES // 2, BLOB_BYTES, BLOB_BYTES, 2 * BLOB_BYTES, 9 * BLOB_BYTES])


class TierMachine(RuleBasedStateMachine):
    """A tier against a dictionary in order of use.

    The model does not know what an entry costs, so it asks which blobs are left and checks that they
    are those used last, that nothing went without need, and that nothing needed stayed.
    """

    num_blobs = 3

    def __init__(self, tiers: Any) -> None:
        super().__init__()
        self.tiers = tiers
        self.model: OrderedDict[str, bytes] = OrderedDict()
        self.num_evictions = 0

    @initialize()
    def start(self) -> None:
        self.tier = self.tiers.new(self.num_blobs)

    @rule(name=names, size=sizes, fill=st.integers(0, 255))
    def put(self, name: str, size: int, fill: int) -> None:
        value = bytes([fill]) * size
        fits = size <= self.num_blobs * BLOB_BYTES
        assert self.tier.put(name, value) == fits
        if fits:
            old = self.model.get(name, b"")
            self.model[name] = value
            self.model.move_to_end(name)
            # On disk the old value stays until the new one is there: room is needed for both.
            self.evict(len(old) if self.tiers.kind == "disk" else 0)

    def evict(self, old_bytes: int) -> None:
        left = set(self.tier.names())
        gone = [name for name in self.model if name not in left]
        assert gone == list(self.model)[: len(gone)], "one used later went before one used earlier"
        sizes = [len(value) for value in self.model.values()]
        limit = self.num_blobs * BLOB_BYTES
        if gone:
            assert sum(sizes[len(gone) - 1 :]) + old_bytes > limit, "one went without need"
        assert sum(sizes[len(gone) :]) < limit + BLOB_BYTES
        self.num_evictions += len(gone)
        for name in gone:
            del self.model[name]

    @rule(name=names)
    def get(self, name: str) -> None:
        assert self.tier.get(name) == self.model.get(name)
        if name in self.model:
            self.model.move_to_end(name)

    @rule(chosen=st.lists(names, max_size=3))
    def delete(self, chosen: list[str]) -> None:
        known = {name for name in chosen if name in self.model}
        assert self.tier.delete(chosen) == len(known)
        for name in known:
            del self.model[name]

    @rule(name=names, is_same=st.booleans())
    def discard(self, name: str, is_same: bool) -> None:
        seen = self.model.get(name, b"none") if is_same else b"other"
        is_gone = self.model.get(name) == seen
        assert self.tier.discard(name, seen) == is_gone
        if is_gone:
            del self.model[name]

    @rule(prefix=st.sampled_from(["", "c", "c/", "z"]))
    def list_names(self, prefix: str) -> None:
        assert sorted(self.tier.names(prefix)) == sorted(n for n in self.model if n.startswith(prefix))

    @rule()
    def flush(self) -> None:
        self.tier.flush()

    @rule()
    def repair(self) -> None:
        assert self.tier.check(repair=True) == []

    @rule()
    def reopen(self) -> None:
        if self.tiers.is_shared:
            self.tier.close()
            self.tier = self.tiers.again()
            self.num_evictions = 0

    @invariant()
    def is_sound(self) -> None:
        assert_holds(self.tier, *self.model)
        assert self.tier.stats().num_evictions == self.num_evictions

    def teardown(self) -> None:
        self.tier.close()


def test_every_history_is_that_of_a_dictionary(tiers: Any) -> None:
    """Random calls answer as a dictionary in order of use would, and `check` is clean after each."""
    few = settings(max_examples=8, stateful_step_count=15)
    run_state_machine_as_test(lambda: TierMachine(tiers), settings=few)
