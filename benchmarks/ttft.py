"""Time to first token: full prefill, vLLM's prefix caching and reuse, by context length and budget.

    python benchmarks/ttft.py                                   1k to 7k tokens, default model
    python benchmarks/ttft.py --model gemma3 --contexts 16000   one long context
    python benchmarks/ttft.py --contexts 600 --repeats 1 --json ttft.json    to see that it works

Every figure is the median of `--repeats` calls, from the call to the first token, in one run: the ways take
turns, each time over the same passages in another order. All chunks are in the store. Prefix caching finds
the system prompt, as the passages stand in another order than before; `prefix-same` is its best case.
More `--strategies` put more ways into the frontier of quality against time.
Ratios hold within this run; absolute times depend on what else the machine does. Results are kept by
context, so that a slow machine can measure one at a time; `python -m benchmarks.performance report` makes
the page of them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# Run as a file, Python looks for imports beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.facts import run_facts
from benchmarks.common.prompts import all_texts, passages_for
from benchmarks.common.text_table import show
from benchmarks.engine_replay_parts.texts import DATA, CountTokens, token_counter
from benchmarks.quality.models import MODELS, QaModel
from benchmarks.ttft_parts.estimate import PROBE_TOKENS, ModelSize, estimate_s
from benchmarks.ttft_parts.measure import Asker, check_orders, measure
from benchmarks.ttft_parts.record import RESULTS, Point, add_point, read
from benchmarks.ttft_parts.tables import detail_table, summary_tables
from benchmarks.ttft_parts.ways import Way, make_ways
from rich.console import Console

from cachecraft_rag import CacheCraftConfig, CacheCraftEngine

BUDGETS = (0.0, 0.05, 0.15, 0.30, 0.50, 1.0)
NOT_PASSAGES = 1024
"""Tokens left for the preamble and the question."""


def arguments() -> argparse.Namespace:
    default = CacheCraftConfig()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=tuple(MODELS), default="default")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1000, 2000, 5000, 7000])
    parser.add_argument("--ratios", type=float, nargs="+", default=BUDGETS, help="budgets, in [0, 1]")
    parser.add_argument(
        "--granularities",
        type=int,
        nargs="+",
        default=list(dict.fromkeys((default.granularity, 1, 4, 16))),
        help="runs of tokens; all but the first at 15 and 30 %% only",
    )
    parser.add_argument("--strategies", nargs="+", default=[default.strategy])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compiled", action="store_true", help="torch.compile: 50 s more of start-up")
    parser.add_argument("--data", type=Path, default=DATA, help="corpora, for more than the demo's passages")
    parser.add_argument("--json", type=Path, help="file of the results, by default the page's")
    return parser.parse_args()


def announce(
    asker: Asker, count: CountTokens, ways: list[Way], args: argparse.Namespace, console: Console
) -> None:
    """Say how long this will take, judging by one short prefill."""
    passages = passages_for(PROBE_TOKENS, count, all_texts(args.data))
    # The second call: the first pays for what a process does once.
    asker.ask(passages, reuse="off", store=False, read_prefix_cache=False)
    probe = asker.ask(passages, reuse="off", store=False, read_prefix_cache=False)
    size = ModelSize.read(asker.model.folder())
    seconds = estimate_s(size, args.contexts, ways, args.repeats, (probe.num_prompt, probe.ttft_s))
    num_calls = args.repeats * len(ways) * len(args.contexts)
    console.print(f"{num_calls} measured calls: about {seconds / 60:.1f} minutes")


def open_engine(model: QaModel, engine_args: dict[str, object]) -> CacheCraftEngine:
    # Feedback answers again in idle time, beside what is measured.
    return CacheCraftEngine(model.folder(), config=CacheCraftConfig(feedback_share=0.0), **engine_args)


def main() -> None:
    args = arguments()
    console = Console(width=170)
    model = MODELS[args.model]
    room = max(args.contexts) + NOT_PASSAGES
    engine_args = {
        "dtype": args.dtype,
        "max_model_len": room,
        "max_num_batched_tokens": room,
        "enforce_eager": not args.compiled,
    }
    facts = run_facts("python benchmarks/ttft.py", model.label, engine_args)
    target = args.json or RESULTS / f"{args.model}-{args.dtype}.json"
    ways = make_ways(args.strategies, args.ratios, args.granularities)
    count = token_counter(model.folder())
    prompts = {context: passages_for(context, count, all_texts(args.data)) for context in args.contexts}
    check_orders(prompts.values())
    with open_engine(model, engine_args) as engine:
        asker = Asker(engine, model)
        announce(asker, count, ways, args, console)
        for context, passages in prompts.items():
            measured = measure(asker, passages, ways, args.repeats, f"{context} tokens")
            point = Point(context, facts, measured)
            add_point(target, point)  # what was measured outlives a later failure
            show([detail_table(point)], console)
    points = read(target)
    show(summary_tables(points), console)
    console.print(f"{model.label}, {args.dtype}, {facts['machine']}; written to {target}")


if __name__ == "__main__":
    main()
