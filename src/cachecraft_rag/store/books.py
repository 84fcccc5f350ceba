"""Record keeping of one tier: states, index, bytes, pins and the eviction queue. No policy.

    insert ──► RESERVED ──make_ready──► READY ──leave_index──► freed, or DOOMED while pinned
                   └─────leave_index──► CANCELLED ──free──► freed

Freed ids wait in `freed` until they are drained to the workers.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cachecraft_rag.chunks import AttentionProfile, ChunkKey, RecordMeta


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
    """A tenant's ready records, and the bytes of all its records in whatever state."""

    num_ready: int = 0
    num_bytes: int = 0


class RecordBooks:
    """Every record the workers hold payload for, and the running sums over them.

    The attributes are for reading; only the methods change them, and keep them in step.

    Attributes:
        records: by id, in all states.
        index: reserved and ready records by tenant and key; ready ones in order of commit.
        evictable: ready and unpinned ids, least recently used first, so the head is the victim.
        pinned_by: ids pinned by each owner.
        num_pins: number of owners for each pinned id.
        freed: ids that left `records` since the last drain.
    """

    def __init__(self) -> None:
        self.records: dict[int, Record] = {}
        self.index: dict[str, dict[ChunkKey, dict[int, Record]]] = {}
        self.evictable: OrderedDict[int, None] = OrderedDict()
        self.pinned_by: dict[str, dict[int, None]] = {}
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
        self._enqueue(record)

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
            self._dequeue(record)
            self.free(record)
        return was_ready

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

    def touch(self, record_id: int) -> None:
        # A pinned record is not in the queue: it joins at the recent end when it is unpinned.
        if record_id in self.evictable:
            self.evictable.move_to_end(record_id)

    def pin(self, record: Record, owner: str) -> None:
        record_id = record.meta.record_id
        owned = self.pinned_by.setdefault(owner, {})
        if record_id in owned:
            return
        owned[record_id] = None
        if record_id not in self.num_pins:
            self._dequeue(record)
        self.num_pins[record_id] += 1

    def unpin(self, owner: str) -> None:
        for record_id in self.pinned_by.pop(owner, {}):
            self.num_pins[record_id] -= 1
            if self.num_pins[record_id]:
                continue
            del self.num_pins[record_id]
            record = self.records[record_id]
            if record.state is State.DOOMED:
                self.free(record)
            else:
                self._enqueue(record)

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

    def _enqueue(self, record: Record) -> None:
        self.evictable[record.meta.record_id] = None
        self.evictable_bytes += record.meta.size_bytes

    def _dequeue(self, record: Record) -> None:
        del self.evictable[record.meta.record_id]
        self.evictable_bytes -= record.meta.size_bytes

    def _set_state(self, record: Record, state: State) -> None:
        self._count(record, -1)
        record.state = state
        self._count(record, 1)

    def _count(self, record: Record, change: int) -> None:
        self.num_in_state[record.state] += change
        if record.state is State.READY:
            self.usage[record.meta.tenant].num_ready += change
