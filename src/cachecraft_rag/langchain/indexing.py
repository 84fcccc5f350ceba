"""LangChain's `index` and `aindex`, which also drop the KV of what they remove from the vector store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, Self

from langchain_core import indexing
from langchain_core.document_loaders import BaseLoader
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.indexing import IndexingResult, RecordManager
from langchain_core.vectorstores import VectorStore

from cachecraft_rag.engine import ChatEngine
from cachecraft_rag.engine.renewal import renew
from cachecraft_rag.errors import ConfigurationError, EngineError
from cachecraft_rag.langchain._capture import Target, target_of
from cachecraft_rag.langchain._documents import document_chunks, source_of


def index(
    docs_source: BaseLoader | Iterable[Document],
    record_manager: RecordManager,
    vector_store: VectorStore,
    *,
    llm: Any = None,
    engine: ChatEngine | None = None,
    tenant: str | None = None,
    **options: Any,
) -> IndexingResult:
    """`langchain_core.indexing.index`; once it returns, no new request uses KV of what it removed.

    Of a document (`metadata["source"]`) that changed, the chunks which did not change keep their KV, also
    where only their metadata did; of one that is gone everything is dropped. Documents without a source
    are told apart by their text. An engine that has not started is not started, unless its KV outlives it
    on disk or in Redis. The texts of one run are held in memory until it ends.

    Args:
        vector_store: has to find documents by id (`get_by_ids`), to say what it removes.
        llm: the model whose engine is told; its tenant is taken over.
        engine: the engine itself, instead of `llm`.
        tenant: whose documents these are, where it is not the model's; `SHARED_TENANT` for public ones.
        options: as of LangChain: `cleanup`, `source_id_key`, `key_encoder` and so on.

    Raises:
        ConfigurationError: both or neither of `llm` and `engine`, or a store that lacks what is needed.
        EngineError: the store was changed, and the engine could not be told; the message says what to
            invalidate.
    """
    target = _target(llm, engine, tenant)
    _check_store(vector_store, (VectorStore.get_by_ids,), (VectorStore.delete,))
    changes = _Changes()
    store = _WatchedStore(vector_store, changes, overwrites=bool(options.get("force_update")))
    try:
        return indexing.index(changes.watch(docs_source), record_manager, store, **options)
    finally:
        changes.apply(target)


async def aindex(
    docs_source: BaseLoader | Iterable[Document] | AsyncIterator[Document],
    record_manager: RecordManager,
    vector_store: VectorStore,
    *,
    llm: Any = None,
    engine: ChatEngine | None = None,
    tenant: str | None = None,
    **options: Any,
) -> IndexingResult:
    """`index`, without blocking the caller's loop."""
    target = _target(llm, engine, tenant)
    _check_store(
        vector_store,
        (VectorStore.get_by_ids, VectorStore.aget_by_ids),
        (VectorStore.delete, VectorStore.adelete),
    )
    changes = _Changes()
    store = _WatchedStore(vector_store, changes, overwrites=bool(options.get("force_update")))
    try:
        return await indexing.aindex(changes.awatch(docs_source), record_manager, store, **options)
    finally:
        await asyncio.to_thread(changes.apply, target)


class _Changes:
    """What one run of indexing saw, and what it removed."""

    def __init__(self) -> None:
        self._by_source: dict[str, list[Document]] = {}
        self._texts: set[str] = set()
        self._removed: list[Document] = []

    def watch(self, docs_source: BaseLoader | Iterable[Document]) -> Iterator[Document]:
        for document in docs_source.lazy_load() if isinstance(docs_source, BaseLoader) else docs_source:
            self._see(document)
            yield document

    async def awatch(
        self, docs_source: BaseLoader | Iterable[Document] | AsyncIterator[Document]
    ) -> AsyncIterator[Document]:
        source = docs_source.alazy_load() if isinstance(docs_source, BaseLoader) else docs_source
        if isinstance(source, AsyncIterator):
            async for document in source:
                self._see(document)
                yield document
        else:
            for document in self.watch(source):
                yield document

    def remove(self, documents: Iterable[Document]) -> None:
        self._removed += documents

    def apply(self, target: Target) -> None:
        """Drop the KV of what was removed. Raises as `index`."""
        sources = list(dict.fromkeys(s for d in self._removed if (s := source_of(d)) is not None))
        loose = (d.page_content.strip() for d in self._removed if source_of(d) is None)
        texts = [text for text in dict.fromkeys(loose) if text and text not in self._texts]
        try:
            for source in sources:
                self._renew(target, source)
            for text in texts:
                target.engine.invalidate_chunk(text, tenant=target.tenant)
        except EngineError as error:
            raise EngineError(
                "the vector store is up to date, but the engine may still use KV of what was removed: call "
                f"engine.invalidate for the documents {sources!r:.500} and engine.invalidate_chunk for "
                f"{len(texts)} texts that have no source"
            ) from error

    def _renew(self, target: Target, source: str) -> None:
        chunks = document_chunks(self._by_source.get(source, []))
        version = chunks[-1].version if chunks else None
        renew(target.engine, source, version, chunks, tenant=target.tenant)

    def _see(self, document: Document) -> None:
        self._texts.add(document.page_content.strip())
        if (source := source_of(document)) is not None:
            self._by_source.setdefault(source, []).append(document)


class _WatchedStore(VectorStore):
    """The user's store, with a note of each document that leaves it. Only what indexing calls."""

    def __init__(self, store: VectorStore, changes: _Changes, *, overwrites: bool) -> None:
        self._store = store
        self._changes = changes
        # With a key of the user's making, updated documents replace others under the same id.
        self._overwrites = overwrites

    @property
    def embeddings(self) -> Embeddings | None:
        return self._store.embeddings

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        if self._overwrites:
            self._changes.remove(self._store.get_by_ids(kwargs["ids"]))
        return self._store.add_documents(documents, **kwargs)

    async def aadd_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        if self._overwrites:
            self._changes.remove(await self._store.aget_by_ids(kwargs["ids"]))
        return await self._store.aadd_documents(documents, **kwargs)

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        self._changes.remove(self._store.get_by_ids(ids or []))
        return self._store.delete(ids, **kwargs)

    async def adelete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        self._changes.remove(await self._store.aget_by_ids(ids or []))
        return await self._store.adelete(ids, **kwargs)

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        return self._store.similarity_search(query, k, **kwargs)

    @classmethod
    def from_texts(
        cls, texts: list[str], embedding: Embeddings, metadatas: list[dict[str, Any]] | None = None, **_: Any
    ) -> Self:
        raise NotImplementedError("a store is watched, not made")


def _target(llm: Any, engine: ChatEngine | None, tenant: str | None) -> Target:
    if (llm is None) == (engine is None):
        raise ConfigurationError("give either llm= or engine=: one of them is told of what is removed")
    if engine is not None:
        return Target(engine, tenant)
    target = target_of(llm, tenant)
    if target is None:
        raise ConfigurationError(
            f"llm is a {type(llm).__name__}, which has no KV to drop: use langchain_core.indexing with it"
        )
    return target


def _check_store(store: VectorStore, *needed: Sequence[Any]) -> None:
    """Of each group of methods the store must have one of its own: those of its base only raise."""
    if not isinstance(store, VectorStore):
        raise ConfigurationError(f"vector_store is a {type(store).__name__}: only a VectorStore is supported")
    for methods in needed:
        if all(getattr(type(store), method.__name__) is method for method in methods):
            raise ConfigurationError(
                f"{type(store).__name__} has no {methods[0].__name__}, so what it removes cannot be known: "
                "use langchain_core.indexing and call engine.invalidate for documents that changed"
            )
