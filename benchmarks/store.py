"""What the store costs: look-ups and plans, loads, bytes and memory. The tables of docs/store-benchmark.md.

    python -m benchmarks.store                           about a minute on an idle core
    python -m benchmarks.store --chunks 1000000 --json store.json

No model takes part. Parts with Redis start a `redis-server` of their own and are left out where there is
none.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

from benchmarks.common.parts import WIDTH, Part, measure_parts
from benchmarks.store_bench.bandwidth import measure_bandwidth
from benchmarks.store_bench.budget import measure_budgets
from benchmarks.store_bench.growth import measure_growth
from benchmarks.store_bench.lookup import measure_finds, measure_lookups
from benchmarks.store_bench.places import Places, open_places
from benchmarks.store_bench.precision import measure_codecs
from rich.console import Console

SMALLER_SIZES = (1_000, 10_000)
COLD_SIZES = (200, 2_000)


def parts(args: argparse.Namespace, places: Places) -> list[Part]:
    sizes = sorted({*SMALLER_SIZES, args.chunks})
    return [
        Part(
            "lookup",
            "look-up (host tier) and plan of a request of 10 chunks; aim: plan under 1,000 µs",
            lambda: measure_lookups(sizes, args.requests),
        ),
        Part(
            "find",
            "look-up of one chunk in the cold tiers, on a side thread",
            lambda: measure_finds(places, COLD_SIZES, args.finds),
        ),
        Part(
            "bandwidth",
            "load of 2 MiB records beside the plain operation on the same bytes; aim: share ≥ 0.7",
            lambda: measure_bandwidth(places, args.rounds),
        ),
        Part("codecs", "bytes and added error by codec, made-up KV", measure_codecs),
        Part(
            "budget",
            "records and index against the budget, while three times as much is put; aim: never above 1",
            lambda: measure_budgets(places),
        ),
        Part(
            "growth",
            "growth of resident memory over an empty store",
            lambda: measure_growth(places, args.chunks, args.loads),
        ),
    ]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.store",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--chunks", type=int, default=100_000, help="chunks indexed, at least 10")
    parser.add_argument("--requests", type=int, default=1_000, help="requests for each row of look-ups")
    parser.add_argument("--finds", type=int, default=300, help="look-ups for each row of the cold tiers")
    parser.add_argument("--rounds", type=int, default=10, help="loads of each record")
    parser.add_argument("--loads", type=int, default=10_000, help="loads over which memory is watched")
    parser.add_argument("--dir", type=Path, help="where the disk tier lies; a tmpfs is no disk")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    console = Console(width=WIDTH)
    found: dict[str, Any] = {"machine": platform.platform(), "python": platform.python_version()}
    with open_places(args.dir) as places:
        if places.no_redis:
            console.print(f"Redis is left out: {places.no_redis}")
        found |= measure_parts(parts(args, places), console)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
