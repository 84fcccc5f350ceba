"""Chunks seen before, so that they are found by text in later prompts."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from cachecraft_rag.chunks import SHARED_TENANT, Chunk
from cachecraft_rag.errors import ConfigurationError
from cachecraft_rag.segments.matcher import ChunkMatcher, Match, find_matches
from cachecraft_rag.segments.prompt import PromptText

_DocId = str | None


class KnownChunks:
    """The chunks used last, each visible to its own tenant only, but for those of `SHARED_TENANT`.
    Thread-safe.

    A text that stands in several documents is remembered once for each of them; the document added
    last gives its name to the match, and the one before it takes over when that one is forgotten.

    Args:
        max_chunks: chunks remembered over all tenants together (a bound for each tenant alone would
            let memory grow with their number); the least recently used goes first.

    Raises:
        ConfigurationError: `max_chunks` is less than 1.
    """

    def __init__(self, max_chunks: int) -> None:
        if max_chunks < 1:
            raise ConfigurationError(f"max_known_chunks is {max_chunks!r}: it must be at least 1")
        self._max_chunks = max_chunks
        self._lock = threading.Lock()
        self._tenants: dict[str, _TenantChunks] = {}
        self._recency: OrderedDict[tuple[str, str, _DocId], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._recency)

    def add(self, tenant: str, chunks: Iterable[Chunk]) -> None:
        """Remember `chunks` for `tenant`; blank ones are ignored."""
        with self._lock:
            for chunk in chunks:
                if chunk.text.strip():
                    self._add_one(tenant, chunk)

    def find(self, tenant: str, prompt: PromptText, extra: Sequence[Chunk] = ()) -> list[Match]:
        """Where chunks of `tenant`, shared ones, and the chunks `extra` of this call stand in `prompt`.

        Only inside its content spans; no match crosses the edge of one.
        Of chunks with the same text the one in `extra` wins, then the tenant's own: what a tenant has as
        its own is never taken for the public document of the same text. `extra` is not remembered;
        what matched counts as used now.
        """
        given = ChunkMatcher(extra)
        with self._lock:
            owners = dict.fromkeys((tenant, SHARED_TENANT))
            matchers = [given, *(self._tenants[each].matcher for each in owners if each in self._tenants)]
            matches = [
                match.shift(start)
                for start, end in prompt.content_spans
                for match in find_matches(prompt.text[start:end], matchers)
            ]
            for match in matches:
                self._use(tenant, match.chunk)
                if match.chunk.is_shared:
                    self._use(SHARED_TENANT, match.chunk)
        return matches

    def forget(self, tenant: str, doc_id: str) -> None:
        """Forget every chunk of one document."""
        with self._lock:
            known = self._tenants.get(tenant)
            for text in tuple(known.texts_by_doc.get(doc_id, ())) if known else ():
                self._forget_one((tenant, text, doc_id))

    def forget_text(self, tenant: str, text: str) -> None:
        """Forget a text, whatever documents it stands in."""
        with self._lock:
            known = self._tenants.get(tenant)
            for doc_id in known.documents_of(text.strip()) if known else ():
                self._forget_one((tenant, text.strip(), doc_id))

    def forget_tenant(self, tenant: str) -> None:
        """Forget every chunk of `tenant`."""
        with self._lock:
            known = self._tenants.pop(tenant, None)
            for doc_id, texts in known.texts_by_doc.items() if known else ():
                for text in texts:
                    del self._recency[tenant, text, doc_id]

    def _add_one(self, tenant: str, chunk: Chunk) -> None:
        key = _key(tenant, chunk)
        self._tenants.setdefault(tenant, _TenantChunks()).add(chunk)
        self._recency[key] = None
        self._recency.move_to_end(key)
        if len(self._recency) > self._max_chunks:
            self._forget_one(next(iter(self._recency)))

    def _use(self, tenant: str, chunk: Chunk) -> None:
        key = _key(tenant, chunk)
        if key in self._recency:
            self._recency.move_to_end(key)

    def _forget_one(self, key: tuple[str, str, _DocId]) -> None:
        tenant, text, doc_id = key
        del self._recency[key]
        known = self._tenants[tenant]
        known.remove(text, doc_id)
        if not known.matcher:
            del self._tenants[tenant]


class _TenantChunks:
    """One tenant's chunks, by text and by document."""

    def __init__(self) -> None:
        self.matcher = ChunkMatcher()
        self.texts_by_doc: dict[_DocId, set[str]] = {}
        self._owners: dict[str, dict[_DocId, Chunk]] = {}

    def add(self, chunk: Chunk) -> None:
        text = chunk.text.strip()
        owners = self._owners.setdefault(text, {})
        owners.pop(chunk.doc_id, None)
        owners[chunk.doc_id] = chunk
        self.texts_by_doc.setdefault(chunk.doc_id, set()).add(text)
        self.matcher.add(chunk)

    def documents_of(self, text: str) -> tuple[_DocId, ...]:
        return tuple(self._owners.get(text, ()))

    def remove(self, text: str, doc_id: _DocId) -> None:
        texts = self.texts_by_doc[doc_id]
        texts.discard(text)
        if not texts:
            del self.texts_by_doc[doc_id]
        owners = self._owners[text]
        del owners[doc_id]
        if owners:
            self.matcher.add(next(reversed(owners.values())))
        else:
            del self._owners[text]
            self.matcher.remove(text)


def _key(tenant: str, chunk: Chunk) -> tuple[str, str, _DocId]:
    return tenant, chunk.text.strip(), chunk.doc_id
