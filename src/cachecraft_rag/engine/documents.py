"""The calls that change what may be used: documents, chunks and tenants; and the upkeep of what is stored."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cachecraft_rag.chunks import SHARED_TENANT, Chunk
from cachecraft_rag.engine.lifecycle import EngineLifecycle
from cachecraft_rag.engine.options import check_chunks
from cachecraft_rag.errors import CacheCraftError, EngineError, InvalidRequestError

logger = logging.getLogger(__name__)


class EngineDocuments(EngineLifecycle):
    """Base of `CacheCraftEngine`: replace, invalidate and purge, in every tier and for every process that
    shares one. Public documents are those of `tenant=SHARED_TENANT`.

    All of them raise EngineError when not every process is known to follow; repeating the call is right.
    """

    def replace(
        self, doc_id: str, version: str | None, chunks: Sequence[Chunk], *, tenant: str | None = None
    ) -> int:
        """Make `chunks` the current content of a document. Once it returns, no new request uses KV of
        the document's earlier chunks.

        Returns:
            The number of stored records that were dropped.

        Raises:
            InvalidRequestError: a chunk is marked as shared, and the tenant is not the shared one.
        """
        current, tenant = check_chunks(chunks), self._tenant(tenant)
        is_shared = tenant == SHARED_TENANT
        if not is_shared and any(chunk.is_shared for chunk in current):
            raise InvalidRequestError(
                f"chunks of document {doc_id!r} are marked is_shared, but tenant is {tenant!r}: "
                "pass tenant=SHARED_TENANT for a public document"
            )
        running = self._started()
        named = [Chunk(chunk.text, doc_id, version, is_shared) for chunk in current]
        keys = running.chunk_keys(tenant, named)
        self._known.forget(tenant, doc_id)
        dropped = self._drop("replace", doc_id=doc_id, version=version, tenant=tenant, keys=keys)
        self._known.add(tenant, named)
        return dropped

    def invalidate(self, doc_id: str, version: str | None = None, *, tenant: str | None = None) -> int:
        """Drop a document, or one version of it. Once it returns, no new request uses its KV.

        Returns:
            The number of stored records that were dropped.
        """
        tenant = self._tenant(tenant)
        self._known.forget(tenant, doc_id)
        return self._drop("invalidate", doc_id=doc_id, version=version, tenant=tenant)

    def invalidate_chunk(self, chunk: Chunk | str, *, tenant: str | None = None) -> int:
        """Drop the KV of one text, whatever documents have it. Once it returns, no new request uses it;
        the text is cached anew when it is next passed.

        Args:
            chunk: a chunk or its text; of a shared chunk the shared KV is dropped.

        Returns:
            The number of stored records that were dropped.
        """
        (named,) = check_chunks([Chunk(chunk) if isinstance(chunk, str) else chunk])
        tenant = SHARED_TENANT if named.is_shared else self._tenant(tenant)
        self._known.forget_text(tenant, named.text)
        if self._config.has_cold_tiers:
            self._started()
        keys = self._running.chunk_keys(tenant, [named]) if self._running is not None else []
        return self._drop("invalidate_chunks", tenant=tenant, text=named.text, keys=keys)

    def purge(self, tenant: str | None = None) -> int:
        """Drop everything of one tenant; returns the number of stored records that were dropped."""
        tenant = self._tenant(tenant)
        self._known.forget_tenant(tenant)
        if self._running is not None:
            self._running.segment_tokenizer.forget_chunks()
        return self._drop("purge", tenant=tenant)

    def flush(self) -> None:
        """Write what was cached so far to disk and Redis, as far as they are configured; what it returns
        after survives a crash.

        Raises:
            EngineError: a tier failed.
        """
        self._control("flush")

    def check(self, repair: bool = False) -> list[str]:
        """Problems found in the books of the store and of its tiers; empty if they add up.

        With `repair` they are put right as well, what is in doubt being dropped: computing it again is
        cheap. Sentences that begin with "repaired:" then say what was done, and with "not repaired:" what
        could not be.
        """
        return list(self._control("check", repair=repair) or ())

    def _end(self) -> None:
        try:
            self.flush()
        except EngineError as error:
            logger.warning("closed before all was written: %s", error)

    @contextmanager
    def _warming_held(self, tenant: str, doc_id: str | None, text: str | None) -> Iterator[None]:
        """Around a change: chunks of the document, of the text, or else of the tenant, are not warmed from
        its begin on, until they are asked for after it."""
        warmer = self._running.warmer if self._running is not None else None
        if warmer is None:
            yield
            return
        self._live.loop.run(warmer.hold())
        try:
            yield
        finally:
            self._live.loop.run(warmer.forget(tenant, doc_id=doc_id, text=text))

    def _drop(self, action: str, *, tenant: str, text: str | None = None, **arguments: Any) -> int:
        """Drop records of `tenant`, and its part of vLLM's prefix cache; the number of records."""
        # Before the start nothing is in memory, but an earlier engine may have left KV on disk or in Redis.
        if self._config.has_cold_tiers:
            self._started()
        try:
            with self._warming_held(tenant, arguments.get("doc_id"), text):
                num_dropped = int(self._control(action, tenant=tenant, **arguments) or 0)
        except CacheCraftError as fault:
            self._audit_log.changed(action, tenant, arguments, fault=str(fault))
            raise
        finally:
            if self._running is not None:
                self._running.forget_prefixes(tenant)
        self._audit_log.changed(action, tenant, arguments, num_dropped=num_dropped)
        return num_dropped
