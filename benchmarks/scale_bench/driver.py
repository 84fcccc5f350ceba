"""What a request costs on the driver: known chunks found in its text, by size of the index."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial

from benchmarks.common.memory import resident_bytes
from benchmarks.scale_bench.measuring import SizeRow, Times, time_each
from benchmarks.scale_bench.texts import (
    SEED,
    chunk_of,
    prompt_of,
    text_behind_header,
    text_of,
    unknown_prompt,
)

from cachecraft_rag.chunks import Chunk
from cachecraft_rag.segments.known import KnownChunks
from cachecraft_rag.segments.prompt import PromptText

TENANT = "tenant"
REQUEST_CHUNKS = 10
BATCH = 1_000


def measure_driver(num_chunks: int, num_requests: int) -> list[SizeRow]:
    """Rows of one size; in a process of its own, as it reads the process's memory."""
    return [*_rows(num_chunks, num_requests, text_of, ("find", "find, passed", "find nothing", "add"))]


def measure_one_header(num_chunks: int, num_requests: int) -> list[SizeRow]:
    """`measure_driver` where all chunks begin with the same header, the matcher's worst case."""
    return [*_rows(num_chunks, num_requests, text_behind_header, ("find, one header",))]


def _rows(
    num_chunks: int, num_requests: int, text: Callable[[int], str], calls: Sequence[str]
) -> Iterator[SizeRow]:
    before = resident_bytes()
    known = filled(num_chunks, text)
    each = (resident_bytes() - before) / num_chunks
    for call in calls:
        times = _measure(call, known, num_chunks, num_requests, text)
        yield SizeRow(call, num_chunks, each, **asdict(times))


def filled(num_chunks: int, text: Callable[[int], str] = text_of) -> KnownChunks:
    known = KnownChunks(num_chunks)
    for first in range(0, num_chunks, BATCH):
        known.add(TENANT, [chunk_of(n, text) for n in range(first, min(first + BATCH, num_chunks))])
    return known


def _measure(
    call: str, known: KnownChunks, num_chunks: int, num_requests: int, text: Callable[[int], str]
) -> Times:
    dice = random.Random(SEED)
    requests = [_request(num_chunks, dice, text) for _ in range(num_requests)]
    if call == "add":  # each pushes out the least recently used
        return time_each(
            partial(known.add, TENANT, [chunk_of(num_chunks + n, text)]) for n in range(num_requests)
        )
    if call == "find nothing":
        return time_each(
            partial(_find, known, unknown_prompt(len(prompt.text), dice), (), 0) for prompt, _ in requests
        )
    is_passed = call == "find, passed"
    return time_each(
        partial(_find, known, prompt, chunks if is_passed else (), REQUEST_CHUNKS)
        for prompt, chunks in requests
    )


def _request(
    num_chunks: int, dice: random.Random, text: Callable[[int], str]
) -> tuple[PromptText, list[Chunk]]:
    chunks = [chunk_of(number, text) for number in dice.sample(range(num_chunks), REQUEST_CHUNKS)]
    return prompt_of(chunks, dice), chunks


def _find(known: KnownChunks, prompt: PromptText, passed: Sequence[Chunk], num_expected: int) -> None:
    assert len(known.find(TENANT, prompt, passed)) == num_expected
