"""The comparison as a table: one row a peer."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.common.text_table import NOTHING, TextTable
from benchmarks.peers_parts.job import Result
from benchmarks.peers_parts.peer import FULL

COLUMNS = (
    "way",
    "TTFT P50",
    "TTFT max",
    "× full",
    "prompt tokens saved",
    "answers as full",
    "first token as full",
)


def compared(results: Mapping[str, Result | str]) -> TextTable:
    """Medians over the measured requests; figures that need full prefill are left out without it."""
    full = results.get(FULL.name)
    reference = full if isinstance(full, Result) else None
    rows = [_row(name, result, reference) for name, result in results.items()]
    return TextTable("One request after the other, the same prompts in the same order", COLUMNS, rows)


def _row(name: str, result: Result | str, full: Result | None) -> Sequence[str]:
    if isinstance(result, str):
        return (name, "failed", *[NOTHING] * (len(COLUMNS) - 2))
    times_s = [each.ttft_s for each in result.measured]
    median_s = statistics.median(times_s)
    num_prompt = sum(each.num_prompt for each in result.measured)
    saved = sum(each.num_saved for each in result.measured) / num_prompt
    shown = (name, f"{median_s:.3f} s", f"{max(times_s):.3f} s")
    if full is None:
        return (*shown, NOTHING, f"{saved:.1%}", NOTHING, NOTHING)
    speedup = statistics.median(each.ttft_s for each in full.measured) / median_s
    pairs = list(zip(result.measured, full.measured, strict=True))
    same = sum(list(one.token_ids) == list(other.token_ids) for one, other in pairs)
    begun = sum(list(one.token_ids)[:1] == list(other.token_ids)[:1] for one, other in pairs)
    of_all = f"of {len(pairs)}"
    return (*shown, f"{speedup:.1f}", f"{saved:.1%}", f"{same} {of_all}", f"{begun} {of_all}")
