"""What one ingestion call changed, and how an engine is told of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from llama_index.core.schema import BaseNode, NodeWithScore

from cachecraft_rag.chunks import SHARED_TENANT, Chunk
from cachecraft_rag.engine.api import ChatEngine
from cachecraft_rag.engine.renewal import renew
from cachecraft_rag.errors import CacheCraftError
from cachecraft_rag.llama_index._handle import EngineHandle
from cachecraft_rag.llama_index._passages import to_rendered_chunks

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Changes:
    """Documents of which nodes were inserted, or that were deleted, and single nodes that were.

    Attributes:
        inserted: by id of the document, which then has these nodes and no others.
        removed: nodes of documents that keep some of theirs.
    """

    inserted: dict[str, list[BaseNode]] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)
    removed: list[BaseNode] = field(default_factory=list)

    def insert(self, nodes: Iterable[BaseNode]) -> None:
        for node in nodes:
            self.inserted.setdefault(_document_of(node), []).append(node)

    def delete(self, doc_id: str) -> None:
        self.deleted.add(doc_id)
        self.inserted.pop(doc_id, None)

    def remove(self, nodes: Iterable[BaseNode]) -> None:
        for node in nodes:
            if node.source_node is None:
                self.delete(node.node_id)
            else:
                self.removed.append(node)

    def contents(self) -> Iterator[tuple[str, list[Chunk]]]:
        """Every document that changed as a whole, with what it consists of now: nothing, if it is gone."""
        for doc_id, nodes in self.inserted.items():
            yield doc_id, _chunks(nodes)
        for doc_id in self.deleted - self.inserted.keys():
            yield doc_id, []

    def removed_chunks(self) -> list[Chunk]:
        whole = self.inserted.keys() | self.deleted
        return _chunks([node for node in self.removed if _document_of(node) not in whole])


@dataclass(frozen=True, slots=True)
class Follower:
    """An engine and a tenant whose stored KV follows the documents."""

    handle: EngineHandle
    tenant: str | None

    def tell(self, changes: Changes) -> None:
        """Invalidate what changed. Never raises: the user's ingestion is done by now, and no request uses
        KV of a text that it does not contain."""
        try:
            self._tell(self.handle.get(), changes)
        except CacheCraftError as error:
            logger.warning(
                "stored KV could not follow a change of documents; call invalidate(doc_id) of the engine, or "
                "repeat the change: %s",
                error,
            )

    def _tell(self, engine: ChatEngine, changes: Changes) -> None:
        for doc_id, chunks in changes.contents():
            renew(engine, doc_id, _version_of(chunks), chunks, tenant=self.tenant)
        for chunk in changes.removed_chunks():
            is_shared = self.tenant == SHARED_TENANT
            engine.invalidate_chunk(Chunk(chunk.text, is_shared=is_shared), tenant=self.tenant)


def _document_of(node: BaseNode) -> str:
    return node.ref_doc_id or node.node_id


def _chunks(nodes: Sequence[BaseNode]) -> list[Chunk]:
    return to_rendered_chunks([NodeWithScore(node=node) for node in nodes])


def _version_of(chunks: Sequence[Chunk]) -> str | None:
    """The version that all of them have: with another one they would count as superseded."""
    versions = {chunk.version for chunk in chunks}
    return versions.pop() if len(versions) == 1 else None
