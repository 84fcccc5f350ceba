"""What is left of a journal's past: the shortest entries that lead to the same documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from cachecraft_rag.chunks import ChunkKey
from cachecraft_rag.store.journal.base import Action, Entry


@dataclass(slots=True)
class _Document:
    """The current version, the chunks named with each version, and the last entry that named each.

    With a current version there is no other in `keys`: `DocumentRegistry` takes in nothing else.
    """

    version: str | None = None
    keys: dict[str | None, dict[ChunkKey, None]] = field(default_factory=dict)
    seqs: dict[str | None, int] = field(default_factory=dict)

    def add(self, version: str | None, keys: Iterable[ChunkKey], seq: int) -> None:
        self.keys.setdefault(version, {}).update(dict.fromkeys(keys))
        self.seqs[version] = seq

    def entries(self, tenant: str, doc_id: str) -> Iterator[Entry]:
        if self.version is not None:
            yield self._entry(Action.REPLACE, tenant, doc_id, self.version)
        else:
            for version, keys in self.keys.items():
                if keys:
                    yield self._entry(Action.REGISTER, tenant, doc_id, version)

    def _entry(self, action: Action, tenant: str, doc_id: str, version: str | None) -> Entry:
        return Entry(
            seq=self.seqs[version],
            action=action,
            tenant=tenant,
            doc_id=doc_id,
            version=version,
            keys=tuple(self.keys.get(version, ())),
        )


def folded(entries: Iterable[Entry]) -> list[Entry]:
    """Entries that lead an empty `DocumentRegistry` to the same documents, versions and references.

    At most one for each version of a document, and none for what was invalidated or purged: chunks that
    were invalidated are still named by their documents. Each bears the seq of the last entry that went
    into it, so that seqs still grow and none is used twice.

    Only whoever starts from nothing may read them in place of the entries: a registry in the middle of
    the past would miss invalidations.
    """
    tenants: dict[str, dict[str, _Document]] = {}
    for entry in entries:
        _fold(tenants, entry)
    left = (
        entry
        for tenant, documents in tenants.items()
        for doc_id, document in documents.items()
        for entry in document.entries(tenant, doc_id)
    )
    return sorted(left, key=lambda entry: entry.seq)


def can_fold(entries: Iterable[Entry]) -> bool:
    """Whether this version knows what all of them say."""
    return all(entry.action is not Action.UNKNOWN for entry in entries)


def _fold(tenants: dict[str, dict[str, _Document]], entry: Entry) -> None:
    if entry.action is Action.PURGE:
        tenants.pop(entry.tenant, None)
        return
    documents = tenants.setdefault(entry.tenant, {})
    if entry.action is Action.REPLACE:
        documents[entry.doc_id] = document = _Document(entry.version)
        document.add(entry.version, entry.keys, entry.seq)
    elif entry.action is Action.INVALIDATE:
        _invalidate(documents, entry)
    elif entry.action is Action.REGISTER:
        document = documents.setdefault(entry.doc_id, _Document())
        version = entry.version if entry.version is not None else document.version
        if document.version in (None, version):
            document.add(version, entry.keys, entry.seq)


def _invalidate(documents: dict[str, _Document], entry: Entry) -> None:
    if entry.version is None:
        documents.pop(entry.doc_id, None)
    elif entry.doc_id in documents:
        documents[entry.doc_id].keys.pop(entry.version, None)


def by(author: str, entries: Iterable[Entry]) -> list[Entry]:
    """The entries with their author's name."""
    return [replace(entry, author=author) for entry in entries]
