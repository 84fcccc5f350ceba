"""The Redis tier on a real server: a server that fails, forgets or is slow, and books that were damaged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cachecraft_rag.errors import ConfigurationError
from cachecraft_rag.store.tiers import TierError

SHORT_S = 0.1
BUDGET_BYTES = 100_000


@pytest.fixture
def server(own_redis: Any) -> Any:
    return own_redis


@pytest.fixture
def client(server: Any) -> Iterator[Any]:
    import redis

    with redis.Redis.from_url(server.url) as client:
        yield client


def make_tier(url: str, prefix: str = "p", budget_bytes: int = BUDGET_BYTES) -> Any:
    from cachecraft_rag.store.tiers.redis import RedisTier

    return RedisTier(url, budget_bytes, prefix=prefix, timeout_s=SHORT_S)


@pytest.fixture
def tier(server: Any) -> Iterator[Any]:
    tier = make_tier(server.url)
    for name in ("a", "b"):
        tier.put(name, name.encode())
    yield tier
    tier.close()


def assert_every_call_fails(tier: Any) -> None:
    calls = (
        lambda: tier.get("a"),
        lambda: tier.put("a", b"v"),
        lambda: tier.delete(["a"]),
        lambda: tier.discard("a", b"a"),
        tier.names,
        tier.flush,
        tier.stats,
        tier.check,
    )
    for call in calls:
        with pytest.raises(TierError, match="Redis"):
            call()


def assert_found_and_repaired(tier: Any, sentence: str) -> None:
    assert any(sentence in fault for fault in tier.check())
    assert any(sentence in fault for fault in tier.check(repair=True))
    assert tier.check() == []


@pytest.mark.parametrize(
    ("url", "prefix"),
    [("http://user:secret@host", "p"), ("secret", "p"), ("redis://h", "a{b}"), ("redis://h", "")],
)
def test_settings_are_checked_and_passwords_kept(make_redis: Any, url: str, prefix: str) -> None:
    """A foreign scheme or a prefix with a hash tag of its own is refused before any connection."""
    with pytest.raises(ConfigurationError) as refusal:
        make_tier(url, prefix)
    assert "user" not in str(refusal.value)


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
def test_a_server_that_never_was(make_redis: Any, scheme: str) -> None:
    """Making the tier does not connect; every call says that nobody is there."""
    assert_every_call_fails(make_tier(f"{scheme}://127.0.0.1:1"))


def test_a_server_that_goes_and_comes_back_empty(server: Any, tier: Any) -> None:
    """Gone: every call fails. Back and empty: misses, sound books, no call lost to dead connections."""
    server.stop()
    assert_every_call_fails(tier)
    server.start()
    assert tier.get("a") is None
    server.stop()
    server.start()
    assert tier.put("a", b"new")
    assert tier.get("a") == b"new"
    assert tier.check() == []


def test_a_server_that_does_not_answer(server: Any, tier: Any) -> None:
    """Every call ends by its timeout, though the server holds the connection; then the tier works on."""
    server.freeze()
    for call in (lambda: tier.get("a"), lambda: tier.put("c", b"v"), lambda: tier.delete(["a"])):
        with pytest.raises(TierError, match=r"(?i)time"):
            call()
    server.thaw()
    assert tier.get("b") == b"b"
    assert tier.check() == []


def test_a_full_server_is_a_fault(tier: Any, client: Any) -> None:
    """A server at its own memory limit refuses; what is there can be read and deleted."""
    client.config_set("maxmemory", 1)
    with pytest.raises(TierError, match=r"(?i)memory"):
        tier.put("c", b"v")
    assert tier.get("a") == b"a"
    client.config_set("maxmemory", 0)
    assert tier.put("c", b"v")
    assert tier.check() == []


def test_prefixes_are_worlds_apart(server: Any, tier: Any, client: Any) -> None:
    """Tiers of two prefixes share neither blobs nor budget, and nobody else's keys are touched."""
    client.set("users own", b"v")
    other = make_tier(server.url, "q", budget_bytes=1000)
    other.put("a", b"x")
    for number in range(5):
        other.put(f"{number}", bytes(100))
    assert other.stats().num_evictions == 5 - other.stats().num_blobs + 1
    assert tier.get("a") == b"a"
    assert tier.delete(["a", "b"]) == 2
    assert client.get("users own") == b"v"
    assert {key.split(b":")[0] for key in client.scan_iter() if key != b"users own"} <= {b"{p}", b"{q}"}
    other.close()


