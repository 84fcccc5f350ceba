"""Larger GPUs and clusters, simulated: full prefill, prefix caching and chunk reuse on the RAGPulse trace.

    python -m benchmarks.simulate_cluster                           under a minute; always the same
    python -m benchmarks.simulate_cluster assumptions               every rate and where it comes from
    python -m benchmarks.simulate_cluster validate RATES MEASURED   beside a replay on one machine

RATES is a JSON object with the fields of `cluster_sim.assumptions.Assumptions`; for MEASURED see
`cluster_sim.validate.validate`. Arrivals are as many times what full compute can prefill as --loads says.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.cluster_sim.assumptions import read_assumptions
from benchmarks.cluster_sim.profiles import PROFILES
from benchmarks.cluster_sim.run import ClusterRow, full_capacity, measure
from benchmarks.cluster_sim.validate import validate
from benchmarks.cluster_sim.ways import Way
from benchmarks.cluster_sim.workload import at_rate, ragpulse_requests
from benchmarks.common.parts import table
from rich.console import Console

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
NUM_WARM_UP = 1_000
WIDTH = 190


def ways(budgets: Sequence[float]) -> list[Way]:
    found = [Way("full", has_prefix_cache=False), Way("prefix")]
    for budget in budgets:
        found += [
            Way(f"reuse {budget:.0%}", budget=budget),
            Way(f"reuse {budget:.0%}, Redis", budget=budget, is_shared=True),
        ]
    return found


def run(args: argparse.Namespace) -> list[ClusterRow]:
    requests = ragpulse_requests(args.data)
    rows = []
    for name in args.machines:
        assumed = PROFILES[name]
        for num_engines in args.engines:
            capacity = full_capacity(requests, assumed, num_engines)
            for load in args.loads:
                sent = at_rate(requests, load * capacity)
                rows += [measure(sent, assumed, way, num_engines, NUM_WARM_UP) for way in ways(args.budgets)]
    return rows


def sources() -> list[dict[str, Any]]:
    return [
        {"machine": each.name, "figure": name, "value": getattr(each, name), "source": source}
        for each in PROFILES.values()
        for name, source in each.sources.items()
    ]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulate_cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the trace")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    parser.add_argument("--machines", nargs="+", choices=PROFILES, default=list(PROFILES))
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8, 2.0])
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.15, 0.3])
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("assumptions", help="every rate and where it comes from")
    compared = commands.add_parser("validate", help="beside a replay on one machine")
    compared.add_argument("rates", type=Path)
    compared.add_argument("measured", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    console = Console(width=WIDTH)
    if args.command == "assumptions":
        for row in sources():
            console.print(f"{row['machine']} {row['figure']}: {row['value']:.6g}  ({row['source']})")
        return
    if args.command == "validate":
        requests = ragpulse_requests(args.data)
        rows: Sequence[Any] = validate(requests, read_assumptions(args.rates), args.measured)
        title = "simulated beside measured"
    else:
        rows, title = run(args), "RAGPulse on simulated clusters"
    console.print(table(title, rows))
    if args.json:
        found = {"rows": [asdict(row) for row in rows], "assumptions": sources()}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
