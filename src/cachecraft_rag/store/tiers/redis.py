"""Blobs in Redis, shared by processes and machines."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from cachecraft_rag.errors import ConfigurationError, MissingDependencyError
from cachecraft_rag.store.tiers import redis_scripts as scripts
from cachecraft_rag.store.tiers.base import Blob, Counters, TierError, TierStats, as_bytes, checked_budget

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.exceptions import RedisClusterException, RedisError
    from redis.retry import Retry
except ImportError as missing:
    raise MissingDependencyError("the Redis tier needs redis: run `pip install redis`") from missing

ENTRY_BYTES = 544
NAME_BYTES = 4
"""What Redis takes beside a value: `ENTRY_BYTES` for the entries of its key, the hash and two sorted sets;
each of them holds the name (measured with `used_memory` in Redis 7.0; see docs/tiers.md)."""

NAMES_PER_CALL = 500
CHECK_TIMEOUT_S = 5.0


class RedisTier:
    """Least-recently-used blobs as plain strings under a prefix.

    The order of use, the names in order and the sum of bytes are kept in Redis beside the blobs, and changed
    together with them by scripts and transactions: two writers, or a client that dies in the middle, leave
    nothing half done. Whatever the server itself evicts or forgets is found at the next `get`, `put`,
    `names` or `check`. No setting of the server is changed.

    All keys of a prefix have one hash tag, so in a cluster they lie on one node; take a prefix per
    namespace to spread them. `flush` has nothing to do: what was put is with the server, and whether it
    survives the server's own crash is for its `appendonly` setting to say.
    """

    def __init__(
        self, url: str, budget_bytes: int, *, prefix: str = "cachecraft", timeout_s: float = 0.5
    ) -> None:
        """Connects at the first call, not here.

        Args:
            url: `redis://`, `rediss://` (TLS), `unix://`, or a node of a cluster with
                `redis+cluster://`, `rediss+cluster://`.
            budget_bytes: most bytes of values, names and entries together.
            prefix: letters, digits and `_.:-`. Tiers that share it share their blobs.
            timeout_s: longest wait for a connection, and for each piece of an answer.

        Raises:
            ConfigurationError: the budget, the prefix or the URL breaks a rule.
        """
        if not re.fullmatch(r"[\w.:-]+", prefix, re.ASCII):
            raise ConfigurationError(f"prefix is {prefix!r}; use letters, digits and `_.:-`")
        if not re.match(r"(rediss?(\+cluster)?|unix)://", url):
            # The URL may hold a password, so only its scheme is shown.
            raise ConfigurationError(f"the scheme of the Redis URL is {url.split('://')[0]!r}")
        self._url = url
        self._budget_bytes = checked_budget(budget_bytes)
        self._timeout_s = timeout_s
        self._blobs = f"{{{prefix}}}:blob:"
        self._sizes = f"{{{prefix}}}:sizes"
        self._meta = f"{{{prefix}}}:meta"
        self._books = (f"{{{prefix}}}:lru", self._sizes, self._meta, f"{{{prefix}}}:names")
        self._lock = threading.Lock()
        self._clients: dict[float, Any] = {}
        self._counters = Counters()
        self._closed = False

    def get(self, name: str) -> bytes | None:
        with self._server("get") as client:
            pipeline = client.pipeline(transaction=False)
            pipeline.get(self._blobs + name)
            arguments = (*self._books, self._blobs, name)
            pipeline.execute_command("EVAL", scripts.TOUCH, len(self._books), *arguments)
            value: bytes | None = pipeline.execute()[0]
        self._counters.found(value is not None)
        return value

    def put(self, name: str, value: Blob) -> bool:
        held = as_bytes(value)
        num_bytes = len(held) + ENTRY_BYTES + NAME_BYTES * len(name.encode())
        if num_bytes > self._budget_bytes:
            return False
        num_evicted = self._try_put(name, num_bytes, held)
        if num_evicted < 0:
            # Also removes the blob, which is not in the books.
            self.check(repair=True)
            num_evicted = self._try_put(name, num_bytes, held)
        self._counters.evicted(max(num_evicted, 0))
        return num_evicted >= 0

    def delete(self, names: Iterable[str]) -> int:
        left, num_blobs = iter(names), 0
        with self._server("delete") as client:
            while batch := list(islice(left, NAMES_PER_CALL)):
                num_blobs += self._run(client, scripts.DELETE, *batch)
        return num_blobs

    def discard(self, name: str, seen: bytes) -> bool:
        with self._server("discard") as client:
            return bool(self._run(client, scripts.DISCARD, name, seen))

    def names(self, prefix: str = "") -> Iterator[str]:
        found: list[bytes] = []
        # UTF-8 has no byte 0xff, so this is above all names that start with the prefix.
        start, end = b"[" + prefix.encode(), b"(" + prefix.encode() + b"\xff"
        is_more = True
        while is_more:
            batch = self._list(start, end)
            found += batch
            is_more = len(batch) == NAMES_PER_CALL
            start = b"(" + batch[-1] if batch else start
        return iter([name.decode() for name in found])

    def stats(self) -> TierStats:
        with self._server("count") as client:
            pipeline = client.pipeline(transaction=False)
            num_blobs, num_bytes = pipeline.hlen(self._sizes).hget(self._meta, "used").execute()
        return self._counters.stats(
            num_blobs=num_blobs, num_bytes=int(num_bytes or 0), budget_bytes=self._budget_bytes
        )

    def flush(self) -> None:
        with self._server("reach") as client:
            client.exists(self._meta)

    def check(self, repair: bool = False) -> list[str]:
        """Blocks the server for about 18 ms per 1,000 blobs, and then looks through all its keys."""
        with self._server("check", CHECK_TIMEOUT_S) as client:
            rules = (int(repair), self._budget_bytes, ENTRY_BYTES, NAME_BYTES)
            faults = [fault.decode() for fault in self._run(client, scripts.AUDIT, *rules)]
            keys = client.scan_iter(match=f"{self._blobs}*", count=NAMES_PER_CALL)
            stored = (key.decode()[len(self._blobs) :] for key in keys)
            while batch := list(islice(stored, NAMES_PER_CALL)):
                unlisted = self._run(client, scripts.UNLISTED, int(repair), *batch)
                faults += [f"{name.decode()} is stored but not listed" for name in unlisted]
        return faults

    def close(self) -> None:
        with self._lock:
            self._closed = True
            clients, self._clients = self._clients, {}
        for client in clients.values():
            client.close()

    def _list(self, start: bytes, end: bytes) -> list[bytes]:
        """The first names of a range, as ZRANGEBYLEX has it.

        An older release, or a server that evicted them, has left no names: they are made again.
        """
        for _ in range(2):
            with self._server("list") as client:
                names: list[bytes] | None = self._run(client, scripts.LIST, start, end, NAMES_PER_CALL)
            if names is not None:
                return names
            self.check(repair=True)
        raise TierError("cannot list in Redis: the books do not add up, though they were just repaired")

    def _try_put(self, name: str, num_bytes: int, value: bytes) -> int:
        with self._server("put") as client:
            pipeline = client.pipeline(transaction=True)
            arguments = (self._blobs, name, num_bytes, self._budget_bytes)
            pipeline.execute_command("EVAL", scripts.ADMIT, len(self._books), *self._books, *arguments)
            pipeline.set(self._blobs + name, value)
            num_evicted: int = pipeline.execute()[0]
            return num_evicted

    def _run(self, client: Any, script: str, *arguments: object) -> Any:
        return client.eval(script, len(self._books), *self._books, self._blobs, *arguments)

    @contextmanager
    def _server(self, doing: str, timeout_s: float | None = None) -> Iterator[Any]:
        try:
            yield self._client(timeout_s or self._timeout_s)
        # Errors of a cluster's first contact derive from Exception only.
        except (RedisError, RedisClusterException, OSError) as fault:
            message = f"cannot {doing} in Redis: {fault}"
            self._counters.failed(message)
            raise TierError(message) from fault

    def _client(self, timeout_s: float) -> Any:
        with self._lock:
            if self._closed:
                raise TierError("the Redis tier is closed")
            if timeout_s not in self._clients:
                self._clients[timeout_s] = self._connect(timeout_s)
            return self._clients[timeout_s]

    def _connect(self, timeout_s: float) -> Any:
        limits = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
        scheme, _, rest = self._url.partition("://")
        if scheme.endswith("+cluster"):
            url = f"{scheme.removesuffix('+cluster')}://{rest}"
            return redis.RedisCluster.from_url(url, retry=Retry(NoBackoff(), 1), **limits)
        # Once more, at once, when the connection was lost: a server that was restarted leaves dead ones in
        # the pool. Never after a timeout, which may not cost twice.
        retry = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
        return redis.Redis.from_url(self._url, retry=retry, **limits)
