"""Record keeping of one tier: states, index, bytes, pins and the eviction queue.

    insert ──► RESERVED ──make_ready──► READY ──leave_index──► freed, or DOOMED while pinned
                   └─────leave_index──► CANCELLED ──free──► freed

Freed ids wait in `freed` until they are drained to the workers.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from cachecraft_rag.chunks import AttentionProfile, ChunkKey, RecordMeta
from cachecraft_rag.store.policies import Policy
from cachecraft_rag.store.queues import EvictionQueues, Scores
from cachecraft_rag.store.quotas import NO_QUOTAS, Quotas

ATTENTION_BALANCE_TOKENS = 27_000
"""Context at which attention costs as much as the weights, for 32 layers of width 4,096."""


class State(enum.Enum):
    RESERVED = enum.auto()
    """In the index but not findable: the workers fill it."""
    READY = enum.auto()
    """In the index and findable."""
    CANCELLED = enum.auto()
    """Out of the index while the workers fill it: ends at `commit` or `abandon`."""
    DOOMED = enum.auto()
    """Out of the index while pinned: ends at the last unpin."""


@dataclass(slots=True, eq=False)
class Record:
    meta: RecordMeta
    state: State = State.RESERVED


@dataclass(slots=True)
class Usage:
    """A tenant's ready records, the bytes of all its records in whatever state, and of those that may
    be evicted."""

    num_ready: int = 0
    num_bytes: int = 0
    num_evictable_bytes: int = 0


class RecordBooks:
    """Every record the workers hold payload for, and the running sums over them.

    The attributes are for reading; only the methods change them, and keep them in step.

    Attributes:
        records: by id, in all states.
        index: reserved and ready records by tenant and key; ready ones in order of commit.
        evictable: ready and unpinned ids, in the order of the policy.
        scores: what the policy knows of pinned ids, which are in no queue.
        pinned_by: ids pinned by each owner, and the share of tokens it recomputes (CFO).
        num_pins: number of owners for each pinned id.
        freed: ids that left `records` since the last drain.
    """

    def __init__(self, policy: Policy, clock: Callable[[], float], quotas: Quotas = NO_QUOTAS) -> None:
        self.policy = policy
        self.clock = clock
        self.quotas = quotas
        self.records: dict[int, Record] = {}
        self.index: dict[str, dict[ChunkKey, dict[int, Record]]] = {}
        self.evictable = EvictionQueues(policy, lambda tenant: quotas.of(tenant) is not None)
        self.scores: dict[int, Scores] = {}
        self.pinned_by: dict[str, dict[int, float]] = {}
        self.num_pins: Counter[int] = Counter()
        self.freed: dict[int, None] = {}
        self.num_in_state: Counter[State] = Counter()
        self.usage: dict[str, Usage] = {}
        self.used_bytes = 0
        self.evictable_bytes = 0

    def find(self, record_id: int, *states: State) -> Record | None:
        """The record if it is in one of these states."""
        record = self.records.get(record_id)
        return record if record is not None and record.state in states else None

    def siblings(self, tenant: str, key: ChunkKey) -> Mapping[int, Record]:
        """All reserved and ready variants of a chunk."""
        return self.index.get(tenant, {}).get(key, {})

    def usage_of(self, tenant: str) -> Usage:
        return self.usage.get(tenant) or Usage()

    def insert(self, meta: RecordMeta) -> None:
        record = self.records[meta.record_id] = Record(meta)
        self.index.setdefault(meta.tenant, {}).setdefault(meta.key, {})[meta.record_id] = record
        self.num_in_state[State.RESERVED] += 1
        self.used_bytes += meta.size_bytes
        self.usage.setdefault(meta.tenant, Usage()).num_bytes += meta.size_bytes

    def make_ready(self, record: Record, profile: AttentionProfile | None) -> None:
        if profile is not None:
            record.meta = replace(record.meta, profile=profile)
        siblings = self.index[record.meta.tenant][record.meta.key]
        siblings[record.meta.record_id] = siblings.pop(record.meta.record_id)
        self._set_state(record, State.READY)
        self._use(record, 1.0)
        self._count_evictable(record, 1)

    def leave_index(self, record: Record) -> bool:
        """Make a reserved or ready record unfindable, and free it if nothing holds its payload.

        Returns:
            Whether it was ready.
        """
        was_ready = record.state is State.READY
        self._unindex(record.meta)
        if not was_ready:
            self._set_state(record, State.CANCELLED)
        elif record.meta.record_id in self.num_pins:
            self._set_state(record, State.DOOMED)
        else:
            self.evictable.remove(record.meta)
            self._count_evictable(record, -1)
            self.free(record)
        return was_ready

    def evict(self, record: Record, *, for_quota: bool) -> None:
        """`leave_index` of a victim of the budget, or of its tenant's quota."""
        self._unindex(record.meta)
        self.evictable.evict(record.meta, for_quota=for_quota)
        self._count_evictable(record, -1)
        self.free(record)

    def free(self, record: Record) -> None:
        """Forget a record that is out of the index; its payload is the workers' to free."""
        meta = record.meta
        del self.records[meta.record_id]
        self.freed[meta.record_id] = None
        self._count(record, -1)
        self.used_bytes -= meta.size_bytes
        usage = self.usage[meta.tenant]
        usage.num_bytes -= meta.size_bytes
        if not usage.num_bytes:
            del self.usage[meta.tenant]
            self.evictable.forget(meta.tenant)

    def pin(self, record: Record, owner: str, cfo: float) -> None:
        record_id = record.meta.record_id
        owned = self.pinned_by.setdefault(owner, {})
        if record_id in owned:
            return
        owned[record_id] = cfo
        if record_id not in self.num_pins:
            self._hold(record)
        self.num_pins[record_id] += 1

    def unpin(self, owner: str) -> None:
        """Each pin of the owner was one use of its record."""
        for record_id, cfo in self.pinned_by.pop(owner, {}).items():
            self.num_pins[record_id] -= 1
            is_pinned = self.num_pins[record_id] > 0
            if not is_pinned:
                del self.num_pins[record_id]
            record = self.records[record_id]
            if record.state is State.READY:
                self._release(record)
                self._use(record, cfo)
                if is_pinned:
                    self._hold(record)
            elif not is_pinned:
                self.scores.pop(record_id, None)
                self.free(record)

    def drain_freed(self) -> tuple[int, ...]:
        freed = tuple(self.freed)
        self.freed.clear()
        return freed

    def _unindex(self, meta: RecordMeta) -> None:
        by_key = self.index[meta.tenant]
        del by_key[meta.key][meta.record_id]
        if not by_key[meta.key]:
            del by_key[meta.key]
        if not by_key:
            del self.index[meta.tenant]

    def _hold(self, record: Record) -> None:
        """Out of the queues while it is pinned."""
        self.scores[record.meta.record_id] = self.evictable.hold(record.meta)
        self._count_evictable(record, -1)

    def _release(self, record: Record) -> None:
        self.evictable.release(record.meta, self.scores.pop(record.meta.record_id))
        self._count_evictable(record, 1)

    def _use(self, record: Record, cfo: float) -> None:
        meta = record.meta
        self.evictable.use(meta, now_s=self.clock(), cost=_compute_cost(meta), cfo=cfo)

    def _count_evictable(self, record: Record, change: int) -> None:
        num_bytes = change * record.meta.size_bytes
        self.evictable_bytes += num_bytes
        self.usage[record.meta.tenant].num_evictable_bytes += num_bytes

    def _set_state(self, record: Record, state: State) -> None:
        self._count(record, -1)
        record.state = state
        self._count(record, 1)

    def _count(self, record: Record, change: int) -> None:
        self.num_in_state[record.state] += change
        if record.state is State.READY:
            self.usage[record.meta.tenant].num_ready += change


def _compute_cost(meta: RecordMeta) -> float:
    """Work of computing the record where it stood, in tokens of a short prompt: each token attends to all
    before it, so late chunks cost more."""
    middle = meta.start + meta.num_tokens / 2
    return meta.num_tokens * (1.0 + middle / ATTENTION_BALANCE_TOKENS)
