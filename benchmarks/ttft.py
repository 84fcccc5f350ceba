"""Time to first token: full prefill against reuse, by context length, budget and granularity.

    python benchmarks/ttft.py                    the table of the README (default model, bfloat16)
    python benchmarks/ttft.py --contexts 5000 --repeats 3 --json ttft.json

Every figure is the median of `--repeats` calls of `chat()`, from the call to the first token, in one
run: the ways of answering take turns, each time over the same passages in another order. All chunks
are in the store and nothing comes from vLLM's own prefix cache (`read_prefix_cache=False`). Ratios
hold within this run; absolute times depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from cachecraft_rag import CacheCraftConfig, CacheCraftEngine, Chunk, default_model

PASSAGES = Path(__file__).parents[1] / "examples" / "data" / "passages.jsonl"
QUESTION = "Which of these passages speaks of a victory, and who won it?"
SYSTEM = "Answer from the passages in a few words."
SEED = 5


@dataclass(frozen=True)
class Way:
    """One way of answering; ratio None is full prefill."""

    name: str
    ratio: float | None
    granularity: int = 1
    strategy: str = "cachecraft"

    def options(self) -> dict[str, Any]:
        if self.ratio is None:
            return {"reuse": "off"}
        if self.ratio == 0:
            return {"reuse": "naive"}
        return {
            "reuse": self.strategy,
            "recompute_ratio": self.ratio,
            "granularity": self.granularity,
        }


def ways(ratios: Sequence[float], granularities: Sequence[int], strategy: str) -> list[Way]:
    found = [Way("full prefill", None), Way("reuse, 0 %", 0.0)]
    for ratio in ratios:
        found += [Way(f"reuse, {ratio:.0%}, runs of {g}", ratio, g, strategy) for g in granularities]
    return found


@dataclass(frozen=True)
class Row:
    """Medians of one way at one context length; `speedup` is against full prefill in this run."""

    context: int
    way: str
    num_prompt_tokens: int
    num_recomputed_tokens: int
    num_computed_tokens: int
    ttft_s: float
    min_ttft_s: float
    load_s: float
    recompute_s: float
    speedup: float = 1.0


def passages_for(context: int, engine: CacheCraftEngine, texts: Sequence[str]) -> list[Chunk]:
    """As many passages as fit `context` tokens; one call tells how long each of them is."""
    chunks = [Chunk(text, doc_id=f"passage-{index}") for index, text in enumerate(texts)]
    out = engine.chat(messages(chunks), chunks=chunks, max_tokens=1, reuse="off", store=False)
    room = context
    for index, report in enumerate(out.report.chunks):
        room -= report.num_tokens + 1
        if room < 0:
            return chunks[:index]
    raise SystemExit(f"the demo passages hold fewer than {context} tokens")


def messages(chunks: Sequence[Chunk]) -> list[dict[str, str]]:
    context = "\n\n".join(chunk.text for chunk in chunks)
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"{context}\n\n{QUESTION}"},
    ]


def measure(engine: CacheCraftEngine, way: Way, chunks: Sequence[Chunk], order: list[int]) -> Any:
    shuffled = [chunks[index] for index in order]
    out = engine.chat(
        messages(shuffled),
        chunks=shuffled,
        max_tokens=1,
        # Full prefill is vLLM's own: it must not pay for storing chunks.
        store=way.ratio is not None,
        read_prefix_cache=False,
        **way.options(),
    )
    return out.report


def measure_context(
    engine: CacheCraftEngine, context: int, chunks: list[Chunk], all_ways: list[Way], repeats: int
) -> Iterator[Row]:
    rng = random.Random(SEED)
    reports: dict[str, list[Any]] = {way.name: [] for way in all_ways}
    for repeat in track(range(repeats + 1), description=f"{context} tokens", transient=True):
        order = list(range(len(chunks)))
        rng.shuffle(order)
        for way in rng.sample(all_ways, len(all_ways)):
            report = measure(engine, way, chunks, order)
            if repeat:  # the first round warms up
                reports[way.name].append(report)
    full_s = statistics.median(report.ttft_s for report in reports[all_ways[0].name])
    for way in all_ways:
        yield _row(context, way, reports[way.name], full_s)


def _row(context: int, way: Way, reports: Sequence[Any], full_s: float) -> Row:
    def median(name: str) -> float:
        return statistics.median(getattr(report, name) for report in reports)

    return Row(
        context=context,
        way=way.name,
        num_prompt_tokens=reports[0].num_prompt_tokens,
        num_recomputed_tokens=int(median("num_recomputed_tokens")),
        num_computed_tokens=int(median("num_computed_tokens")),
        ttft_s=median("ttft_s"),
        min_ttft_s=min(report.ttft_s for report in reports),
        load_s=median("load_s"),
        recompute_s=median("recompute_s"),
        speedup=full_s / median("ttft_s"),
    )


def fill_store(engine: CacheCraftEngine, chunks: list[Chunk]) -> None:
    """Compute the chunks in two orders, as traffic would, so that each is stored in context."""
    for order in (chunks, chunks[::-1]):
        engine.chat(messages(order), chunks=order, max_tokens=1, read_prefix_cache=False, reuse="off")


def machine() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    return {"cpu": model, "cores": os.cpu_count(), "load_1min": os.getloadavg()[0]}


def show(rows: Sequence[Row], console: Console) -> None:
    table = Table("context", "way", "prompt", "recomputed", "computed", "TTFT", "min", "load", "pass", "×")
    for row in rows:
        table.add_row(
            str(row.context),
            row.way,
            str(row.num_prompt_tokens),
            str(row.num_recomputed_tokens),
            str(row.num_computed_tokens),
            f"{row.ttft_s:.3f} s",
            f"{row.min_ttft_s:.3f} s",
            f"{row.load_s:.3f}",
            f"{row.recompute_s:.3f}",
            f"{row.speedup:.1f}",
        )
    console.print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default=None, help="model folder; the default model if not given")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1000, 2000, 5000])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.15, 0.30])
    parser.add_argument("--granularities", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--strategy", default="cachecraft", help="focus asks the question first")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--compiled", action="store_true", help="torch.compile: 50 s more of start-up")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    console = Console(width=120)
    texts = [json.loads(line)["text"] for line in PASSAGES.read_text().splitlines()]
    rows: list[Row] = []
    with CacheCraftEngine(
        args.model or default_model(),
        config=CacheCraftConfig(),
        dtype=args.dtype,
        max_model_len=8192,
        max_num_batched_tokens=8192,
        enforce_eager=not args.compiled,
    ) as engine:
        for context in args.contexts:
            chunks = passages_for(context, engine, texts)
            fill_store(engine, chunks)
            all_ways = ways(args.ratios, args.granularities, args.strategy)
            rows += measure_context(engine, context, chunks, all_ways, args.repeats)
    console.print(f"model {args.model or 'default'}, {args.dtype}, {machine()}, {args.repeats} repeats")
    show(rows, console)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "rows": [asdict(r) for r in rows]}, indent=1))


if __name__ == "__main__":
    main()
