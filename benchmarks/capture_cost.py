"""What storing chunks costs the cold prefill that computes them: the copies, and the attention profile.

    python -m benchmarks.capture_cost                      the table of docs/soak.md
    python -m benchmarks.capture_cost --contexts 1000 --repeats 3 --json capture_cost.json

One engine profiles attention on the default number of layers, one on none. Each answers the same
prompts by full compute with `store` off and on, in turns and in one run; what is stored is purged
after each call. Costs are shares of the time to first token, as means with 95 % bootstrap intervals
over pairs of neighbouring calls.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.common.facts import machine
from benchmarks.common.prompts import demo_texts, messages, passages_for
from benchmarks.engine_replay_parts.texts import token_counter
from benchmarks.quality.stats import Estimate, bootstrap_mean
from rich.console import Console
from rich.table import Table

from cachecraft_rag import CacheCraftConfig, CacheCraftEngine, Chunk, default_model

SEED = 5
TENANT = "capture"
MAX_CAPTURE, MAX_PROFILE = 0.03, 0.10


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt length. `capture` and `profile` are shares of the prefill that stores nothing, and
    `profile` is what the profiling engine pays beyond the other."""

    context: int
    num_prompt_tokens: int
    num_stored_tokens: int
    ttft_s: float
    capture: Estimate
    profile: Estimate


@dataclass(frozen=True, slots=True)
class Pair:
    """Time to first token of the same prompt, storing nothing and storing all."""

    plain_s: float
    stored_s: float
    num_prompt_tokens: int
    num_stored_tokens: int

    @property
    def cost(self) -> float:
        return self.stored_s / self.plain_s - 1


def make_engine(args: argparse.Namespace, num_profile_layers: int) -> CacheCraftEngine:
    # Nothing but the calls themselves: no samples asked again, no test at the start.
    config = CacheCraftConfig(
        num_profile_layers=num_profile_layers, host_store_bytes=2 << 30, feedback_share=0.0, self_test=False
    )
    return CacheCraftEngine(
        args.model or default_model(),
        config=config,
        dtype=args.dtype,
        max_model_len=8192,
        max_num_batched_tokens=args.step_tokens,
    )


def measure_pair(engine: CacheCraftEngine, chunks: Sequence[Chunk], is_plain_first: bool) -> Pair:
    reports = {}
    for store in (False, True) if is_plain_first else (True, False):
        reports[store] = engine.chat(
            messages(chunks),
            chunks=chunks,
            max_tokens=1,
            tenant=TENANT,
            reuse="off",
            store=store,
            read_prefix_cache=False,
        ).report
        engine.purge(TENANT)
    plain, stored = reports[False], reports[True]
    return Pair(plain.ttft_s, stored.ttft_s, plain.num_prompt_tokens, stored.num_stored_tokens)


def measure(engines: Sequence[CacheCraftEngine], context: int, chunks: Sequence[Chunk], repeats: int) -> Row:
    """Rounds of one pair of each engine, in changing order; the first warms up."""
    rng = random.Random(SEED)
    pairs: list[list[Pair]] = [[] for _ in engines]
    for number in range(repeats + 1):
        order = rng.sample(chunks, len(chunks))
        for place in rng.sample(range(len(engines)), len(engines)):
            pair = measure_pair(engines[place], order, rng.random() < 0.5)
            if number:
                pairs[place].append(pair)
    bare, profiling = pairs
    return Row(
        context=context,
        num_prompt_tokens=bare[0].num_prompt_tokens,
        num_stored_tokens=bare[0].num_stored_tokens,
        ttft_s=sum(pair.plain_s for pair in bare) / len(bare),
        capture=bootstrap_mean([[pair.cost for pair in bare]]),
        profile=bootstrap_mean(
            [[with_it.cost - without.cost for without, with_it in zip(bare, profiling, strict=True)]]
        ),
    )


def measure_all(args: argparse.Namespace) -> Iterator[Row]:
    count = token_counter(args.model or default_model())
    default = CacheCraftConfig().num_profile_layers
    with make_engine(args, 0) as bare, make_engine(args, default) as profiling:
        for context in args.contexts:
            chunks = passages_for(context, count, demo_texts())
            yield measure((bare, profiling), context, chunks, args.repeats)


def show(rows: Sequence[Row], console: Console) -> None:
    table = Table("context", "prompt", "stored", "TTFT", "capture", "profile")
    for row in rows:
        table.add_row(
            str(row.context),
            str(row.num_prompt_tokens),
            str(row.num_stored_tokens),
            f"{row.ttft_s:.3f} s",
            f"{row.capture:.1%}",
            f"{row.profile:.1%}",
        )
    console.print(table)
    console.print(f"aims: capture at most {MAX_CAPTURE:.0%}, profile at most {MAX_PROFILE:.0%}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.capture_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=None, help="model folder; the default model if not given")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1000, 2000, 5000])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--step-tokens", type=int, default=8192)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    console = Console(width=120)
    rows = list(measure_all(args))
    console.print(f"model {args.model or 'default'}, {args.dtype}, {machine()}, {args.repeats} repeats")
    show(rows, console)
    if args.json:
        args.json.write_text(
            json.dumps({"machine": machine(), "rows": [asdict(row) for row in rows]}, indent=1)
        )


if __name__ == "__main__":
    main()
