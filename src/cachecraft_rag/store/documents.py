"""Which documents contain which chunks, per tenant, and what that means for stored KV.

KV goes when the last document that refers to its text goes; text that was never named with a
document is dropped by a purge, or by its own name. References outlive the records they speak of: a
text stored again after an eviction still belongs to its documents. So the registry grows with the
documents of a tenant, not with the store, and keeps one number for each invalidated document or chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from cachecraft_rag.chunks import ChunkKey, DocumentRef, RecordMeta


@dataclass(slots=True)
class _Document:
    """`references` maps each text of the document to the versions that were named with it."""

    generation: int
    version: str | None = None
    references: dict[ChunkKey, set[str | None]] = field(default_factory=dict)


@dataclass(slots=True)
class _Tenant:
    """Generations are values of `clock`, which only a change moves, upwards.

    One counter per document would fall back to zero when a purge forgets the documents, and a late
    insert would pass; a document that is not known has generation `purged_at`. `chunks_dropped_at`
    has the chunks that were dropped by their own name.
    """

    clock: int = 0
    purged_at: int = 0
    chunks_dropped_at: dict[ChunkKey, int] = field(default_factory=dict)
    documents: dict[str, _Document] = field(default_factory=dict)
    doc_ids_by_key: dict[ChunkKey, set[str]] = field(default_factory=dict)

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def document(self, doc_id: str) -> _Document:
        return self.documents.setdefault(doc_id, _Document(self.purged_at))

    def unlink(self, doc_id: str, keys: Iterable[ChunkKey]) -> list[ChunkKey]:
        """Take the document off these keys; returns those that no document refers to now."""
        orphans = []
        for key in keys:
            self.doc_ids_by_key[key].discard(doc_id)
            if not self.doc_ids_by_key[key]:
                del self.doc_ids_by_key[key]
                orphans.append(key)
        return orphans


OnOrphaned = Callable[[str, Sequence[ChunkKey]], None]
"""Told a tenant and the keys of which all KV has to go: no document of it refers to them any more, or
they were dropped by name."""


class DocumentRegistry:
    """Documents of all tenants. Changing calls return the keys whose last reference went."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}

    def generation(self, tenant: str, doc_id: str | None, key: ChunkKey | None = None) -> int:
        known = self._tenants.get(tenant)
        if known is None:
            return 0
        document = known.documents.get(doc_id) if doc_id is not None else None
        generation = document.generation if document is not None else known.purged_at
        # Both are values of one clock, so the later of two changes always raises their maximum.
        return generation if key is None else max(generation, known.chunks_dropped_at.get(key, 0))

    def is_current(self, tenant: str, document: DocumentRef) -> bool:
        known = self._tenants.get(tenant)
        stored = known.documents.get(document.doc_id) if known is not None else None
        if stored is None or stored.version is None or document.version is None:
            return True
        return stored.version == document.version

    def admits(self, meta: RecordMeta) -> bool:
        """Whether nothing happened to the record's document, chunk or tenant since it was planned.

        The document alone decides, even if others share the text: that refuses a little too much
        and needs no account of which reference each plan relied on.
        """
        document = meta.document
        doc_id = document.doc_id if document is not None else None
        if meta.generation != self.generation(meta.tenant, doc_id, meta.key):
            return False
        return document is None or self.is_current(meta.tenant, document)

    def register(self, tenant: str, key: ChunkKey, document: DocumentRef) -> None:
        if not self.is_current(tenant, document):
            return
        known = self._tenant(tenant)
        stored = known.document(document.doc_id)
        # A request that names no version means the current one, and goes with it.
        version = document.version if document.version is not None else stored.version
        stored.references.setdefault(key, set()).add(version)
        known.doc_ids_by_key.setdefault(key, set()).add(document.doc_id)

    def replace(
        self, tenant: str, doc_id: str, version: str | None, keys: Iterable[ChunkKey]
    ) -> list[ChunkKey]:
        known = self._tenant(tenant)
        stored = known.document(doc_id)
        references: dict[ChunkKey, set[str | None]] = {key: {version} for key in keys}
        orphans = known.unlink(doc_id, [key for key in stored.references if key not in references])
        for key in references:
            known.doc_ids_by_key.setdefault(key, set()).add(doc_id)
        known.documents[doc_id] = _Document(known.tick(), version, references)
        return orphans

    def invalidate(self, tenant: str, doc_id: str, version: str | None = None) -> list[ChunkKey]:
        known = self._tenant(tenant)
        stored = known.document(doc_id)
        if version is None:
            known.documents[doc_id] = _Document(known.tick())
            return known.unlink(doc_id, stored.references)
        stored.generation = known.tick()
        for versions in stored.references.values():
            versions.discard(version)
        lost = [key for key, versions in stored.references.items() if not versions]
        for key in lost:
            del stored.references[key]
        return known.unlink(doc_id, lost)

    def invalidate_chunks(self, tenant: str, keys: Iterable[ChunkKey]) -> None:
        """Refuse what was planned of these chunks before; documents go on referring to them."""
        known = self._tenant(tenant)
        known.chunks_dropped_at.update(dict.fromkeys(keys, known.tick()))

    def purge(self, tenant: str) -> None:
        clock = self._tenant(tenant).tick()
        self._tenants[tenant] = _Tenant(clock=clock, purged_at=clock)

    def tenants(self) -> tuple[str, ...]:
        return tuple(self._tenants)

    def check(self) -> list[str]:
        """References and their reverse must agree, and no generation may lie ahead of the clock."""
        faults = []
        for name, known in self._tenants.items():
            forward = {(d, key) for d, stored in known.documents.items() for key in stored.references}
            reverse = {(d, key) for key, doc_ids in known.doc_ids_by_key.items() for d in doc_ids}
            if forward != reverse:
                faults.append(f"tenant {name!r}: documents and keys differ by {forward ^ reverse}")
            ahead = [d for d, stored in known.documents.items() if stored.generation > known.clock]
            ahead += [key for key, at in known.chunks_dropped_at.items() if at > known.clock]
            if ahead:
                faults.append(f"tenant {name!r}: generations of {ahead} are ahead of {known.clock}")
        return faults

    def repair(self) -> dict[str, list[ChunkKey]]:
        """Take out references without a reverse, and put clocks right; by tenant, the keys concerned.

        Whether a document really refers to such a key nobody can tell: its KV must go, or it could
        outlive its last document.
        """
        in_doubt: dict[str, list[ChunkKey]] = {}
        for name, known in self._tenants.items():
            forward = {(d, key) for d, stored in known.documents.items() for key in stored.references}
            reverse = {(d, key) for key, doc_ids in known.doc_ids_by_key.items() for d in doc_ids}
            for doc_id, key in forward - reverse:
                del known.documents[doc_id].references[key]
            known.doc_ids_by_key = {}
            for doc_id, key in forward & reverse:
                known.doc_ids_by_key.setdefault(key, set()).add(doc_id)
            generations = [stored.generation for stored in known.documents.values()]
            known.clock = max([known.clock, known.purged_at, *generations, *known.chunks_dropped_at.values()])
            if forward != reverse:
                in_doubt[name] = sorted({key for _, key in forward ^ reverse})
        return in_doubt

    def _tenant(self, tenant: str) -> _Tenant:
        return self._tenants.setdefault(tenant, _Tenant())


