"""LangChain documents → chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from langchain_core.documents import Document

from cachecraft_rag.chunks import Chunk


def document_chunk(document: Document, text: str, *, is_shared: bool = False) -> Chunk | None:
    """`text`, which was made of `document`, as a chunk; None if it is blank, as splitters and loaders
    do return empty documents.

    `doc_id` is `metadata["source"]`, else the document's id; a version needs one of them.
    """
    if not (stripped := text.strip()):
        return None
    doc_id = source_of(document) or document.id
    version = document.metadata.get("version")
    return Chunk(stripped, doc_id, None if doc_id is None or version is None else str(version), is_shared)


def document_chunks(documents: Iterable[Document], *, is_shared: bool = False) -> list[Chunk]:
    """One chunk for each document that holds text: its `page_content`."""
    chunks = (document_chunk(each, each.page_content, is_shared=is_shared) for each in documents)
    return [chunk for chunk in chunks if chunk is not None]


def source_of(document: Document) -> str | None:
    """`metadata["source"]`: the document that this one is a piece of."""
    source = document.metadata.get("source")
    return str(source) if source else None


def documents_in(artifact: Any) -> Iterator[Document]:
    """The documents in a list, also those that a checkpointer brought back as plain mappings."""
    for item in artifact if isinstance(artifact, (list, tuple)) else ():
        if isinstance(item, Document):
            yield item
        elif isinstance(item, Mapping) and isinstance(item.get("page_content"), str):
            metadata = item.get("metadata")
            metadata = dict(metadata) if isinstance(metadata, Mapping) else {}
            item_id = item.get("id")
            yield Document(
                page_content=item["page_content"],
                metadata=metadata,
                id=None if item_id is None else str(item_id),
            )
