"""Chunks as they were asked for, so that they can be computed again without a request."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cachecraft_rag.chunks import Chunk, ChunkKey, SegmentKind
from cachecraft_rag.engine.calls import Prepared

Owned = tuple[str, ChunkKey]
"""A chunk's key and the tenant it belongs to."""


@dataclass(frozen=True, slots=True)
class Popular:
    """A chunk as it was last asked for.

    Attributes:
        system: what stood at the head of that prompt, behind which the chunk is computed again.
        is_chat: the prompt was made of messages, `system` being one of them.
    """

    tenant: str
    key: ChunkKey
    chunk: Chunk
    num_tokens: int
    system: str | None
    is_chat: bool

    @property
    def owned(self) -> Owned:
        return self.tenant, self.key

    def to_plain(self) -> list[Any]:
        """As the control message `worth_computing` names it."""
        document = None if self.chunk.doc_id is None else [self.chunk.doc_id, self.chunk.version]
        return [self.key, self.num_tokens, document]

    def is_of(self, tenant: str, doc_id: str | None, text: str | None) -> bool:
        """Whether it is the tenant's, and of the document or the text, where one is named."""
        if self.tenant != tenant:
            return False
        if text is not None:
            return self.chunk.text.strip() == text.strip()
        return doc_id is None or self.chunk.doc_id == doc_id


def popular_in(prepared: Prepared) -> Iterator[Popular]:
    """The chunks of a request that are its tenant's own, and no mere context of one to be warmed."""
    tenant, layout = prepared.spec.tenant, prepared.layout
    system, is_chat = _head_of(prepared)
    for segment in layout.chunks[prepared.spec.store_from :]:
        assert segment.chunk is not None and segment.key is not None  # what PromptLayout.chunks holds
        if not segment.chunk.is_shared:
            yield Popular(tenant, segment.key, segment.chunk, len(segment.span), system, is_chat)


def _head_of(prepared: Prepared) -> tuple[str | None, bool]:
    """The system prompt, or what stands before the first chunk of a finished prompt; one copy of it in
    memory, whatever the number of chunks."""
    prompt = prepared.call.prompt
    if isinstance(prompt, str):
        first = prepared.layout.segments[0]
        head = first.text.strip() if first.kind is SegmentKind.TEXT else ""
        return (sys.intern(head) if head else None), False
    message = prompt[0] if prompt else {}
    content = message.get("content") if message.get("role") == "system" else None
    return (sys.intern(content) if type(content) is str else None), True
