"""Does it pay to compute popular chunks in idle time? A replay of the RAGPulse trace, without a model.

    python -m benchmarks.warming                                    the tables of docs/warming.md
    python -m benchmarks.warming --tokens-per-s 100 --json warming.json

Cells: % of the tokens asked for that were stored (thousands of tokens warmed / of these for nothing).

Sizes are shares of the trace's distinct passage tokens. Nothing here is timed, and every run gives the same.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.replay.predictors import Frequency, Predictor, Recency
from benchmarks.replay.predictors import Sequence as SequenceModel
from benchmarks.replay.simulate import Cache
from benchmarks.replay.traces import Trace, ragpulse
from benchmarks.replay.warming import Rule, Warming
from benchmarks.store_replay import DATA
from rich.console import Console
from rich.progress import track
from rich.table import Table

from cachecraft_rag.store.policies import DEFAULT_POLICY, POLICIES, with_ttl

SHARES = (0.1, 0.25, 0.5)
TOKENS_PER_S = 1000.0
HOUR_S = 3600.0

PREDICTORS: Mapping[str, Callable[[], Predictor | None]] = {
    "none": lambda: None,
    "recency": Recency,
    **{f"frequency, {hours} h": lambda hours=hours: Frequency(hours * HOUR_S) for hours in (6, 24, 72)},
    "sequence, any request": lambda: SequenceModel(by_conversation=False),
    "sequence, conversation": lambda: SequenceModel(by_conversation=True),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A store that is full all the time, or one whose records expire, which leaves room."""

    name: str
    rule: Rule
    ttl_h: float | None = None


CASES = (
    Case("full store", Rule.BETTER),
    Case("full store", Rule.ANY),
    Case("records expire after 24 h", Rule.ROOM, 24),
    Case("records expire after 1 h", Rule.ROOM, 1),
)


@dataclass(frozen=True, slots=True)
class Row:
    case: str
    rule: str
    predictor: str
    share: float
    tokens_per_s: float
    served: float
    num_warmed_tokens: int
    num_wasted_tokens: int

    @property
    def cell(self) -> str:
        warmed, wasted = self.num_warmed_tokens / 1000, self.num_wasted_tokens / 1000
        return f"{100 * self.served:.1f}" + (f" ({warmed:,.0f} / {wasted:,.0f})" if warmed else "")


def measure(trace: Trace, case: Case, predictor: str, share: float, tokens_per_s: float) -> Row:
    policy, capacity = POLICIES[DEFAULT_POLICY], int(share * trace.distinct_tokens)
    cache = Cache(policy if case.ttl_h is None else with_ttl(policy, case.ttl_h * HOUR_S), capacity, True)
    warming = Warming(cache, capacity, PREDICTORS[predictor](), case.rule, tokens_per_s)
    return Row(case.name, case.rule.value, predictor, share, tokens_per_s, **asdict(warming.run(trace)))


def table(case: Case, rows: Sequence[Row], shares: Sequence[float]) -> Table:
    found = Table(title=f"{case.name}, warmed {case.rule.value}")
    found.add_column("predictor")
    for share in shares:
        found.add_column(f"{share:.0%}", justify="right")
    for first in range(0, len(rows), len(shares)):
        group = rows[first : first + len(shares)]
        found.add_row(group[0].predictor, *(row.cell for row in group))
    return found


def jobs(case: Case, shares: Sequence[float]) -> Iterator[tuple[str, float]]:
    names = ("frequency, 24 h",) if case.rule is Rule.ANY else PREDICTORS
    return ((name, share) for name in names for share in shares)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.warming", description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the trace")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="sizes of the store")
    parser.add_argument("--tokens-per-s", type=float, default=TOKENS_PER_S, help="budget of an idle second")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    console, trace = Console(width=130), ragpulse(args.data)
    found: list[Row] = []
    for case in CASES:
        steps = track([*jobs(case, args.shares)], description=case.name, transient=True)
        rows = [measure(trace, case, name, share, args.tokens_per_s) for name, share in steps]
        console.print(table(case, rows, args.shares))
        found += rows
        if args.json:
            args.json.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
