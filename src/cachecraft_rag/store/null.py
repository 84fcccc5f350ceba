"""A store that is switched off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cachecraft_rag.chunks import AttentionProfile, ChunkKey, RecordMeta
from cachecraft_rag.errors import StoreError
from cachecraft_rag.store.base import Refusal, Reservation, StoreStats
from cachecraft_rag.store.documents import DocumentOperations
from cachecraft_rag.store.record_ids import RecordIds


class NullChunkStore(DocumentOperations):
    """A `ChunkStore` that takes nothing and finds nothing.

    Documents are tracked as in every other store, so that reports still tell a superseded version
    from a chunk that is not cached.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ids = RecordIds()
        self._num_misses = 0
        self._num_refusals: Counter[str] = Counter()

    def variants(self, tenant: str, key: ChunkKey) -> tuple[RecordMeta, ...]:
        self._num_misses += 1
        return ()

    def holds(self, tenant: str, key: ChunkKey) -> bool:
        return False

    def spare_bytes(self, tenant: str) -> int:
        return 0

    def tier(self, record_id: int) -> str:
        return ""

    def next_record_id(self, tenant: str = "") -> int:
        return self._ids.next(tenant)

    def reserve(self, meta: RecordMeta) -> Reservation:
        fresh = self._documents.admits(meta)
        refusal = Refusal.STORE_OFF if fresh else Refusal.STALE_DOCUMENT
        self._num_refusals[refusal.value] += 1
        return Reservation(False, refusal)

    def meta(self, record_id: int) -> RecordMeta | None:
        return None

    def commit(self, record_id: int, profile: AttentionProfile | None) -> bool:
        return False

    def abandon(self, record_id: int) -> None:
        return None

    def discard(self, record_id: int) -> None:
        return None

    def pin(self, record_id: int, owner: str, cfo: float = 1.0) -> None:
        raise StoreError(
            f"record {record_id} cannot be pinned for {owner!r}: the store is switched off and "
            "`variants` offers nothing"
        )

    def unpin(self, owner: str) -> None:
        return None

    def drain_freed(self) -> tuple[int, ...]:
        return ()

    def forget_all(self) -> int:
        return 0

    def _all_tenants(self) -> set[str]:
        return set()

    def stats(self) -> StoreStats:
        return StoreStats(num_misses=self._num_misses, num_refusals=dict(self._num_refusals))

    def check(self, repair: bool = False) -> list[str]:
        return self._check_documents(repair)

    def _drop_keys(self, tenant: str, keys: Iterable[ChunkKey]) -> int:
        return 0

    def _drop_tenant(self, tenant: str) -> int:
        return 0
