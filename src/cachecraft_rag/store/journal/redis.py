"""A document journal in Redis, shared by processes and machines."""

from __future__ import annotations

import json
import logging
import re
import threading
import uuid
from collections.abc import Sequence
from typing import Any

from cachecraft_rag.errors import ConfigurationError, MissingDependencyError
from cachecraft_rag.store.journal import redis_scripts as scripts
from cachecraft_rag.store.journal.base import (
    DEFAULT_KEEP,
    DEFAULT_LIMIT,
    LOST_MEMBERS,
    MAX_LEASE_S,
    Entry,
    JournalError,
    Position,
    StartOverError,
    checked_lease,
    decode,
    encode,
)
from cachecraft_rag.store.journal.snapshot import can_fold, folded

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.exceptions import RedisClusterException, RedisError
    from redis.retry import Retry
except ImportError as missing:
    raise MissingDependencyError("the Redis journal needs redis: run `pip install redis`") from missing

logger = logging.getLogger(__name__)


class RedisJournal:
    """Entries in one hash under a prefix, changed by scripts only.

    What `append` returned is with the server. A server that was restarted, or another one after a failover,
    may have lost it: that begins a new epoch, in which everybody starts over. No setting of the server is
    changed.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "cachecraft",
        max_lease_s: float = MAX_LEASE_S,
        timeout_s: float = 1.0,
    ) -> None:
        """Connects at the first call, not here.

        Args:
            url: `redis://`, `rediss://` (TLS), `unix://`, or a node of a cluster with
                `redis+cluster://`, `rediss+cluster://`.
            prefix: letters, digits and `_.:-`. Journals that share it are one.
            max_lease_s: longest lease; the same in all processes.
            timeout_s: longest wait for a connection, and for each piece of an answer.

        Raises:
            ConfigurationError: the prefix or the URL breaks a rule.
        """
        if not re.fullmatch(r"[\w.:-]+", prefix, re.ASCII):
            raise ConfigurationError(f"prefix is {prefix!r}; use letters, digits and `_.:-`")
        if not re.match(r"(rediss?(\+cluster)?|unix)://", url):
            # The URL may hold a password, so only its scheme is shown.
            raise ConfigurationError(f"the scheme of the Redis URL is {url.split('://')[0]!r}")
        self._url = url
        self._key = f"{{{prefix}}}:journal"
        self._max_lease_s = max_lease_s
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._client: Any = None
        self._closed = False
        self._known_epoch = ""
        self.was_reset = False

    def end(self) -> Position:
        return self._position(self._run(scripts.END))

    def append(self, entries: Sequence[Entry]) -> Position:
        return self._position(self._run(scripts.APPEND, *map(encode, entries)))

    def read(self, after: Position, limit: int = DEFAULT_LIMIT) -> list[Entry]:
        past, start, bodies = self._run_in(after, scripts.READ, after.epoch, after.seq, limit)
        fresh = [decode(seq, body) for seq, body in enumerate(bodies, start + 1)]
        return [decode(seq, body) for seq, body in json.loads(past)] + fresh

    def continues(self, position: Position) -> bool:
        return bool(self._run(scripts.CONTINUES, position.epoch, position.seq))

    def join(self, name: str, lease_s: float) -> Position:
        lease_ms = self._lease_ms(lease_s)
        for fault in self._faults():
            logger.warning("The journal in Redis: %s", fault)
        position = self._position(self._run(scripts.JOIN, name, lease_ms))
        return Position(position.epoch, 0)

    def acknowledge(self, name: str, position: Position, lease_s: float) -> None:
        arguments = (name, position.epoch, position.seq, self._lease_ms(lease_s))
        self._run_in(position, scripts.ACKNOWLEDGE, *arguments)

    def leave(self, name: str) -> None:
        self._run(scripts.LEAVE, name)

    def waiting_for(self, position: Position) -> tuple[str, ...]:
        late, in_grace = self._run_in(position, scripts.WAITING, position.epoch, position.seq)
        return (*sorted(name.decode() for name in late), *([LOST_MEMBERS] if in_grace else []))

    def compact(self, keep: int = DEFAULT_KEEP) -> int:
        """The folding is done here, not in the server, which it would block."""
        epoch, floor, upto = self._run(scripts.SETTLED, keep)
        if upto <= floor:
            return 0
        past = self.read(Position(epoch.decode(), 0), upto - floor)
        if not can_fold(past):
            return 0
        left = folded(past)
        body = json.dumps([[entry.seq, encode(entry)] for entry in left])
        is_done = self._run(scripts.COMPACT, epoch, floor, upto, body)
        return len(past) - len(left) if is_done else 0

    def check(self) -> list[str]:
        try:
            faults = self._faults()
            end = self.end()
            self.read(Position(end.epoch, 0), end.seq)
        except JournalError as fault:
            return [str(fault)]
        return faults

    def close(self) -> None:
        with self._lock:
            self._closed = True
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _faults(self) -> list[str]:
        return [fault.decode() for fault in self._run(scripts.AUDIT)]

    def _lease_ms(self, lease_s: float) -> float:
        return 1000 * checked_lease(lease_s, self._max_lease_s)

    def _position(self, answer: Any) -> Position:
        epoch, seq, begun = answer
        position = Position(epoch.decode(), seq)
        with self._lock:
            # An epoch begun on nothing is a loss only for whoever knew another before.
            self.was_reset = self.was_reset or begun == 2 or self._known_epoch not in ("", position.epoch)
            self._known_epoch = position.epoch
        return position

    def _run_in(self, position: Position, script: str, *arguments: object) -> Any:
        answer = self._run(script, *arguments)
        if answer is None:
            raise StartOverError(f"the journal in Redis has begun anew, or was compacted, since {position}")
        return answer

    def _run(self, script: str, *arguments: object) -> Any:
        try:
            client = self._connected()
            return client.eval(script, 1, self._key, uuid.uuid4().hex, 1000 * self._max_lease_s, *arguments)
        # Errors of a cluster's first contact derive from Exception only.
        except (RedisError, RedisClusterException, OSError) as fault:
            raise JournalError(f"the journal in Redis failed: {fault}") from fault

    def _connected(self) -> Any:
        with self._lock:
            if self._closed:
                raise JournalError("the journal is closed")
            if self._client is None:
                self._client = self._connect()
            return self._client

    def _connect(self) -> Any:
        limits = {"socket_timeout": self._timeout_s, "socket_connect_timeout": self._timeout_s}
        scheme, _, rest = self._url.partition("://")
        if scheme.endswith("+cluster"):
            url = f"{scheme.removesuffix('+cluster')}://{rest}"
            return redis.RedisCluster.from_url(url, retry=Retry(NoBackoff(), 1), **limits)
        # Once more, at once, when the connection was lost: a server that was restarted leaves dead ones in
        # the pool. An append that is repeated so is harmless, see `Journal.append`.
        retry = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
        return redis.Redis.from_url(self._url, retry=retry, **limits)
