"""The store for KV in host memory: who may come in, and who has to go for it.

Every call is O(1) or O(variants of one chunk), plus the records it evicts or drops.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable

from cachecraft_rag.chunks import AttentionProfile, ChunkKey, RecordMeta
from cachecraft_rag.errors import ConfigurationError, StoreError
from cachecraft_rag.store.admission import FrequencyMemory
from cachecraft_rag.store.audit import audit
from cachecraft_rag.store.base import Refusal, Reservation, StoreStats, TenantStats
from cachecraft_rag.store.books import Record, RecordBooks, State
from cachecraft_rag.store.documents import DocumentOperations, OnOrphaned
from cachecraft_rag.store.policies import DEFAULT_POLICY, POLICIES, Policy
from cachecraft_rag.store.quotas import NO_QUOTAS, Quotas
from cachecraft_rag.store.record_ids import RecordIds
from cachecraft_rag.store.repair import rebuilt
from cachecraft_rag.store.room import Requests, Room

TIER = "host"


class HostChunkStore(DocumentOperations):
    """A `ChunkStore` with one tier, host memory.

    Args:
        budget_bytes: never exceeded by reserved, ready and doomed records together.
        max_variants_per_chunk: most prefixes behind which one text is kept, per tenant.
        on_orphaned: told of which texts all KV has to go, as a change of documents says.
        policy: which record goes first.
        has_admission: whether a text asked for once may push out only its like (`admission`).
        clock: seconds that only go forward, for policies with a time to live.
        quotas: never exceeded by a tenant's records in whatever state.

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
        quotas: Quotas = NO_QUOTAS,
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
        self._ids = RecordIds()
        self._clock = clock
        self._requests: Requests | None = FrequencyMemory() if has_admission else None
        self._keep(RecordBooks(policy, clock, quotas))
        self._num_lookups: Counter[bool] = Counter()
        self._num_evictions = 0
        self._num_refusals: Counter[str] = Counter()

    def _keep(self, books: RecordBooks) -> None:
        self._books = books
        self._room = Room(books, self._budget_bytes, self._max_variants, self._requests)

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

    def spare_bytes(self, tenant: str) -> int:
        self._drop_expired()
        return self._room.spare_bytes(tenant)

    def tier(self, record_id: int) -> str:
        return TIER if self._books.find(record_id, State.READY, State.DOOMED) else ""

    def next_record_id(self, tenant: str = "") -> int:
        return self._ids.next(tenant)

    def reserve(self, meta: RecordMeta) -> Reservation:
        if meta.record_id in self._books.records or meta.record_id in self._books.freed:
            raise StoreError(f"record id {meta.record_id} is in use: take one from next_record_id()")
        if meta.size_bytes < 1:
            raise StoreError(
                f"record {meta.record_id} has size_bytes={meta.size_bytes}: it must be at least 1"
            )
        is_stale = not self._documents.admits(meta)
        refusal = Refusal.STALE_DOCUMENT if is_stale else self._room.refusal(meta)
        if refusal is not None:
            self._num_refusals[refusal.value] += 1
            return Reservation(False, refusal)
        self._num_evictions += self._room.make(meta)
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
        for other in self._room.behind_same_prefix(record.meta):
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
            tenants={
                tenant: TenantStats(usage.num_ready, usage.num_bytes, books.quotas.of(tenant))
                for tenant, usage in books.usage.items()
            },
        )

    def check(self, repair: bool = False) -> list[str]:
        faults = self._audit()
        done: list[str] = []
        if faults and repair:
            books, done = rebuilt(self._books, self._budget_bytes, self._max_variants)
            self._keep(books)
            done += [f"not repaired: {fault}" for fault in self._audit()]
        return faults + done + self._check_documents(repair)

    def _audit(self) -> list[str]:
        return audit(self._books, self._budget_bytes, self._max_variants)

    def _is_usable(self, record: Record) -> bool:
        """A record that expires while it is pinned stays until it is released, but serves nobody else."""
        score = self._books.scores.get(record.meta.record_id)
        is_expired = score is not None and score.overall.expires_s <= self._clock()
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
