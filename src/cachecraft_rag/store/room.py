"""Room in the host tier: whether a record may come in, and what has to go for it."""

from __future__ import annotations

from cachecraft_rag.chunks import ChunkKey, RecordMeta
from cachecraft_rag.store.admission import FrequencyMemory, admits
from cachecraft_rag.store.base import Refusal
from cachecraft_rag.store.books import Record, RecordBooks, State

Requests = FrequencyMemory[tuple[str, ChunkKey]]


class Room:
    """The budget over all tenants, each tenant's quota, and the limit of variants.

    A tenant at its quota makes room among its own records; only what the budget then still lacks is
    taken from all tenants, by the policy.

    Args:
        requests: how often chunks were asked for; None admits everything.
    """

    def __init__(
        self, books: RecordBooks, budget_bytes: int, max_variants: int, requests: Requests | None
    ) -> None:
        self._books = books
        self._budget_bytes = budget_bytes
        self._max_variants = max_variants
        self._requests = requests

    def refusal(self, meta: RecordMeta) -> Refusal | None:
        """Why the record may not come in, None if it may; changes nothing."""
        if meta.size_bytes > self._budget_bytes:
            return Refusal.TOO_LARGE
        quota_bytes = self._books.quotas.of(meta.tenant)
        if quota_bytes is not None and meta.size_bytes > quota_bytes:
            return Refusal.OVER_QUOTA
        if any(not _improves(meta, other.meta) for other in self.behind_same_prefix(meta)):
            return Refusal.DUPLICATE
        if self._exceeds_variants(meta) and self._inexact_victim(meta) is None:
            return Refusal.VARIANT_LIMIT
        if self._excess_bytes(meta) > self._books.usage_of(meta.tenant).num_evictable_bytes:
            return Refusal.OVER_QUOTA
        if meta.size_bytes > self._spare_bytes + self._books.evictable_bytes:
            return Refusal.NO_ROOM
        return None if self._is_admitted(meta) else Refusal.NOT_ADMITTED

    def make(self, meta: RecordMeta) -> int:
        """Evict what has to go for a record that is not refused; how many records that were."""
        num_before = len(self._books.records)
        if self._exceeds_variants(meta) and (variant := self._inexact_victim(meta)) is not None:
            self._books.leave_index(variant)
        while self._excess_bytes(meta) > 0:
            self._evict(self._books.evictable.own_victim(meta.tenant), for_quota=True)
        while self._spare_bytes < meta.size_bytes:
            self._evict(self._books.evictable.victim(), for_quota=False)
        return num_before - len(self._books.records)

    def spare_bytes(self, tenant: str) -> int:
        """What a new record of the tenant may take without an eviction."""
        quota_bytes = self._books.quotas.of(tenant)
        if quota_bytes is None:
            return self._spare_bytes
        return max(0, min(self._spare_bytes, quota_bytes - self._books.usage_of(tenant).num_bytes))

    def behind_same_prefix(self, meta: RecordMeta) -> list[Record]:
        siblings = self._books.siblings(meta.tenant, meta.key).values()
        return [r for r in siblings if r.meta.prefix_hash == meta.prefix_hash]

    def _evict(self, record_id: int | None, *, for_quota: bool) -> None:
        assert record_id is not None
        self._books.evict(self._books.records[record_id], for_quota=for_quota)

    def _is_admitted(self, meta: RecordMeta) -> bool:
        """Whether it is worth the records that would have to go; a variant of a text that is stored is."""
        siblings = self._books.siblings(meta.tenant, meta.key).values()
        if self._requests is None or any(r.state is State.READY for r in siblings):
            return True
        records, num_requests = self._books.records, self._requests.num_requests
        asked = (num_requests((records[i].meta.tenant, records[i].meta.key)) for i in self._victims(meta))
        return admits(num_requests((meta.tenant, meta.key)), asked)

    def _victims(self, meta: RecordMeta) -> list[int]:
        """What `make` would evict for a record whose text has no other variant."""
        records, queues = self._books.records, self._books.evictable
        own = queues.own_victims(meta.tenant, self._excess_bytes(meta), lambda i: records[i].meta.size_bytes)
        going = frozenset(own)
        lacking = meta.size_bytes - self._spare_bytes - sum(records[i].meta.size_bytes for i in own)
        others = queues.victims(lacking, lambda i: 0 if i in going else records[i].meta.size_bytes)
        return [*own, *(i for i in others if i not in going)]

    def _excess_bytes(self, meta: RecordMeta) -> int:
        """Bytes by which the record would take its tenant over its quota; none or less if it fits."""
        quota_bytes = self._books.quotas.of(meta.tenant)
        if quota_bytes is None:
            return 0
        return self._books.usage_of(meta.tenant).num_bytes + meta.size_bytes - quota_bytes

    @property
    def _spare_bytes(self) -> int:
        return self._budget_bytes - self._books.used_bytes

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
                and len(self.behind_same_prefix(record.meta)) == 1
            ):
                return record
        return None


def _improves(new: RecordMeta, old: RecordMeta) -> bool:
    return new.prefix_is_exact and not old.prefix_is_exact
