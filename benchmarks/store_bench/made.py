"""Made-up records and requests, and how figures are summed up."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cachecraft_rag.chunks import AttentionProfile, ChunkKey, DocumentRef, RecordMeta, Span
from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.planner.plan import PlanRequest
from cachecraft_rag.store.codecs import DTYPES
from cachecraft_rag.store.cold import ColdStore
from cachecraft_rag.store.record_format import KV, ArrayForm
from cachecraft_rag.vllm_connector.messages import ChunkRef

Array = NDArray[Any]

TENANT = "tenant"
SEED = 4
CHUNK_TOKENS = 128
NUM_PREFIX_CHUNKS = 4
REQUEST_CHUNKS = 10


def digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def chunk_key(number: int) -> ChunkKey:
    return ChunkKey(digest("chunk", number))


def profile(num_tokens: int = CHUNK_TOKENS) -> AttentionProfile:
    scores = np.random.default_rng(SEED).random(num_tokens, dtype=np.float32)
    return AttentionProfile(0.1, 0.5, (0.1,) * NUM_PREFIX_CHUNKS, scores)


def meta_of(number: int, variant: int = 0, *, record_id: int = 0, size_bytes: int = 1) -> RecordMeta:
    """Facts of a record as the engine makes them: hashes as long as real ones, four chunks before it."""
    first = number + 1 + variant
    return RecordMeta(
        record_id=record_id,
        key=chunk_key(number),
        tenant=TENANT,
        num_tokens=CHUNK_TOKENS,
        start=NUM_PREFIX_CHUNKS * CHUNK_TOKENS,
        size_bytes=size_bytes,
        prefix_hash=digest("prefix", number, variant),
        prefix_chunks=tuple(map(chunk_key, range(first, first + NUM_PREFIX_CHUNKS))),
        document=DocumentRef(f"doc-{number // 8}", "1"),
    )


@dataclass(frozen=True, slots=True)
class KvMaker:
    """KV of one chunk in bfloat16, `num_layers` deep; other numbers give other bits."""

    num_layers: int

    @property
    def form(self) -> ArrayForm:
        return ArrayForm("bfloat16", (self.num_layers, 2, CHUNK_TOKENS, 4, 64))

    @property
    def arrays(self) -> dict[str, ArrayForm]:
        """What a worker expects in a record, for `ColdStore.load`."""
        return {KV: self.form}

    def make(self, number: int) -> Array:
        bits = np.random.default_rng((SEED, number)).integers(0, 1 << 15, self.form.shape, np.uint16)
        return bits.view(DTYPES["bfloat16"])

    def put(self, cold: ColdStore, number: int, tier_names: Sequence[str]) -> RecordMeta:
        """Write a record as the workers and the scheduler side do."""
        meta = meta_of(number, size_bytes=self.form.num_bytes)
        entry, _ = cold.put_part(meta, 0, self.make(number), None)
        cold.publish(meta, [entry], tier_names)
        return meta


def seconds(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def percentile(times_s: Sequence[float], percent: float, unit_s: float) -> float:
    return float(np.percentile(times_s, percent)) / unit_s


@contextmanager
def closing_store(cold: ColdStore) -> Iterator[ColdStore]:
    try:
        yield cold
    finally:
        cold.close()


def made_request(
    dice: random.Random, num_chunks: int, strategy: str, chunk_tokens: int = CHUNK_TOKENS
) -> PlanRequest:
    """Stored chunks at random behind tokens that were never seen, so that nothing is exact."""
    config = CacheCraftConfig()
    numbers = dice.sample(range(num_chunks), REQUEST_CHUNKS)
    chunks = tuple(
        ChunkRef(
            Span(place * chunk_tokens, (place + 1) * chunk_tokens),
            chunk_key(number),
            digest("new prefix", number),
        )
        for place, number in enumerate(numbers)
    )
    return PlanRequest(
        num_tokens=(REQUEST_CHUNKS + 1) * chunk_tokens,
        chunks=chunks,
        strategy=strategy,
        alpha=config.alpha,
        share=config.share,
        granularity=config.granularity,
    )
