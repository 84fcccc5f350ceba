"""Changes that bind several processes: each with books of its own, over one journal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import pytest

from cachecraft_rag.chunks import ChunkKey, DocumentRef, RecordMeta
from cachecraft_rag.store import HostChunkStore, Refusal
from cachecraft_rag.store.journal import Action, Entry, Follower
from cachecraft_rag.store.journal.sqlite import SqliteJournal
from cachecraft_rag.vllm_connector.shared_changes import SharedChanges, Steps

KEY = ChunkKey("k")
DOCUMENT = DocumentRef("doc", "v1")


class Member:
    """What one process has: books, and its place in the journal."""

    def __init__(
        self, journal: SqliteJournal, executor: Executor, poll_all: Callable[[float], object]
    ) -> None:
        self.store = HostChunkStore(1000, 2)
        self.follower = Follower(journal, "member", wait=poll_all)
        self.applied: list[Action] = []
        self.changes = SharedChanges(
            self.follower,
            self.store,
            executor,
            lambda entry, is_news: self.applied.append(entry.action),
            make_executor=lambda _: executor,
        )

    def planned(self, tenant: str = "a", key: ChunkKey = KEY) -> RecordMeta:
        return RecordMeta(
            record_id=self.store.next_record_id(tenant),
            key=key,
            tenant=tenant,
            num_tokens=4,
            start=0,
            size_bytes=10,
            prefix_hash="p",
            document=DOCUMENT,
            generation=self.store.generation(tenant, DOCUMENT.doc_id, key),
        )

    def put(self, tenant: str = "a", key: ChunkKey = KEY) -> RecordMeta:
        meta = self.planned(tenant, key)
        assert self.store.reserve(meta).accepted
        assert self.store.commit(meta.record_id, None)
        return meta


@pytest.fixture
def members(tmp_path: Path, executor: Executor) -> Iterator[list[Member]]:
    journal = SqliteJournal(tmp_path / "journal")
    found: list[Member] = []
    found += [Member(journal, executor, lambda _: [m.follower.poll() for m in found]) for _ in range(2)]
    for member in found:
        member.follower.poll()
        assert member.changes.catch_up()
    yield found
    for member in found:
        member.follower.close()
    journal.close()


def carried_out(steps: Steps) -> Any:
    """The result of a command whose side threads have run at once."""
    awaited = next(steps)
    try:
        while True:
            awaited = steps.send(awaited.result(timeout=0))
    except StopIteration as end:
        return end.value


def invalidation_of(key: ChunkKey, tenant: str = "a") -> Entry:
    return Entry(action=Action.INVALIDATE_CHUNKS, tenant=tenant, keys=(key,))


def assert_sound(members: list[Member]) -> None:
    assert [member.store.check() for member in members] == [[], []]


def test_invalidated_chunk_is_gone_in_every_process(members: list[Member]) -> None:
    """When the command returns, the other process cannot plan without having dropped it."""
    one, other = members
    for member in members:
        member.put()
        member.put(key=ChunkKey("stays"))
    assert carried_out(one.changes.make(invalidation_of(KEY))) == 1
    assert other.changes.catch_up()
    for member in members:
        assert not member.store.holds("a", KEY)
        assert member.store.holds("a", ChunkKey("stays"))
    assert_sound(members)


def test_what_was_planned_before_stores_nothing_of_it_anywhere(members: list[Member]) -> None:
    """Late inserts are refused, before and after the reservation; what is planned after is taken in."""
    one, other = members
    late, reserved = other.planned(), other.planned()
    assert other.store.reserve(reserved).accepted
    carried_out(one.changes.make(invalidation_of(KEY)))
    other.changes.catch_up()
    assert other.store.reserve(late).reason == Refusal.STALE_DOCUMENT
    assert not other.store.commit(reserved.record_id, None)
    other.put()
    assert_sound(members)


def test_unknown_change_costs_its_tenant_its_records_and_nothing_else(members: list[Member]) -> None:
    """A process of a later version may have said anything of the tenant; this one goes on."""
    one, other = members
    for member in members:
        member.put()
        member.put(tenant="b")
    one.follower.append([Entry(action="embargo", tenant="a")])  # type: ignore[arg-type]
    for member in members:
        member.follower.poll()
        assert member.changes.catch_up()
        assert (member.store.holds("a", KEY), member.store.holds("b", KEY)) == (False, True)
        assert member.applied == [Action.UNKNOWN]
    assert carried_out(other.changes.make(invalidation_of(KEY, "b"))) == 1
    assert_sound(members)
