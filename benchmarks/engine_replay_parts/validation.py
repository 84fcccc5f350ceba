"""What a replay of the trace measured, in the form that `benchmarks.simulate_cluster validate` reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.engine_replay_parts.record import MODERATE, RunRecord
from benchmarks.engine_replay_parts.ways import WAYS

SIMULATED = {"full": "full", "prefix": "prefix", "ours": "reuse", "ours-0": "reuse", "ours-30": "reuse"}
_P50, _P99 = 0, 2


def write_validation(record: RunRecord, target: Path) -> None:
    """Write the moderate load: under the saturating one a TTFT says little but how long the queue was.

    All requests of the trace before it warm the simulated caches, as a filled store stands for them here.

    Raises:
        SystemExit: the run has no moderate load, or is not of the trace.
    """
    rows = list(_rows(record))
    if not rows or record.workload != "ragpulse":
        raise SystemExit("only a run of `ragpulse` with a moderate load can be compared with the simulation")
    workload = record.facts["workload"]
    num_before = workload["first"] + workload["num_saturated"]
    served = record.ways[0].served[MODERATE]  # every way was sent the requests at the same times
    simulated = {
        "first": 0,
        "num_warm_up": num_before,
        "arrivals_s": [each.arrival_s for each in served],
        "token_scale": workload["scale"],
        "max_output_tokens": workload["max_output_tokens"],
    }
    target.write_text(json.dumps({"workload": simulated, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def _rows(record: RunRecord) -> Iterator[dict[str, Any]]:
    for way in record.ways:
        figures = record.figures(way, MODERATE)
        if figures is None or way.way not in SIMULATED:
            continue
        yield {
            "way": SIMULATED[way.way],
            "budget": WAYS[way.way].budget,
            "ttft_p50_s": figures.ttft_s[_P50],
            "ttft_p99_s": figures.ttft_s[_P99],
            "computed_share": figures.computed_share,
        }
