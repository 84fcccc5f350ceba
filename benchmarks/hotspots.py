"""Where a request's time goes outside of vLLM: our functions by their share of it.

    python -m benchmarks.hotspots                    about two minutes on an idle machine
    python -m benchmarks.hotspots --context 1000 --requests 5

The default model, vLLM inside this process, one request after the other; cold ones that store their
chunks and hot ones that reuse them, each under a sampling profiler. Shares are of the time during which
requests ran, what the function had torch do included. The exit code is 1 where one is above 5 %.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence

from benchmarks.common.facts import machine
from benchmarks.common.prompts import demo_texts, messages, passages_for
from benchmarks.engine_replay_parts.texts import token_counter
from benchmarks.soak_parts.sampling import VLLM, Sampler
from rich.console import Console
from rich.table import Table

from cachecraft_rag import CacheCraftConfig, CacheCraftEngine, Chunk, default_model

SEED = 5
MAX_SHARE = 0.05
MIN_SHOWN = 0.002
MAX_TOKENS = 16


def profile_cold(engine: CacheCraftEngine, orders: Sequence[list[Chunk]]) -> Sampler:
    sampler = Sampler()
    for chunks in orders:
        with sampler.running():
            ask(engine, chunks, "off")
        engine.purge()
    return sampler


def profile_hot(engine: CacheCraftEngine, orders: Sequence[list[Chunk]]) -> Sampler:
    for chunks in orders[:2]:
        ask(engine, chunks, "off")
    sampler = Sampler()
    for chunks in orders:
        with sampler.running():
            ask(engine, chunks, "auto")
    return sampler


def ask(engine: CacheCraftEngine, chunks: Sequence[Chunk], reuse: str) -> None:
    engine.chat(
        messages(chunks),
        chunks=chunks,
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        reuse=reuse,
        read_prefix_cache=False,
    )


def show(title: str, sampler: Sampler, console: Console) -> bool:
    """Whether no function of ours is above the limit."""
    table = Table("function", "share", title=f"{title}: {sampler.num_samples} samples")
    ours = [(owner, share) for owner, share in sampler.shares() if owner != VLLM]
    table.add_row("vLLM", f"{dict(sampler.shares()).get(VLLM, 0.0):.1%}")
    for owner, share in ours:
        if share >= MIN_SHOWN:
            table.add_row(owner, f"{share:.1%}")
    console.print(table)
    return all(share <= MAX_SHARE for _, share in ours)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hotspots",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=None, help="model folder; the default model if not given")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=15)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    console = Console(width=120)
    model = args.model or default_model()
    chunks = passages_for(args.context, token_counter(model), demo_texts())
    config = CacheCraftConfig(host_store_bytes=2 << 30, feedback_share=0.0, self_test=False)
    with CacheCraftEngine(
        model,
        config=config,
        in_process=True,
        dtype=args.dtype,
        max_model_len=8192,
        max_num_batched_tokens=8192,
    ) as engine:
        rng = random.Random(SEED)
        orders = [rng.sample(chunks, len(chunks)) for _ in range(args.requests)]
        cold, hot = profile_cold(engine, orders), profile_hot(engine, orders)
    console.print(f"model {args.model or 'default'}, {args.dtype}, {args.context} tokens, {machine()}")
    verdicts = [show("cold", cold, console), show("hot", hot, console)]
    if not all(verdicts):
        sys.exit(1)


if __name__ == "__main__":
    main()
