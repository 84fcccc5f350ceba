"""What decoding requests notice of a long prompt beside them, and what pieces cost that prompt.

    python -m benchmarks.stall                       the table of docs/performance.md
    python -m benchmarks.stall --repeats 5 --json stall.json

Two requests decode while a third with a long prompt arrives, at `--step-tokens` tokens a step: the
longest time between two of their tokens until it has its first, and its time to first token, for
vLLM's own chunked prefill and for reuse. Then the same prompt alone at 8192 tokens a step, where
nothing has to be cut, and several such prompts at once against one after the other. All chunks are in
the store and nothing comes from vLLM's own prefix cache. Ratios hold within this run.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.facts import model_name, run_facts
from benchmarks.common.prompts import demo_texts, fill_store, messages, passages_for
from benchmarks.common.text_table import show
from benchmarks.engine_replay_parts.texts import token_counter
from benchmarks.stall_parts.record import FULL, RESULT, Row, StallRecord, save
from benchmarks.stall_parts.tables import all_tables
from rich.console import Console

from cachecraft_rag import CacheCraftConfig, CacheCraftEngine, Chunk, default_model

SEED = 5
WHOLE_STEP_TOKENS = 8192
NUM_DECODING = 2
DECODE_TOKENS = 200
TOKENS_BEFORE = 10
"""Tokens that each decoding request has produced when the long prompt arrives."""
WAYS: dict[str, dict[str, Any]] = {
    FULL: {"reuse": "off", "store": False},
    "reuse, 0 %": {"reuse": "naive"},
    "reuse, 15 %": {"reuse": "cachecraft", "recompute_ratio": 0.15},
    "focus, 15 %": {"reuse": "focus", "recompute_ratio": 0.15},
}


class Prompts:
    """The same passages in ever new orders."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = list(chunks)
        self._rng = random.Random(SEED)

    def next(self) -> list[Chunk]:
        return self._rng.sample(self._chunks, len(self._chunks))


async def first_token_s(engine: CacheCraftEngine, chunks: list[Chunk], way: str) -> float:
    began = time.perf_counter()
    await engine.achat(messages(chunks), chunks=chunks, max_tokens=1, read_prefix_cache=False, **WAYS[way])
    return time.perf_counter() - began


async def decode(engine: CacheCraftEngine, name: str, times: list[float]) -> None:
    question = [{"role": "user", "content": f"Tell a long story about {name}."}]
    options = {"max_tokens": DECODE_TOKENS, "ignore_eos": True, "reuse": "off", "store": False}
    async for delta in engine.astream_chat(question, **options):
        times.extend([time.perf_counter()] * len(delta.token_ids))


def longest_gap(times: Sequence[float], start: float, end: float) -> float:
    """Between neighbours of which at least one lies in [start, end]."""
    pairs = itertools.pairwise(times)
    return max((b - a for a, b in pairs if b >= start and a <= end), default=0.0)


async def beside_decoding(
    engine: CacheCraftEngine, chunks: list[Chunk], way: str
) -> tuple[float, float, float]:
    """Longest gap with the prompt, longest gap before it, and the prompt's time to first token."""
    times: list[list[float]] = [[] for _ in range(NUM_DECODING)]
    decoding = [
        asyncio.ensure_future(decode(engine, f"river {index}", own)) for index, own in enumerate(times)
    ]
    while any(len(own) < TOKENS_BEFORE for own in times):
        await asyncio.sleep(0.001)
    start = time.perf_counter()
    ttft_s = await first_token_s(engine, chunks, way)
    end = time.perf_counter()
    if any(task.done() for task in decoding):
        raise SystemExit(f"{way}: a decoding request ended before the prompt had its first token")
    for task in decoding:
        task.cancel()
    await asyncio.gather(*decoding, return_exceptions=True)
    gap_s = max(longest_gap(own, start, end) for own in times)
    before_s = max(longest_gap(own, own[2], start - 1e-9) for own in times)
    return gap_s, before_s, ttft_s


def measure_pieces(engine: CacheCraftEngine, prompts: Prompts, repeats: int) -> Iterator[Row]:
    for way in WAYS:
        beside = [asyncio.run(beside_decoding(engine, prompts.next(), way)) for _ in range(repeats)]
        alone = [asyncio.run(first_token_s(engine, prompts.next(), way)) for _ in range(repeats)]
        gap_s, before_s, ttft_s = (statistics.median(column) for column in zip(*beside, strict=True))
        yield Row(way, gap_s, before_s, ttft_s, statistics.median(alone))


async def all_at_once(engine: CacheCraftEngine, all_chunks: list[list[Chunk]], way: str) -> float:
    began = time.perf_counter()
    await asyncio.gather(*(first_token_s(engine, chunks, way) for chunks in all_chunks))
    return time.perf_counter() - began


def measure_whole(
    engine: CacheCraftEngine, prompts: Prompts, repeats: int, num_together: int, way: str
) -> dict[str, float]:
    alone, together, in_turn = [], [], []
    for _ in range(repeats):
        alone.append(asyncio.run(first_token_s(engine, prompts.next(), way)))
        together.append(asyncio.run(all_at_once(engine, [prompts.next() for _ in range(num_together)], way)))
        began = time.perf_counter()
        for _ in range(num_together):
            asyncio.run(first_token_s(engine, prompts.next(), way))
        in_turn.append(time.perf_counter() - began)
    columns = {"whole_ttft_s": alone, "together_s": together, "in_turn_s": in_turn}
    return {name: statistics.median(values) for name, values in columns.items()}


def open_engine(args: argparse.Namespace, step_tokens: int) -> CacheCraftEngine:
    return CacheCraftEngine(
        args.model or default_model(),
        config=CacheCraftConfig(),
        dtype=args.dtype,
        max_model_len=8192,
        max_num_batched_tokens=step_tokens,
        enforce_eager=True,
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default=None, help="model folder; the default model if not given")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=5000)
    parser.add_argument("--step-tokens", type=int, default=512)
    parser.add_argument("--together", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--json", type=Path, default=RESULT, help="file of the results, by default the page's"
    )
    return parser.parse_args()


def main() -> None:
    args = arguments()
    console = Console(width=130)
    model = args.model or default_model()
    name = model_name(args.model)
    chunks = passages_for(args.context, token_counter(model), demo_texts())
    engine_args = {"dtype": args.dtype, "max_num_batched_tokens": args.step_tokens}
    facts = run_facts("python -m benchmarks.stall", name, engine_args)
    rows = []
    with open_engine(args, args.step_tokens) as engine:
        fill_store(engine, chunks)
        prompts = Prompts(chunks)
        asyncio.run(first_token_s(engine, prompts.next(), "reuse, 15 %"))  # warms up
        for row in measure_pieces(engine, prompts, args.repeats):
            console.print(row)
            rows.append(row)
    with open_engine(args, WHOLE_STEP_TOKENS) as engine:
        fill_store(engine, chunks)
        for index, row in enumerate(rows):
            if row.way == FULL:
                continue
            whole = measure_whole(engine, prompts, args.repeats, args.together, row.way)
            rows[index] = replace(row, **whole)
            console.print(rows[index])
    settings = {name: getattr(args, name) for name in ("context", "step_tokens", "together", "repeats")}
    record = StallRecord(facts, settings, rows)
    show(all_tables(record), console)
    save(record, args.json)
    console.print(f"{facts['machine']}; written to {args.json}")


if __name__ == "__main__":
    main()
