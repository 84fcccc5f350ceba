"""Factories of stored variants and prompts, for all planner tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from cachecraft_rag.chunks import AttentionProfile, ChunkKey, RecordMeta, Span
from cachecraft_rag.vllm_connector.messages import ChunkRef

RecordFactory = Callable[..., RecordMeta]
ChunkFactory = Callable[..., tuple[ChunkRef, ...]]


def _make_record(
    key: str = "c",
    record_id: int = 1,
    num_tokens: int = 10,
    prefix: str = "",
    inter: Sequence[float] | None = None,
    scores: Sequence[float] | None = None,
    mean_ratio: tuple[float, float] = (0.3, 0.3),
    prefix_hash: str = "old",
    prefix_is_exact: bool = True,
    start: int = 7,
) -> RecordMeta:
    """A variant with a profile if `inter` is given; each letter of `prefix` is a chunk key."""
    profile = None
    if inter is not None:
        token_scores = np.arange(num_tokens) if scores is None else np.asarray(scores)
        profile = AttentionProfile(*mean_ratio, tuple(inter), token_scores.astype(np.float32))
    return RecordMeta(
        record_id=record_id,
        key=ChunkKey(key),
        tenant="t",
        num_tokens=num_tokens,
        start=start,
        size_bytes=64,
        prefix_hash=prefix_hash,
        prefix_chunks=tuple(map(ChunkKey, prefix)),
        prefix_is_exact=prefix_is_exact,
        profile=profile,
    )


def _make_chunks(keys: str, num_tokens: int = 10, start: int = 5) -> tuple[ChunkRef, ...]:
    """One chunk per letter, back to back from `start`; the i-th has the prefix hash `new-i`."""
    return tuple(
        ChunkRef(Span(start + i * num_tokens, start + (i + 1) * num_tokens), ChunkKey(key), f"new-{i}")
        for i, key in enumerate(keys)
    )


@pytest.fixture(scope="session")
def make_record() -> RecordFactory:
    return _make_record


@pytest.fixture(scope="session")
def make_chunks() -> ChunkFactory:
    return _make_chunks