class DocumentOperations(ABC):
    """The document half of `ChunkStore`, for stores that say how to drop records."""

    def __init__(self, on_orphaned: OnOrphaned | None = None) -> None:
        self._documents = DocumentRegistry()
        self._on_orphaned = on_orphaned

    @abstractmethod
    def _drop_keys(self, tenant: str, keys: Iterable[ChunkKey]) -> int:
        """Take all variants of these keys out of the index and return how many were ready."""

    @abstractmethod
    def _drop_tenant(self, tenant: str) -> int:
        """Take all records of a tenant out of the index and return how many were ready."""

    def register(self, tenant: str, key: ChunkKey, document: DocumentRef) -> None:
        self._documents.register(tenant, key, document)

    def generation(self, tenant: str, doc_id: str | None, key: ChunkKey | None = None) -> int:
        return self._documents.generation(tenant, doc_id, key)

    def is_current(self, tenant: str, document: DocumentRef) -> bool:
        return self._documents.is_current(tenant, document)

    def replace(self, tenant: str, doc_id: str, version: str | None, keys: Iterable[ChunkKey]) -> int:
        return self._drop_orphans(tenant, self._documents.replace(tenant, doc_id, version, keys))

    def invalidate(self, tenant: str, doc_id: str, version: str | None = None) -> int:
        return self._drop_orphans(tenant, self._documents.invalidate(tenant, doc_id, version))

    def invalidate_chunks(self, tenant: str, keys: Iterable[ChunkKey]) -> int:
        dropped = list(dict.fromkeys(keys))
        self._documents.invalidate_chunks(tenant, dropped)
        return self._drop_orphans(tenant, dropped)

    def _drop_orphans(self, tenant: str, keys: Sequence[ChunkKey]) -> int:
        if keys and self._on_orphaned is not None:
            self._on_orphaned(tenant, keys)
        return self._drop_keys(tenant, keys)

    def purge(self, tenant: str) -> int:
        self._documents.purge(tenant)
        return self._drop_tenant(tenant)

    def _check_documents(self, repair: bool) -> list[str]:
        """`ChunkStore.check` of the documents."""
        faults = self._documents.check()
        done: list[str] = []
        if faults and repair:
            for tenant, keys in self._documents.repair().items():
                num_dropped = self._drop_orphans(tenant, keys)
                done.append(
                    f"repaired: tenant {tenant!r}: references to {keys} were taken out, and {num_dropped} "
                    "records of them dropped"
                )
            done.append("repaired: references and generations agree again")
            done += [f"not repaired: {fault}" for fault in self._documents.check()]
        return faults + done

    def forget_all(self) -> int:
        return sum(map(self.purge, self._all_tenants() | set(self._documents.tenants())))

    @abstractmethod
    def _all_tenants(self) -> set[str]:
        """Tenants of which there are records."""
