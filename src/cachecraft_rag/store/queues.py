"""Who may be evicted, and who first: for the budget over all tenants, for a quota within one.

Every record that may go is in one queue over all of them, and a tenant with a quota has a second one
of its own. Both score every use, but each ages by its own evictions only. So what a tenant pushes out
of its quota moves no other tenant's records nearer to eviction, and what others do does not change
which of its own records a tenant loses to its quota.

One queue with a head for each tenant was rejected: GDSF and LFU age by a floor that is part of every
priority. Raised by quotas, a tenant that churns would make its records look better than everybody
else's; not raised by them, a tenant's old favourites would fill its quota for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cachecraft_rag.chunks import RecordMeta
from cachecraft_rag.store.eviction import EvictionQueue
from cachecraft_rag.store.policies import Policy, Score


@dataclass(frozen=True, slots=True)
class Scores:
    """What is known of a pinned record, which is in no queue."""

    overall: Score
    own: Score | None = None


class EvictionQueues:
    """The queue over all records, and those of tenants with a quota. Iterates over all ids.

    Every call is O(log n) for each record it names.

    Args:
        policy: scores every use, in both queues.
        has_quota: whether a tenant has one; always the same answer.
    """

    def __init__(self, policy: Policy, has_quota: Callable[[str], bool]) -> None:
        self._policy = policy
        self._has_quota = has_quota
        self._overall = EvictionQueue(policy)
        self._own: dict[str, EvictionQueue] = {}

    def __contains__(self, record_id: object) -> bool:
        return record_id in self._overall

    def __iter__(self) -> Iterator[int]:
        return iter(self._overall)

    def use(self, meta: RecordMeta, *, now_s: float, cost: float, cfo: float = 1.0) -> None:
        """`EvictionQueue.use`."""
        for queue in self._queues_of(meta.tenant):
            queue.use(meta.record_id, now_s=now_s, size_bytes=meta.size_bytes, cost=cost, cfo=cfo)

    def hold(self, meta: RecordMeta) -> Scores:
        """Take a record out while it is pinned; `release` brings it back."""
        overall, *own = (queue.remove(meta.record_id) for queue in self._queues_of(meta.tenant))
        assert overall is not None
        return Scores(overall, *own)

    def release(self, meta: RecordMeta, scores: Scores) -> None:
        for queue, score in zip(self._queues_of(meta.tenant), (scores.overall, scores.own), strict=False):
            assert score is not None
            queue.restore(meta.record_id, score)

    def remove(self, meta: RecordMeta) -> None:
        """Take a record out for another reason than to make room."""
        for queue in self._queues_of(meta.tenant):
            queue.remove(meta.record_id)

    def evict(self, meta: RecordMeta, *, for_quota: bool) -> None:
        """Take a victim out of both queues; the one that it was chosen from ages."""
        for queue in self._queues_of(meta.tenant):
            if (queue is self._overall) is for_quota:
                queue.remove(meta.record_id)
            else:
                queue.evict(meta.record_id)

    def victim(self) -> int | None:
        """The record that goes next for the budget."""
        return self._overall.victim()

    def victims(self, size_bytes: int, size_of: Callable[[int], int]) -> list[int]:
        """`EvictionQueue.victims`, for the budget."""
        return self._overall.victims(size_bytes, size_of)

    def own_victim(self, tenant: str) -> int | None:
        """The record that goes next for the quota of a tenant that has one."""
        return self._own[tenant].victim() if tenant in self._own else None

    def own_victims(self, tenant: str, size_bytes: int, size_of: Callable[[int], int]) -> list[int]:
        """`EvictionQueue.victims`, for the quota of a tenant that has one."""
        return self._own[tenant].victims(size_bytes, size_of) if tenant in self._own else []

    def pop_expired(self, now_s: float) -> list[int]:
        """`EvictionQueue.pop_expired`; each is still to be taken out with `remove`."""
        return self._overall.pop_expired(now_s)

    def forget(self, tenant: str) -> None:
        """The tenant holds no record any more, not even a pinned one."""
        self._own.pop(tenant, None)

    def own_ids(self) -> dict[str, set[int]]:
        """Ids in the tenants' own queues, for the audit."""
        return {tenant: set(queue) for tenant, queue in self._own.items()}

    def _queues_of(self, tenant: str) -> tuple[EvictionQueue, ...]:
        if not self._has_quota(tenant):
            return (self._overall,)
        return self._overall, self._own.setdefault(tenant, EvictionQueue(self._policy))
