"""Planner, index and store alone, by number of indexed chunks and of threads. The tables of docs/scale.md.

    python -m benchmarks.scale                                  some minutes; 5 GB of memory
    python -m benchmarks.scale --parts scheduler --sizes 1000 1000000 --json scale.json

No model takes part, and stored KV is faked by its size. Each row is measured in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common.parts import WIDTH, Part, measure_parts
from benchmarks.scale_bench.driver import measure_driver, measure_one_header
from benchmarks.scale_bench.pauses import measure_pauses
from benchmarks.scale_bench.request_path import measure_request_path
from benchmarks.scale_bench.scheduler import measure_scheduler
from benchmarks.scale_bench.threads import measure_threads
from rich.console import Console

SIZES = (1_000, 10_000, 100_000, 1_000_000)
THREADS = (1, 2, 4, 8, 16, 32, 64)
THREADS_SIZE = 100_000


def parts(args: argparse.Namespace) -> list[Part]:
    by_size = [(size, args.requests) for size in args.sizes]
    return [
        Part("driver", "driver: a prompt with 10 of the known chunks", _each(measure_driver, by_size)),
        Part("header", "driver: all chunks behind one header", _each(measure_one_header, by_size)),
        Part(
            "scheduler",
            "scheduler side: a request of 10 chunks; aim: look-up and plan under 1,000 µs",
            _each(measure_scheduler, by_size),
        ),
        Part(
            "threads",
            "driver: find and layout in a pool of threads",
            _each(measure_threads, [(n, THREADS_SIZE, args.requests) for n in args.threads]),
        ),
        Part(
            "pauses",
            "garbage collection over a filled index",
            _each(measure_pauses, [(size,) for size in args.sizes]),
        ),
        Part(
            "request_path",
            "one request of 20 chunks and 5,000 tokens, step by step",
            _each(measure_request_path, [(args.requests,)]),
        ),
    ]


def _each(measure: Callable[..., Any], arguments: Sequence[tuple[int, ...]]) -> Callable[[], list[Any]]:
    """Calls `measure` with each of the arguments in turn, each time in a process of its own."""

    def rows() -> list[Any]:
        found: list[Any] = []
        for each in arguments:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                measured = pool.submit(measure, *each).result()
            found += measured if isinstance(measured, list) else [measured]
        return found

    return rows


def commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="indexed chunks")
    parser.add_argument("--threads", type=int, nargs="+", default=THREADS, help="threads of the driver")
    parser.add_argument("--requests", type=int, default=1_000, help="calls for each row")
    parser.add_argument("--parts", nargs="+", help="tables to make; all if not given")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    console = Console(width=WIDTH)
    found: dict[str, Any] = {
        "machine": platform.platform(),
        "python": platform.python_version(),
        "commit": commit(),
    }
    chosen = [part for part in parts(args) if not args.parts or part.name in args.parts]
    found |= measure_parts(chosen, console)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
