"""Hit rates of a chunk cache by policy, admission and size, from request traces and without a model.

    python -m benchmarks.store_replay                        the tables of docs/policies.md
    python -m benchmarks.store_replay --shares 0.1 --json replay.json

Sizes are shares of a trace's distinct tokens. Nothing here is timed, and every run gives the same.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.replay.optimum import belady, upper_bound
from benchmarks.replay.simulate import Rates, replay
from benchmarks.replay.traces import Trace, mooncake, ragpulse
from rich.console import Console
from rich.progress import track
from rich.table import Table

from cachecraft_rag.store.policies import DEFAULT_POLICY, POLICIES, Policy, with_ttl

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
SHARES = (0.02, 0.05, 0.1, 0.2, 0.4)
TTLS_H = (1, 24)


@dataclass(frozen=True, slots=True)
class Way:
    """A way to fill a cache: how often newcomers were turned away comes with its rates."""

    name: str
    admission: bool
    run: Callable[[Trace, int], tuple[Rates, int]]


@dataclass(frozen=True, slots=True)
class Row:
    """One way at one size; `tokens`, `chunks` and `work` are shares of the trace served."""

    trace: str
    way: str
    admission: bool
    share: float
    capacity_tokens: int
    num_rejected: int
    tokens: float
    chunks: float
    work: float

    @property
    def cell(self) -> str:
        return "/".join(f"{100 * rate:.1f}" for rate in (self.tokens, self.chunks, self.work))


def ways(trace: Trace) -> Iterator[Way]:
    for name, policy in POLICIES.items():
        for admission in (False, True):
            yield _policy_way(name, policy, admission)
    for hours in TTLS_H:
        if hours * 3600 < trace.duration_s:
            name = f"{DEFAULT_POLICY}, TTL {hours} h"
            yield _policy_way(name, with_ttl(POLICIES[DEFAULT_POLICY], hours * 3600), True)
    yield Way("Belady, farthest next use", False, lambda trace, capacity: (belady(trace, capacity), 0))
    yield Way("upper bound (PFOO-L)", False, lambda trace, capacity: (upper_bound(trace, capacity), 0))


def measure(trace: Trace, way: Way, share: float) -> Row:
    capacity = int(share * trace.distinct_tokens)
    rates, num_rejected = way.run(trace, capacity)
    return Row(trace.name, way.name, way.admission, share, capacity, num_rejected, **asdict(rates))


def table(trace: Trace, rows: Sequence[Row], shares: Sequence[float]) -> Table:
    found = Table(title=f"{trace.name}: % of tokens/chunks/work served, by size of the cache")
    found.add_column("policy")
    found.add_column("admission")
    for share in shares:
        found.add_column(f"{share:.0%}", justify="right")
    for first in range(0, len(rows), len(shares)):
        group = rows[first : first + len(shares)]
        found.add_row(group[0].way, "on" if group[0].admission else "", *(row.cell for row in group))
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store_replay", description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the traces")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="sizes of the cache")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    # Wide, so that cells stay whole where the output is no terminal.
    console = Console(width=130)
    found: list[Row] = []
    for trace in (ragpulse(args.data), mooncake(args.data)):
        jobs = [(way, share) for way in ways(trace) for share in args.shares]
        steps = track(jobs, description=trace.name, transient=True)
        rows = [measure(trace, way, share) for way, share in steps]
        console.print(table(trace, rows, args.shares))
        found += rows
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")


def _policy_way(name: str, policy: Policy, admission: bool) -> Way:
    return Way(name, admission, lambda trace, capacity: replay(trace, policy, capacity, admission))


if __name__ == "__main__":
    main()
