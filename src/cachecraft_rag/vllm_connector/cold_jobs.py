"""Cold records on their way: what all ranks have to answer before the scheduler side goes on.

`is_dropped` says that the chunk was dropped meanwhile, so that what comes of it goes too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cachecraft_rag.chunks import ChunkKey, RecordMeta
from cachecraft_rag.vllm_connector.steps import ColdRead, LoadedPart, WrittenPart

Wanted = tuple[str, ChunkKey]
"""Tenant and chunk."""


@dataclass(slots=True)
class Loading:
    """A record that the workers read; parts by rank."""

    wanted: Wanted
    tier: str
    parts: list[LoadedPart] = field(default_factory=list)
    is_dropped: bool = False


@dataclass(slots=True)
class Writing:
    """A record that the workers write: a new one, or the copy of one that they read."""

    meta: RecordMeta
    copied: ColdRead | None = None
    parts: dict[int, WrittenPart] = field(default_factory=dict)
    is_dropped: bool = False

    @property
    def wanted(self) -> Wanted:
        return self.meta.tenant, self.meta.key