def test_a_blob_the_server_evicted_leaves_the_books(tier: Any, client: Any) -> None:
    """A miss on a listed blob is noticed at once, and its bytes are given back."""
    client.delete("{p}:blob:a")
    used_bytes = tier.stats().num_bytes
    assert tier.get("a") is None
    assert tier.stats().num_bytes < used_bytes
    assert list(tier.names()) == ["b"]
    assert tier.check() == []


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda client: client.delete("{p}:blob:a"), "a is listed but not stored"),
        (lambda client: client.set("{p}:blob:c", b"v"), "c is stored but not listed"),
        (lambda client: client.append("{p}:blob:a", b"more"), "a takes"),
        (lambda client: client.zrem("{p}:lru", "a"), "a is not in the order of use"),
        (lambda client: client.zadd("{p}:lru", {"c": 1}), "c is in the order of use but not listed"),
        (lambda client: client.zrem("{p}:names", "a"), "a is not among the names"),
        (lambda client: client.zadd("{p}:names", {"c": 0}), "c is among the names but not listed"),
        (lambda client: client.delete("{p}:names"), "b is not among the names"),
        (lambda client: client.hincrby("{p}:meta", "used", 7), "the books say"),
        (lambda client: client.hset("{p}:sizes", "a", "x"), "a takes"),
        (lambda client: client.delete("{p}:sizes"), "a is stored but not listed"),
        (lambda client: client.delete("{p}:meta"), "the books say 0"),
    ],
)
def test_damaged_books_are_found_and_repaired(tier: Any, client: Any, damage: Any, sentence: str) -> None:
    """Whatever differs between blobs, order, sizes and sum is said, and put right when asked."""
    damage(client)
    assert_found_and_repaired(tier, sentence)


@pytest.mark.parametrize("key", ["lru", "sizes", "meta", "names"])
def test_put_survives_lost_books(tier: Any, client: Any, key: str) -> None:
    """A server that evicts one of the books costs blobs at most: puts go on, within the budget."""
    for number in range(15):
        tier.put(f"before {number}", bytes(5000))
    client.delete(f"{{p}}:{key}")
    tier.get("before 14")
    tier.delete(["before 13"])
    for number in range(15):
        assert tier.put(f"{number}", bytes(5000))
        stored_bytes = sum(client.strlen(key) for key in client.scan_iter("{p}:blob:*"))
        assert stored_bytes <= tier.stats().num_bytes <= BUDGET_BYTES
    assert tier.get("14") == bytes(5000)
    assert tier.check() == []


def test_a_smaller_budget_is_kept_by_check_and_put(server: Any, tier: Any) -> None:
    """Another process with a smaller budget says what is over, and evicts it."""
    for number in range(10):
        tier.put(f"{number}", bytes(1000))
    small = make_tier(server.url, budget_bytes=5000)
    assert_found_and_repaired(small, "over the budget of 5000")
    assert "9" in set(small.names())
    small.close()


def test_names_are_looked_up_not_searched_through(tier: Any, client: Any) -> None:
    """However many blobs there are, a prefix costs one call, and the server reads its names alone."""
    for number in range(120):
        tier.put(f"other/{number}", b"")
    tier.put("t/1", b"")
    client.config_resetstat()
    assert list(tier.names("t/")) == ["t/1"]
    stats = client.info("commandstats")
    num_calls = {name.removeprefix("cmdstat_"): each["calls"] for name, each in stats.items()}
    num_calls.pop("config|resetstat")
    assert num_calls == {"eval": 1, "zcard": 1, "hlen": 1, "zrangebylex": 1}


@pytest.mark.parametrize("first_call", ["names", "put", "delete", "get"])
def test_books_of_an_older_release_are_completed(tier: Any, client: Any, first_call: str) -> None:
    """It kept no names in order: its blobs are listed all the same, whatever is asked of them first."""
    client.delete("{p}:names")
    calls = {
        "names": lambda: None,
        "put": lambda: tier.put("c", b"v"),
        "delete": lambda: tier.delete(["c"]),
        "get": lambda: tier.get("a"),
    }
    calls[first_call]()
    assert set(tier.names()) - {"c"} == {"a", "b"}
    assert tier.get("a") == b"a"
    assert tier.check() == []


def test_the_charge_covers_what_the_server_takes(server: Any, client: Any) -> None:
    """Of blobs without a value, so of names and entries alone."""
    tier = make_tier(server.url, budget_bytes=10_000_000)
    tier.put("first", b"")
    taken_bytes, charged_bytes = client.info("memory")["used_memory"], tier.stats().num_bytes
    for number in range(1000):
        tier.put(f"{number:0120}", b"")
    taken_bytes = client.info("memory")["used_memory"] - taken_bytes
    charged_bytes = tier.stats().num_bytes - charged_bytes
    tier.close()
    assert 0.8 * charged_bytes < taken_bytes < charged_bytes
