"""The driver's work in a pool of threads: finding chunks and laying out the prompt."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from benchmarks.scale_bench.driver import REQUEST_CHUNKS, TENANT, filled
from benchmarks.scale_bench.measuring import NUM_WARM_UP
from benchmarks.scale_bench.texts import SEED, chunk_of, prompt_of

from cachecraft_rag.segments.known import KnownChunks
from cachecraft_rag.segments.layout import build_layout
from cachecraft_rag.segments.prompt import PromptText

NAMESPACE = "model"
CHARS_PER_TOKEN = 4
MS = 1e-3


@dataclass(frozen=True, slots=True)
class ThreadsRow:
    """A pool that is never idle, so `p50_ms` holds what a call waits for the interpreter's lock."""

    num_threads: int
    num_chunks: int
    requests_per_s: float
    p50_ms: float
    p99_ms: float


class WordlessTokenizer:
    """Ids of four characters each, remembered for chunks as `SegmentTokenizer` does.

    Tokenising itself is the tokenizer's own code, in Rust, and not what is measured here.
    """

    bos_ids = (1,)

    def __init__(self) -> None:
        self._cached = lru_cache(4096)(self.encode_text)

    def encode_text(self, text: str) -> tuple[int, ...]:
        raw = text.encode("ascii").ljust(-(-len(text) // CHARS_PER_TOKEN) * CHARS_PER_TOKEN)
        return tuple((np.frombuffer(raw, np.uint32) % 49_152).tolist())

    def encode_chunk(self, text: str, *, remember: bool = True) -> tuple[int, ...]:
        return self._cached(text) if remember else self.encode_text(text)


def measure_threads(num_threads: int, num_chunks: int, num_requests: int) -> ThreadsRow:
    known, tokenizer = filled(num_chunks), WordlessTokenizer()
    dice = random.Random(SEED)
    prompts = [
        prompt_of([chunk_of(n) for n in dice.sample(range(num_chunks), REQUEST_CHUNKS)], dice)
        for _ in range(num_requests)
    ]

    def prepare(prompt: PromptText) -> float:
        start_s = time.perf_counter()
        _prepare(known, tokenizer, prompt)
        return time.perf_counter() - start_s

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(prepare, prompts[:NUM_WARM_UP]))
        start_s = time.perf_counter()
        times_s = list(pool.map(prepare, prompts))
        wall_s = time.perf_counter() - start_s
    p50_ms, p99_ms = np.percentile(times_s, (50, 99)) / MS
    return ThreadsRow(num_threads, num_chunks, num_requests / wall_s, float(p50_ms), float(p99_ms))


def _prepare(known: KnownChunks, tokenizer: WordlessTokenizer, prompt: PromptText) -> None:
    matches = known.find(TENANT, prompt)
    layout = build_layout(prompt.text, matches, tokenizer, NAMESPACE)  # type: ignore[arg-type]
    assert len(layout.chunks) == REQUEST_CHUNKS
