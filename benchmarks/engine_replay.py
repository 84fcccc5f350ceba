"""Requests at compressed arrival times through the real engine: full prefill, prefix caching, reuse.

    python -m benchmarks.engine_replay passages          ten passages a question, popularity of the trace
    python -m benchmarks.engine_replay ragpulse          300 requests of the RAGPulse trace
    python -m benchmarks.engine_replay passages --small  two minutes, to see that it works
    python -m benchmarks.engine_replay passages --ways ours ours-0 ours-g16 ours-one prefix-one
    python -m benchmarks.engine_replay report            docs/performance.md, this section and the others
    python -m benchmarks.engine_replay validation        measured.json for benchmarks.simulate_cluster

Prefix caching is always measured, and first: the moderate load follows from its capacity.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.common.facts import model_name, run_facts
from benchmarks.common.text_table import show
from benchmarks.engine_replay_parts.arrivals import KINDS
from benchmarks.engine_replay_parts.passages import PassagesShape, passages_workload
from benchmarks.engine_replay_parts.ragpulse import RagpulseShape, ragpulse_workload
from benchmarks.engine_replay_parts.record import RESULTS, RunRecord, WayRecord, read, save
from benchmarks.engine_replay_parts.run import Settings, run_ways
from benchmarks.engine_replay_parts.tables import all_tables, gain_sentence
from benchmarks.engine_replay_parts.texts import DATA, token_counter
from benchmarks.engine_replay_parts.validation import write_validation
from benchmarks.engine_replay_parts.ways import DEFAULT_WAYS, WAYS, chosen_ways
from benchmarks.engine_replay_parts.workload import Workload
from benchmarks.performance_parts.page import write_page
from rich.console import Console

from cachecraft_rag import default_model

SMALL_PASSAGES = PassagesShape(
    num_passages=4, passage_tokens=200, num_fill=2, num_warm_up=4, num_saturated=8, num_moderate=4
)
SMALL_RAGPULSE = RagpulseShape(scale=0.2, first=60, num_warm_up=6, num_saturated=16, num_moderate=4)


def make_workload(args: argparse.Namespace, model: str) -> tuple[Workload, dict[str, Any]]:
    """The requests, and the shape that they were made by."""
    count_tokens = token_counter(model)
    if args.what == "passages":
        shape = _changed(SMALL_PASSAGES if args.small else PassagesShape(), args)
        return passages_workload(args.data, count_tokens, shape), asdict(shape)
    trace = _changed(SMALL_RAGPULSE if args.small else RagpulseShape(), args)
    trace = trace if args.scale is None else replace(trace, scale=args.scale)
    return ragpulse_workload(args.data, count_tokens, trace), asdict(trace)


def run(args: argparse.Namespace, console: Console) -> None:
    model = str(args.model or default_model())
    ways = chosen_ways(args.ways)
    workload, shape = make_workload(args, model)
    engine_args = {
        "dtype": args.dtype,
        "max_model_len": 8192,
        "max_num_batched_tokens": args.step_tokens,
    }
    settings = Settings(model, engine_args, args.arrivals, args.overload, args.moderate_load)
    name = model_name(args.model)
    facts = {
        **run_facts("python -m benchmarks.engine_replay", name, engine_args),
        "settings": {"arrivals": args.arrivals, "overload": args.overload, "moderate": args.moderate_load},
        "workload": {**shape, **workload.facts},
    }
    folder = Path(tempfile.gettempdir()) if args.small else RESULTS
    target = args.json or folder / f"{workload.name}.json"
    done: list[WayRecord] = []
    for record in run_ways(workload, ways, settings, console.print):
        done.append(record)
        save(RunRecord(workload.name, facts, done), target)  # what was measured outlives a later failure
    record = RunRecord(workload.name, facts, done)
    show(all_tables(record), console)
    console.print(gain_sentence(record))
    console.print(f"written to {target}")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine_replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("passages", "ragpulse", "report", "validation"))
    parser.add_argument("--ways", nargs="+", default=DEFAULT_WAYS, metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--small", action="store_true", help="few short requests; results are not reported")
    parser.add_argument("--requests", type=int, help="measured requests of the saturating load")
    parser.add_argument("--moderate-requests", type=int, help="of the moderate load; 0 leaves it out")
    parser.add_argument("--scale", type=float, help="ragpulse: of all lengths")
    parser.add_argument("--arrivals", choices=KINDS, default="poisson", help="trace: ragpulse only")
    parser.add_argument("--overload", type=float, default=8.0, help="arrivals over full prefill's capacity")
    parser.add_argument("--moderate-load", type=float, default=0.7, help="over prefix caching's capacity")
    parser.add_argument("--step-tokens", type=int, default=2048, help="max_num_batched_tokens")
    parser.add_argument("--model", help="model folder; the default model if not given")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the sets with their load.py")
    parser.add_argument("--json", type=Path, help="file of the results")
    args = parser.parse_args(argv)
    if args.what == "passages" and args.arrivals == "trace":
        parser.error("--arrivals trace: the passages workload has no times of its own")
    return args


def _changed(shape: Any, args: argparse.Namespace) -> Any:
    wanted = {"num_saturated": args.requests, "num_moderate": args.moderate_requests}
    return replace(shape, **{name: value for name, value in wanted.items() if value is not None})


def main() -> None:
    args = arguments()
    if args.what == "report":
        write_page()
    elif args.what == "validation":
        write_validation(read(RESULTS / "ragpulse.json"), args.json or Path("measured.json"))
    else:
        run(args, Console(width=180))


if __name__ == "__main__":
    main()
