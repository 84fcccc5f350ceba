"""The store for KV in host memory: who may come in, and who has to go for it.

Every call is O(1) or O(variants of one chunk), plus the records it evicts or drops.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable

from cachecraft_rag.chunks import AttentionProfile, ChunkKey, RecordMeta
from cachecraft_rag.errors import ConfigurationError, StoreError
from cachecraft_rag.store.admission import FrequencyMemory, admits
from cachecraft_rag.store.audit import audit
from cachecraft_rag.store.base import Refusal, Reservation, StoreStats, TenantStats
from cachecraft_rag.store.books import Record, RecordBooks, State
from cachecraft_rag.store.documents import DocumentOperations, OnOrphaned
from cachecraft_rag.store.policies import DEFAULT_POLICY, POLICIES, Policy

TIER = "host"


class HostChunkStore(DocumentOperations):
    """A `ChunkStore` with one tier, host memory.

    Args:
        budget_bytes: never exceeded by reserved, ready and doomed records together.
        max_variants_per_chunk: most prefixes behind which one text is kept, per tenant.
        on_orphaned: told which texts a change of documents has left without a document.
        policy: which record goes first.
        has_admission: whether a text asked for once may push out only its like (`admission`).
        clock: seconds that only go forward, for policies with a time to live.

    Raises:
        ConfigurationError: an argument breaks its rule.
    """

    def __init__(
        self,
        budget_bytes: int,
        max_variants_per_chunk: int,
        on_orphaned: OnOrphaned | None = None,
        policy: Policy = POLICIES[DEFAULT_POLICY],
        has_admission: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(on_orphaned)
        if budget_bytes < 0:
            raise ConfigurationError(f"budget_bytes is {budget_bytes!r}: it must not be negative")
        if max_variants_per_chunk < 1:
            raise ConfigurationError(
                f"max_variants_per_chunk is {max_variants_per_chunk!r}: it must be at least 1"
            )
        self._budget_bytes = budget_bytes
        self._max_variants = max_variants_per_chunk
        self._ids = itertools.count()
        self._books = RecordBooks(policy, clock)
        self._clock = clock
        self._requests: FrequencyMemory[tuple[str, ChunkKey]] | None = (
            FrequencyMemory() if has_admission else None
        )
        self._num_lookups: Counter[bool] = Counter()
        self._num_evictions = 0
        self._num_refusals: Counter[str] = Counter()

    def variants(self, tenant: str, key: ChunkKey) -> tuple[RecordMeta, ...]:
        self._drop_expired()
        if self._requests is not None:
            self._requests.record((tenant, key))
        siblings = [*self._books.siblings(tenant, key).values()]
        found = tuple(r.meta for r in reversed(siblings) if self._is_usable(r))
        self._num_lookups[bool(found)] += 1
        return found

    def holds(self, tenant: str, key: ChunkKey) -> bool:
        return any(map(self._is_usable, self._books.siblings(tenant, key).values()))

    def tier(self, record_id: int) -> str:
        return TIER if self._books.find(record_id, State.READY, State.DOOMED) else ""

    def next_record_id(self) -> int:
        return next(self._ids)

    def reserve(self, meta: RecordMeta) -> Reservation:
        if meta.record_id in self._books.records or meta.record_id in self._books.freed:
            raise StoreError(f"record id {meta.record_id} is in use: take one from next_record_id()")
        if meta.size_bytes < 1:
            raise StoreError(
                f"record {meta.record_id} has size_bytes={meta.size_bytes}: it must be at least 1"
            )
        refusal = self._refusal(meta)
        if refusal is not None:
            self._num_refusals[refusal.value] += 1
            return Reservation(False, refusal)
        self._make_room(meta)
        self._books.insert(meta)
        if meta.document is not None:
            self._documents.register(meta.tenant, meta.key, meta.document)
        return Reservation(True)

    def meta(self, record_id: int) -> RecordMeta | None:
        record = self._books.find(record_id, State.READY)
        return record.meta if record is not None else None

    def commit(self, record_id: int, profile: AttentionProfile | None) -> bool:
        record = self._books.find(record_id, State.RESERVED, State.CANCELLED)
        if record is None:
            return self._books.find(record_id, State.READY) is not None
        if record.state is State.CANCELLED or not self._documents.admits(record.meta):
            self.abandon(record_id)
            return False
        for other in self._behind_same_prefix(record.meta):
            if other is not record:
                self._books.leave_index(other)
        self._books.make_ready(record, profile)
        return True

    def abandon(self, record_id: int) -> None:
        record = self._books.find(record_id, State.RESERVED, State.CANCELLED)
        if record is None:
            return
        if record.state is State.RESERVED:
            self._books.leave_index(record)
        self._books.free(record)

    def discard(self, record_id: int) -> None:
        record = self._books.find(record_id, State.READY)
        if record is not None:
            self._books.leave_index(record)

    def pin(self, record_id: int, owner: str, cfo: float = 1.0) -> None:
        record = self._books.find(record_id, State.READY)
        if record is None:
            raise StoreError(
                f"record {record_id} cannot be pinned for {owner!r}: it is not ready; pin what "
                "`variants` returned before anything else changes the store"
            )
        self._books.pin(record, owner, cfo)

    def unpin(self, owner: str) -> None:
        self._books.unpin(owner)

    def drain_freed(self) -> tuple[int, ...]:
        return self._books.drain_freed()

    def stats(self) -> StoreStats:
        books, count = self._books, self._books.num_in_state
        return StoreStats(
            num_records=count[State.READY],
            num_bytes=books.used_bytes,
            budget_bytes=self._budget_bytes,
            num_pinned=len(books.num_pins),
            num_reserved=count[State.RESERVED] + count[State.CANCELLED],
            num_doomed=count[State.DOOMED],
            num_hits=self._num_lookups[True],
            num_misses=self._num_lookups[False],
            num_evictions=self._num_evictions,
            num_refusals=dict(self._num_refusals),
            tenants={t: TenantStats(u.num_ready, u.num_bytes) for t, u in books.usage.items()},
        )

    def check(self) -> list[str]:
        faults = audit(self._books, self._budget_bytes, self._max_variants)
        return faults + self._documents.check()

    def _refusal(self, meta: RecordMeta) -> Refusal | None:
        if not self._documents.admits(meta):
            return Refusal.STALE_DOCUMENT
        if meta.size_bytes > self._budget_bytes:
            return Refusal.TOO_LARGE
        if any(not _improves(meta, other.meta) for other in self._behind_same_prefix(meta)):
            return Refusal.DUPLICATE
        if self._exceeds_variants(meta) and self._inexact_victim(meta) is None:
            return Refusal.VARIANT_LIMIT
        if meta.size_bytes > self._spare_bytes + self._books.evictable_bytes:
            return Refusal.NO_ROOM
        return None if self._is_admitted(meta) else Refusal.NOT_ADMITTED

    def _is_admitted(self, meta: RecordMeta) -> bool:
        """Whether it is worth the records that would have to go; a variant of a text that is stored is."""
        if self._requests is None or self.holds(meta.tenant, meta.key):
            return True
        records, num_requests = self._books.records, self._requests.num_requests
        victims = self._books.evictable.victims(
            meta.size_bytes - self._spare_bytes, lambda record_id: records[record_id].meta.size_bytes
        )
        asked = (num_requests((records[i].meta.tenant, records[i].meta.key)) for i in victims)
        return admits(num_requests((meta.tenant, meta.key)), asked)

    @property
    def _spare_bytes(self) -> int:
        return self._budget_bytes - self._books.used_bytes

    def _behind_same_prefix(self, meta: RecordMeta) -> list[Record]:
        siblings = self._books.siblings(meta.tenant, meta.key).values()
        return [r for r in siblings if r.meta.prefix_hash == meta.prefix_hash]

    def _exceeds_variants(self, meta: RecordMeta) -> bool:
        """Counts prefixes, as a variant and its coming replacement share one."""
        siblings = self._books.siblings(meta.tenant, meta.key).values()
        prefixes = {r.meta.prefix_hash for r in siblings} | {meta.prefix_hash}
        return len(prefixes) > self._max_variants

    def _inexact_victim(self, meta: RecordMeta) -> Record | None:
        """The oldest variant that may give way to `meta` when the limit is reached.

        One whose replacement is on its way does not count: its prefix would stay occupied.
        """
        if not meta.prefix_is_exact:
            return None
        for record_id, record in self._books.siblings(meta.tenant, meta.key).items():
            # An exact variant behind its prefix can only be a reserved replacement.
            if (
                record_id in self._books.evictable
                and not record.meta.prefix_is_exact
                and len(self._behind_same_prefix(record.meta)) == 1
            ):
                return record
        return None

    def _make_room(self, meta: RecordMeta) -> None:
        if self._exceeds_variants(meta):
            victim = self._inexact_victim(meta)
            if victim is not None:
                self._evict(victim)
        while self._spare_bytes < meta.size_bytes:
            record_id = self._books.evictable.victim()
            assert record_id is not None
            self._evict(self._books.records[record_id])

    def _evict(self, record: Record) -> None:
        self._books.evict(record)
        self._num_evictions += 1

    def _is_usable(self, record: Record) -> bool:
        """A record that expires while it is pinned stays until it is released, but serves nobody else."""
        score = self._books.scores.get(record.meta.record_id)
        is_expired = score is not None and score.expires_s <= self._clock()
        return record.state is State.READY and not is_expired

    def _drop_expired(self) -> None:
        for record_id in self._books.evictable.pop_expired(self._clock()):
            self._books.leave_index(self._books.records[record_id])
            self._num_evictions += 1

    def _drop_keys(self, tenant: str, keys: Iterable[ChunkKey]) -> int:
        dropped = [r for key in keys for r in self._books.siblings(tenant, key).values()]
        return sum(self._books.leave_index(record) for record in dropped)

    def _all_tenants(self) -> set[str]:
        return set(self._books.index)

    def _drop_tenant(self, tenant: str) -> int:
        if self._requests is not None:
            self._requests.forget_all(lambda key: key[0] == tenant)
        return self._drop_keys(tenant, [*self._books.index.get(tenant, {})])


def _improves(new: RecordMeta, old: RecordMeta) -> bool:
    return new.prefix_is_exact and not old.prefix_is_exact
