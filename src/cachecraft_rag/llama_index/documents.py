"""`follow`: stored KV follows the documents of an index or of an ingestion pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any

from llama_index.core.indices.base import BaseIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.llms.llm import LLM
from llama_index.core.schema import BaseNode, Document

from cachecraft_rag.errors import InvalidRequestError
from cachecraft_rag.llama_index._answering import engine_backed, tenant_of
from cachecraft_rag.llama_index._changes import Changes, Follower

_FOLLOWERS = "_cachecraft_followers"
# The outermost call at work on an object and what it changed so far: an update is one change, not a
# deletion and an insertion, or the chunks that stay as they were would be lost with the others.
_current: ContextVar[tuple[object, Changes] | None] = ContextVar("cachecraft_changes", default=None)


def follow(target: BaseIndex[Any] | IngestionPipeline, *, llm: LLM, tenant: str | None = None) -> None:
    """From now on, what is changed through `target` is invalidated in the engine of `llm`.

    Of an index these are insert, update, refresh and delete of documents and of nodes; of a pipeline the
    documents that `run` takes for new, changed or, with `UPSERTS_AND_DELETE`, gone. Their async twins as
    well. Chunks that stayed as they were keep their KV, and so do all other documents. An engine that was
    not started is not started by this, unless it keeps KV on disk or in Redis.

    Following twice is following once. A fault of the engine is logged and fails no ingestion. Nodes added
    by `insert_nodes` to a document that has some already take the KV of the older ones with them: it is
    computed anew.

    Args:
        llm: a model of another make has no KV to follow with, and nothing is done.
        tenant: whose documents these are; None takes the model's, `SHARED_TENANT` is for public ones.

    Raises:
        InvalidRequestError: `target` is neither an index nor an ingestion pipeline.

    Example:
        follow(index, llm=llm)
        index.update_ref_doc(document)
    """
    ours = engine_backed(llm)
    if ours is None:
        return
    follower = Follower(ours._handle, tenant or tenant_of(ours))
    followers: tuple[Follower, ...] = getattr(target, _FOLLOWERS, ())
    if not isinstance(target, (_FollowedIndex, _FollowedPipeline)):
        _become_followed(target)
    if follower not in followers:
        object.__setattr__(target, _FOLLOWERS, (*followers, follower))


class _FollowedIndex(BaseIndex[Any]):
    """The calls to which all others of an index come down."""

    def insert_nodes(self, nodes: Sequence[BaseNode], **insert_kwargs: Any) -> None:
        with _changes_of(self) as changes:
            super().insert_nodes(nodes, **insert_kwargs)
            changes.insert(nodes)

    async def ainsert_nodes(self, nodes: Sequence[BaseNode], **insert_kwargs: Any) -> None:
        async with _achanges_of(self) as changes:
            await super().ainsert_nodes(nodes, **insert_kwargs)
            changes.insert(nodes)

    def delete_nodes(self, node_ids: list[str], *args: Any, **kwargs: Any) -> None:
        with _changes_of(self) as changes:
            changes.remove(self._nodes_of(node_ids))
            super().delete_nodes(node_ids, *args, **kwargs)

    async def adelete_nodes(self, node_ids: list[str], *args: Any, **kwargs: Any) -> None:
        async with _achanges_of(self) as changes:
            changes.remove(await asyncio.to_thread(self._nodes_of, node_ids))
            await super().adelete_nodes(node_ids, *args, **kwargs)

    def delete_ref_doc(self, ref_doc_id: str, *args: Any, **kwargs: Any) -> None:
        with _changes_of(self) as changes:
            changes.delete(ref_doc_id)
            super().delete_ref_doc(ref_doc_id, *args, **kwargs)

    async def adelete_ref_doc(self, ref_doc_id: str, *args: Any, **kwargs: Any) -> None:
        async with _achanges_of(self) as changes:
            changes.delete(ref_doc_id)
            await super().adelete_ref_doc(ref_doc_id, *args, **kwargs)

    def update_ref_doc(self, document: Document, **update_kwargs: Any) -> None:
        with _changes_of(self):
            super().update_ref_doc(document, **update_kwargs)

    async def aupdate_ref_doc(self, document: Document, **update_kwargs: Any) -> None:
        async with _achanges_of(self):
            await super().aupdate_ref_doc(document, **update_kwargs)

    def _nodes_of(self, node_ids: Sequence[str]) -> list[BaseNode]:
        """The nodes before they are gone, from whichever store has their text."""
        nodes = self.docstore.get_nodes(list(node_ids), raise_error=False)
        missing = sorted(set(node_ids) - {node.node_id for node in nodes})
        store = getattr(self, "vector_store", None)
        if missing and store is not None and store.stores_text:
            nodes += store.get_nodes(node_ids=missing)
        return nodes


class _FollowedPipeline(IngestionPipeline):
    def run(self, *args: Any, **kwargs: Any) -> Sequence[BaseNode]:
        with _changes_of(self) as changes:
            before = _by_id(self.docstore.get_all_document_hashes() if self.docstore else {})
            nodes = super().run(*args, **kwargs)
            after = _by_id(self.docstore.get_all_document_hashes() if self.docstore else {})
            changes.insert(nodes)
            for doc_id in _lost(before, after, changes):
                # Of documents with the same text only one is in the list of all hashes.
                now = self.docstore.get_document_hash(doc_id) if self.docstore else None
                if now != before[doc_id]:
                    changes.delete(doc_id)
            return nodes

    async def arun(self, *args: Any, **kwargs: Any) -> Sequence[BaseNode]:
        async with _achanges_of(self) as changes:
            before = _by_id(await self.docstore.aget_all_document_hashes() if self.docstore else {})
            nodes = await super().arun(*args, **kwargs)
            after = _by_id(await self.docstore.aget_all_document_hashes() if self.docstore else {})
            changes.insert(nodes)
            for doc_id in _lost(before, after, changes):
                now = await self.docstore.aget_document_hash(doc_id) if self.docstore else None
                if now != before[doc_id]:
                    changes.delete(doc_id)
            return nodes


def _by_id(hashes: Mapping[str, str]) -> dict[str, str]:
    return {doc_id: digest for digest, doc_id in hashes.items()}


def _lost(before: Mapping[str, str], after: Mapping[str, str], changes: Changes) -> list[str]:
    """Documents that may be gone, or have no nodes left."""
    return [
        doc_id
        for doc_id, digest in before.items()
        if after.get(doc_id) != digest and doc_id not in changes.inserted
    ]


def _become_followed(target: BaseIndex[Any] | IngestionPipeline) -> None:
    """Give the object a subclass of its own class. Methods set on the object were rejected: a copy of it
    would have them too, and they would still change the original."""
    mixin: type
    if isinstance(target, BaseIndex):
        mixin = _FollowedIndex
    elif isinstance(target, IngestionPipeline):
        mixin = _FollowedPipeline
    else:
        raise InvalidRequestError(
            f"target is a {type(target).__name__}: follow takes a LlamaIndex index or IngestionPipeline"
        )
    base: type = type(target)
    bases = (mixin,) if base is IngestionPipeline else (mixin, base)
    target.__class__ = type(base)(base.__name__, bases, {"__module__": base.__module__})


@contextmanager
def _changes_of(target: object) -> Iterator[Changes]:
    """What the outermost call changes; its followers are told at the end, also when it failed halfway."""
    outer = _current.get()
    if outer is not None and outer[0] is target:
        yield outer[1]
        return
    changes = Changes()
    token = _current.set((target, changes))
    try:
        yield changes
    finally:
        _current.reset(token)
        _tell(target, changes)


@asynccontextmanager
async def _achanges_of(target: object) -> AsyncIterator[Changes]:
    outer = _current.get()
    if outer is not None and outer[0] is target:
        yield outer[1]
        return
    changes = Changes()
    token = _current.set((target, changes))
    try:
        yield changes
    finally:
        _current.reset(token)
        await asyncio.to_thread(_tell, target, changes)


def _tell(target: object, changes: Changes) -> None:
    for follower in getattr(target, _FOLLOWERS, ()):
        follower.tell(changes)
