"""The tables of a run, as rows of text: for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.common.aims import Verdict, verdict_table
from benchmarks.common.text_table import NOTHING, TextTable
from benchmarks.engine_replay_parts.figures import Comparison, Figures
from benchmarks.engine_replay_parts.record import MODERATE, SATURATED, RunRecord, WayRecord
from benchmarks.engine_replay_parts.ways import BASELINE, DEFAULT_WAYS, WAYS

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Aim:
    """One figure of `ours` that was aimed at."""

    name: str
    load: str
    value: Callable[[Figures, Comparison], float]
    limit: float
    is_least: bool


_P99 = 2
AIMS = {
    "passages": (
        Aim("throughput / prefix caching's", SATURATED, lambda f, c: c.throughput_ratio, 2.5, True),
        Aim("P99 TTFT / prefix caching's", SATURATED, lambda f, c: c.ttft_ratio[_P99], 0.4, False),
        Aim("P99 TTFT / prefix caching's", MODERATE, lambda f, c: c.ttft_ratio[_P99], 0.4, False),
    ),
    "ragpulse": (
        Aim("tokens computed / (misses + budget × reused)", SATURATED, lambda f, c: f.over_bound, 1.1, False),
        Aim("throughput / what the token ratio allows", SATURATED, lambda f, c: c.efficiency, 0.8, True),
        Aim("P99 TTFT / prefix caching's", SATURATED, lambda f, c: c.ttft_ratio[_P99], 0.6, False),
        Aim("P99 TTFT / prefix caching's", MODERATE, lambda f, c: c.ttft_ratio[_P99], 0.6, False),
    ),
}


def all_tables(record: RunRecord) -> Iterator[TextTable]:
    for load in record.loads:
        yield speed_table(record, load)
    yield token_table(record)
    yield time_table(record)
    if len(record.ways) > len(DEFAULT_WAYS):
        yield parts_table(record)
    yield aims_table(record)


def speed_table(record: RunRecord, load: str) -> TextTable:
    """Throughput beside what tokens allow, and times."""
    columns = (
        "way",
        "requests/s",
        "× prefix",
        "tokens allow ×",
        "of that",
        "TTFT P50/P95/P99 s",
        "P99 / prefix",
        "latency P50/P95/P99 s",
    )
    rows = []
    for way, figures in _measured(record, load):
        compared = record.comparison(way, load)
        assert compared is not None  # the baseline is always measured
        rows.append(
            (
                way.way,
                f"{figures.requests_per_s:.3f}",
                f"{compared.throughput_ratio:.2f}",
                f"{compared.token_ratio:.2f}",
                f"{compared.efficiency:.2f}",
                _seconds(figures.ttft_s),
                f"{compared.ttft_ratio[_P99]:.2f}",
                _seconds(figures.latency_s),
            )
        )
    rate = record.ways[0].rates[load]
    return TextTable(f"{record.workload}, {load}: {rate:.2f} requests arrive a second", columns, rows)


def token_table(record: RunRecord) -> TextTable:
    """What was computed beside the least that hits and budget allow, under the saturating load."""
    columns = (
        "way",
        "prompt",
        "computed",
        "share",
        "misses + budget × reused",
        "over it",
        "hits of chunks by tier",
        "prefix / exact / moved / recomputed / missing %",
        "agreement",
        "peak engine GiB",
    )
    rows = []
    for way, figures in _measured(record, SATURATED):
        shares = " / ".join(f"{100 * share:.0f}" for share in figures.shares.values())
        rows.append(
            (
                way.way,
                f"{figures.num_prompt:,}",
                f"{figures.num_prefill:,}",
                f"{figures.computed_share:.1%}",
                f"{figures.bound_prefill:,.0f}",
                f"{figures.over_bound:.2f}",
                _hits(figures),
                shares,
                _share(figures.agreement),
                f"{way.peak_engine_bytes / GIB:.2f}",
            )
        )
    return TextTable(f"{record.workload}, {SATURATED}: tokens, hits and memory", columns, rows)


def time_table(record: RunRecord) -> TextTable:
    """Where the time goes, and how far the machine changed between the ways."""
    columns = (
        "way",
        "makespan s",
        "computed tokens/s",
        "load s",
        "select s",
        "pass s",
        "probe before/after s",
        "warm-up s",
        "decided",
    )
    rows = []
    for way, figures in _measured(record, SATURATED):
        served = way.served[SATURATED]
        sums = (sum(getattr(one, f"{part}_s") for one in served) for part in ("load", "select", "recompute"))
        rows.append(
            (
                way.way,
                f"{figures.makespan_s:.1f}",
                f"{figures.num_prefill / figures.makespan_s:,.0f}",
                *(f"{total:.1f}" for total in sums),
                f"{way.probe_before_s:.2f} / {way.probe_after_s:.2f}",
                f"{way.warm_up_s:.0f}",
                ", ".join(f"{count} {reason}" for reason, count in figures.reasons.items()),
            )
        )
    return TextTable(f"{record.workload}, {SATURATED}: where the time goes", columns, rows)


def parts_table(record: RunRecord) -> TextTable:
    """Every way beside `ours`: what a part that it lacks, or has besides, brings."""
    columns = ("way", "what", "throughput / ours", "computed tokens / ours", "P99 TTFT / ours", "agreement")
    ours = record.of("ours")
    own = ours and record.figures(ours, SATURATED)
    rows = []
    for way, figures in _measured(record, SATURATED) if own else ():
        assert own is not None
        rows.append(
            (
                way.way,
                WAYS[way.way].what,
                f"{figures.requests_per_s / own.requests_per_s:.2f}",
                f"{figures.num_prefill / own.num_prefill:.2f}",
                f"{figures.ttft_s[_P99] / own.ttft_s[_P99]:.2f}",
                _share(figures.agreement),
            )
        )
    return TextTable(f"{record.workload}, {SATURATED}: what each part brings", columns, rows)


def aims_table(record: RunRecord) -> TextTable:
    verdicts = []
    ours = record.of("ours")
    for aim in AIMS.get(record.workload, ()) if ours else ():
        assert ours is not None
        figures, compared = record.figures(ours, aim.load), record.comparison(ours, aim.load)
        if figures is None or compared is None:
            continue
        value = aim.value(figures, compared)
        verdicts.append(Verdict(f"{aim.name}, {aim.load}", aim.limit, value, aim.is_least))
    return verdict_table(f"{record.workload}: aims of `ours`", verdicts)


def gain_sentence(record: RunRecord) -> str:
    """Where the tokens that prefix caching computes and `ours` does not have gone."""
    ours, base = record.of("ours"), record.of(BASELINE)
    own = ours and record.figures(ours, SATURATED)
    other = base and record.figures(base, SATURATED)
    if not own or not other:
        return ""
    saved = {
        "chunks moved": own.shares["moved"],
        "chunks behind their own prefix": own.shares["exact"],
        "vLLM's prefix cache": own.shares["prefix"] - other.shares["prefix"],
    }
    total = sum(saved.values())
    parts = ", ".join(f"{name} {share / total:.0%}" for name, share in saved.items())
    return f"Of the tokens that `ours` takes from a cache beyond what `{BASELINE}` takes: {parts}."


def _measured(record: RunRecord, load: str) -> Iterator[tuple[WayRecord, Figures]]:
    for way in record.ways:
        figures = record.figures(way, load)
        if figures is not None:
            yield way, figures


def _hits(figures: Figures) -> str:
    found = [f"{tier} {share:.1%}" for tier, share in figures.hits.items() if tier != "computed"]
    return ", ".join(found) or NOTHING


def _share(value: float) -> str:
    return NOTHING if value != value else f"{value:.1%}"  # NaN is not equal to itself


def _seconds(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.2f}" for value in values)
