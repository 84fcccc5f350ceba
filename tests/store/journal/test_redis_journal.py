"""What only a journal in Redis has to stand: restarts, evictions, clusters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cachecraft_rag.errors import ConfigurationError
from cachecraft_rag.store.journal import Action, Entry, Follower, JournalError, Position, StartOverError
from cachecraft_rag.store.journal.base import LOST_MEMBERS

LEASE_S = 3.0
RedisJournal = Any


@pytest.fixture
def open_journal(make_redis: Any) -> Iterator[Callable[..., RedisJournal]]:
    from cachecraft_rag.store.journal.redis import RedisJournal

    opened: list[RedisJournal] = []

    def open_one(server: Any, **options: Any) -> RedisJournal:
        opened.append(RedisJournal(getattr(server, "url", server), timeout_s=10.0, **options))
        return opened[-1]

    yield open_one
    for journal in opened:
        journal.close()


def invalidation(doc_id: str) -> Entry:
    return Entry(action=Action.INVALIDATE, tenant="a", doc_id=doc_id)


def entries_of(journal: RedisJournal) -> list[str]:
    return [entry.doc_id for entry in journal.read(Position(journal.end().epoch, 0))]


def drained(follower: Follower) -> list[str]:
    return [entry.doc_id or entry.action for entry in follower.drain()]


def test_a_server_restarted_empty_begins_a_new_epoch(make_redis: Any, open_journal: Any) -> None:
    """Readers lose their place, the loss is told, and members of the old epoch are waited for."""
    server = make_redis()
    journal = open_journal(server)
    journal.join("me", LEASE_S)
    end = journal.append([invalidation("x")])
    server.stop()
    server.start()
    for call in (journal.read, journal.waiting_for, lambda place: journal.acknowledge("me", place, LEASE_S)):
        with pytest.raises(StartOverError):
            call(end)
    assert not journal.continues(end)
    assert entries_of(journal) == []
    assert journal.was_reset
    assert journal.waiting_for(journal.end()) == (LOST_MEMBERS,)


def test_a_server_restarted_with_its_data_begins_a_new_epoch(make_redis: Any, open_journal: Any) -> None:
    """Its last entries may be missing, which nobody could see: entries stay, places do not."""
    server = make_redis("--appendonly", "yes", "--appendfsync", "always")
    journal = open_journal(server)
    journal.join("me", LEASE_S)
    end = journal.append([invalidation("x")])
    server.stop()
    server.start()
    other = open_journal(server)
    assert entries_of(other) == ["x"]
    assert other.was_reset
    assert other.end().epoch != end.epoch
    assert other.waiting_for(other.end()) == (LOST_MEMBERS,)
    with pytest.raises(StartOverError):
        journal.read(end)


def test_members_of_a_lost_journal_are_waited_for_one_lease(
    make_redis: Any, open_journal: Any, eventually: Any
) -> None:
    """Then changes are binding again."""
    journal = open_journal(make_redis(), max_lease_s=0.1)
    position = journal.append([invalidation("x")])
    eventually(lambda: journal.waiting_for(position) == ())


def test_a_follower_survives_a_restart_with_a_reset(
    make_redis: Any, open_journal: Any, eventually: Any
) -> None:
    """It starts over by itself; while the server is away its lease just runs out."""
    server = make_redis()
    follower = Follower(open_journal(server), "me", lease_s=LEASE_S)
    follower.append([invalidation("x")])
    follower.poll()
    assert drained(follower) == ["x"]
    server.stop()
    follower.poll()
    assert "failed" in follower.last_fault
    with pytest.raises(JournalError):
        follower.append([invalidation("y")])
    server.start()
    follower.append([invalidation("z")])
    eventually(lambda: bool(follower.poll()) or drained(follower) == ["reset", "z"])
    assert follower.is_current()
    assert follower.last_fault == ""


def test_a_key_that_the_server_dropped_is_a_new_epoch(redis_server: Any, open_journal: Any) -> None:
    """All of the journal is one key, so that evictions and flushes cannot take a part of it."""
    import redis

    journal = open_journal(redis_server, prefix="dropped")
    end = journal.append([invalidation("x")])
    with redis.Redis.from_url(redis_server.url) as client:
        keys = list(client.scan_iter(match="{dropped}*"))
        assert len(keys) == 1
        assert client.ttl(keys[0]) == -1
        client.delete(*keys)
    with pytest.raises(StartOverError):
        journal.read(end)


def test_a_policy_that_may_evict_the_journal_is_reported(
    make_redis: Any, open_journal: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """By `check`, and in the log when a member joins."""
    server = make_redis("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    journal = open_journal(server)
    (fault,) = journal.check()
    assert "allkeys-lru" in fault
    journal.join("me", LEASE_S)
    assert "allkeys-lru" in caplog.text
    server = make_redis("--maxmemory", "100mb", "--maxmemory-policy", "volatile-lru")
    assert open_journal(server).check() == []


def test_a_missing_entry_is_reported_and_not_skipped(redis_server: Any, open_journal: Any) -> None:
    """Somebody else changed the hash."""
    import redis

    journal = open_journal(redis_server, prefix="torn")
    journal.append([invalidation("x"), invalidation("y")])
    with redis.Redis.from_url(redis_server.url) as client:
        client.hdel("{torn}:journal", "e1")
    with pytest.raises(JournalError, match="entry 1"):
        entries_of(journal)
    assert journal.check() != []


def test_a_full_server_undoes_the_append(make_redis: Any, open_journal: Any) -> None:
    """With `noeviction` writing fails; reading goes on."""
    import redis

    server = make_redis("--maxmemory-policy", "noeviction")
    journal = open_journal(server)
    journal.append([invalidation("x")])
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", 1)
        with pytest.raises(JournalError, match="memory"):
            journal.append([invalidation("y")])
        client.config_set("maxmemory", 0)
    assert entries_of(journal) == ["x"]


def test_journals_of_two_prefixes_know_nothing_of_each_other(redis_server: Any, open_journal: Any) -> None:
    """Entries, members and epochs are apart."""
    one, two = (open_journal(redis_server, prefix=prefix) for prefix in ("apart-1", "apart-2"))
    one.join("me", LEASE_S)
    one.append([invalidation("x")])
    assert entries_of(two) == []
    assert "me" not in two.waiting_for(two.append([invalidation("y")]))


def test_in_a_cluster_it_is_one_key(redis_cluster_url: str, open_journal: Any) -> None:
    """Scripts and hash tag fit a cluster's rules."""
    journal = open_journal(redis_cluster_url)
    journal.join("me", LEASE_S)
    end = journal.append([invalidation("x"), invalidation("y")])
    journal.acknowledge("me", end, LEASE_S)
    journal.compact(keep=1)
    assert entries_of(journal) == ["y"]
    assert journal.check() == []


@pytest.mark.parametrize("wrong", [{"prefix": "a{b}"}, {"prefix": ""}])
def test_a_prefix_that_would_break_the_hash_tag_is_refused(open_journal: Any, wrong: Any) -> None:
    """Letters, digits and `_.:-` only."""
    with pytest.raises(ConfigurationError, match="prefix"):
        open_journal("redis://127.0.0.1", **wrong)


def test_a_wrong_url_is_refused_without_showing_it(open_journal: Any) -> None:
    """It may hold a password."""
    with pytest.raises(ConfigurationError, match="scheme") as fault:
        open_journal("http://user:secret@127.0.0.1")
    assert "secret" not in str(fault.value)


def test_a_server_that_is_not_there_is_a_fault(open_journal: Any, tmp_path: Any) -> None:
    """At the first call, not when it is made; nothing but `JournalError` gets out."""
    journal = open_journal(f"unix://{tmp_path}/nothing")
    with pytest.raises(JournalError):
        journal.end()
    assert len(journal.check()) == 1
