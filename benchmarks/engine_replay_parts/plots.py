"""Pictures of a run: throughput beside its bound, and the distribution of times to first token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common.figures import panels
from benchmarks.engine_replay_parts.record import SATURATED, RunRecord


def draw(record: RunRecord, target: Path) -> None:
    """Write one PNG of a run."""
    title = f"{record.workload}: {record.facts['model']} on {record.facts['machine']['cpu']}"
    count = 1 + len(record.loads)
    with panels(target, title, count=count, width_inches=5 * count) as axes:
        _throughput(axes[0], record)
        for ax, load in zip(axes[1:], record.loads, strict=True):
            _first_tokens(ax, record, load)
        axes[1].legend(fontsize=7)


def _throughput(ax: Any, record: RunRecord) -> None:
    names, measured, allowed = [], [], []
    for way in record.ways:
        compared = record.comparison(way, SATURATED)
        if compared is not None:
            names.append(way.way)
            measured.append(compared.throughput_ratio)
            allowed.append(compared.token_ratio)
    places = range(len(names))
    ax.barh([place - 0.2 for place in places], measured, height=0.4, label="measured")
    ax.barh([place + 0.2 for place in places], allowed, height=0.4, label="what computed tokens allow")
    ax.set_yticks(list(places), names, fontsize=8)
    ax.invert_yaxis()
    ax.set(xlabel="throughput over prefix caching's", title=SATURATED)
    ax.legend(fontsize=7)
    ax.grid(alpha=0.3, axis="x")


def _first_tokens(ax: Any, record: RunRecord, load: str) -> None:
    for way in record.ways:
        if served := way.served.get(load):
            times_s = sorted(one.ttft_s for one in served)
            shares = [(rank + 1) / len(times_s) for rank in range(len(times_s))]
            ax.step(times_s, shares, where="post", lw=1, label=way.way)
    ax.set(xlabel="time to first token (s)", ylabel="share of requests", title=load, xscale="log")
    ax.grid(alpha=0.3)
