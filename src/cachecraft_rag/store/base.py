"""The contract every chunk store keeps, and the records it answers with."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from cachecraft_rag.chunks import AttentionProfile, ChunkKey, DocumentRef, RecordMeta


class Refusal(enum.StrEnum):
    """Why a record was not taken in."""

    STALE_DOCUMENT = "stale_document"
    """Its document was replaced, invalidated or purged after the plan, or its version is not current."""
    DUPLICATE = "duplicate"
    """A variant behind the same prefix, and at least as exact, is stored or on its way."""
    VARIANT_LIMIT = "variant_limit"
    """The chunk has its most variants and none of them may give way."""
    TOO_LARGE = "too_large"
    """It is larger than the whole budget."""
    OVER_QUOTA = "over_quota"
    """It is larger than its tenant's quota, or too much of that is pinned, reserved or doomed."""
    NO_ROOM = "no_room"
    """Too much of the budget is pinned, reserved or doomed."""
    NOT_ADMITTED = "not_admitted"
    """It was asked for once, and what would have to go was asked for more often."""
    STORE_OFF = "store_off"
    """The store is switched off."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Answer to `reserve`; `reason` is a `Refusal`, and empty when accepted."""

    accepted: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TenantStats:
    """One tenant's share: ready records, bytes of all its records in whatever state, and its quota in
    bytes, None if it has none."""

    num_records: int
    num_bytes: int
    quota_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Counts of a store at one moment; plain data all through, so `dataclasses.asdict` works.

    Attributes:
        num_records: ready records, those `variants` can find.
        num_bytes: bytes of reserved, ready and doomed records together; at most `budget_bytes`.
        num_pinned: records with at least one pin.
        num_reserved: records whose payload is still being filled, cancelled ones included.
        num_doomed: records that left the index while pinned, and wait for their last unpin.
        num_hits: calls of `variants` that found something.
        num_misses: calls of `variants` that found nothing.
        num_evictions: ready records that gave way to a new one.
        num_refusals: refused reservations by `Refusal` value.
        tenants: shares of the tenants that hold anything.
    """

    num_records: int = 0
    num_bytes: int = 0
    budget_bytes: int = 0
    num_pinned: int = 0
    num_reserved: int = 0
    num_doomed: int = 0
    num_hits: int = 0
    num_misses: int = 0
    num_evictions: int = 0
    num_refusals: dict[str, int] = field(default_factory=dict)
    tenants: dict[str, TenantStats] = field(default_factory=dict)


class ChunkStore(Protocol):
    """Books over stored chunk KV. The KV is in the workers; the store decides, they obey.

    A record is reserved, then ready (findable), then gone; every record that was accepted comes out
    of `drain_freed` exactly once, whatever its end. Workers must carry out the drained ids before
    they capture records reserved after it, and must take an id they do not hold in good part.

    Not thread-safe: all calls come from the scheduler's thread, so there are no locks.
    """

    def variants(self, tenant: str, key: ChunkKey) -> tuple[RecordMeta, ...]:
        """Ready variants, last committed first. Counts as a request for the chunk, not as a use of any."""
        ...

    def holds(self, tenant: str, key: ChunkKey) -> bool:
        """Whether `variants` would find something; not counted as a look-up."""
        ...

    def spare_bytes(self, tenant: str) -> int:
        """Bytes that a new record of the tenant may take without anything having to go for it."""
        ...

    def tier(self, record_id: int) -> str:
        """Name of the tier that holds the payload of a ready or doomed record, else empty."""
        ...

    def meta(self, record_id: int) -> RecordMeta | None:
        """What is known of a ready record; None of any other."""
        ...

    def next_record_id(self, tenant: str = "") -> int:
        """A record id never given before by this store; it tells nothing of other tenants' records."""
        ...

    def reserve(self, meta: RecordMeta) -> Reservation:
        """Take `meta.size_bytes` from the budget, evicting records by the store's policy if needed.

        A tenant at its quota loses records of its own, never those of others. Pinned records are never
        evicted, and a refusal evicts nothing. An accepted record also registers its document. See
        `Refusal` for when a record is refused; two cases give way to a record whose prefix is exact: an
        inexact variant behind the same prefix is replaced when the new one is committed, and at the
        variant limit the oldest inexact, unpinned, ready variant is evicted.

        Raises:
            StoreError: the id is in use, or the size is below one byte.
        """
        ...

    def commit(self, record_id: int, profile: AttentionProfile | None) -> bool:
        """The payload is complete: make the record ready. Committing a ready record changes nothing.

        Returns:
            Whether the record is ready. False, and the record is dropped, when its document was
            invalidated or a better variant behind the same prefix was committed meanwhile.
        """
        ...

    def abandon(self, record_id: int) -> None:
        """Give up a reserved record that will not be filled. Other ids are ignored."""
        ...

    def discard(self, record_id: int) -> None:
        """A ready record is missing or damaged in a worker: out of the index. Other ids are ignored."""
        ...

    def pin(self, record_id: int, owner: str, cfo: float = 1.0) -> None:
        """Keep a ready record's payload until `unpin(owner)`; repeating it changes nothing.

        `cfo` is the share of its tokens that the owner recomputes (Cache-Craft eq. 12).

        A pinned record that leaves the index is doomed: not found any more, but its payload and
        its bytes stay until the last unpin.

        Raises:
            StoreError: the record is not ready.
        """
        ...

    def unpin(self, owner: str) -> None:
        """Release all pins of a request; each counts as one use of its record, now. Idempotent."""
        ...

    def drain_freed(self) -> tuple[int, ...]:
        """Ids whose payload the workers must free, since the last call, each exactly once."""
        ...

    def register(self, tenant: str, key: ChunkKey, document: DocumentRef) -> None:
        """This document contains this text too. Ignored when the version is not current."""
        ...

    def generation(self, tenant: str, doc_id: str | None, key: ChunkKey | None = None) -> int:
        """Goes up with every replace, invalidate or purge that concerns the document, or the chunk; never
        down.

        The value at planning time belongs in `RecordMeta.generation`. A `doc_id` of None stands for
        text of no document; without `key`, what was done to single chunks is left out.
        """
        ...

    def is_current(self, tenant: str, document: DocumentRef) -> bool:
        """False when another version of the document was set by `replace`."""
        ...

    def replace(self, tenant: str, doc_id: str, version: str | None, keys: Iterable[ChunkKey]) -> int:
        """Make `version`, made of `keys`, the current one; text that is in both keeps its KV.

        Returns:
            How many records left the index: those no document of the tenant refers to any more.
        """
        ...

    def invalidate(self, tenant: str, doc_id: str, version: str | None = None) -> int:
        """Drop a document's references, or only those made with `version`.

        Without `version` the current version is forgotten as well, so a re-added document starts
        clean; with it the current version stands, so an older one does not come back.

        Returns:
            How many records left the index.
        """
        ...

    def invalidate_chunks(self, tenant: str, keys: Iterable[ChunkKey]) -> int:
        """Drop these texts whatever documents name them, which go on naming them.

        Returns:
            How many records left the index.
        """
        ...

    def purge(self, tenant: str) -> int:
        """Drop everything of a tenant and return how many records left the index."""
        ...

    def forget_all(self) -> int:
        """`purge` every tenant: changes may have been missed. Returns how many records left the index."""
        ...

    def stats(self) -> StoreStats: ...

    def check(self, repair: bool = False) -> list[str]:
        """What is wrong with the books, one sentence each; empty when they are sound. O(records).

        With `repair` it is put right as well, what is in doubt being dropped; sentences that begin with
        "repaired:" say what was done, and with "not repaired:" what could not be.
        """
        ...
