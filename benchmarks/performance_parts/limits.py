"""Where reuse does not pay: what is known of it, with figures from the results where there are any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.ttft_parts.figures import default_way, speedup
from benchmarks.ttft_parts.record import Point

from cachecraft_rag import CacheCraftConfig

_TEXT = Path(__file__).parent / "limits.md"
_MB = 1e6


def section(files: Mapping[str, Sequence[Point]]) -> str:
    """Markdown; `files` are results of `benchmarks.ttft` and may be empty."""
    config = CacheCraftConfig()
    return _TEXT.read_text(encoding="utf-8").format(
        min_chunk_tokens=config.min_chunk_tokens,
        max_overhead_share=config.max_overhead_share,
        max_missing_share=config.max_missing_share,
        cold_wait_ms=config.cold_wait_s * 1000,
        short="\n\n".join(_shortest(files, config.share)),
        bandwidth="\n\n".join(_bandwidths(files)),
    )


def _shortest(files: Mapping[str, Sequence[Point]], share: float) -> Iterator[str]:
    """How much reuse gains at the shortest and the longest context that was measured."""
    for points in files.values():
        ends = points[:1] if len(points) == 1 else (points[0], points[-1])
        gains = [
            f"{speedup(point, measured):.1f} times at {point.context:,} tokens"
            for point in ends
            if (measured := default_way(point, share)) is not None
        ]
        if gains:
            yield f"Gain over full prefill at {share:.0%} ({_what(points[0])}): {', '.join(gains)}."


def _bandwidths(files: Mapping[str, Sequence[Point]]) -> Iterator[str]:
    """What host memory gives, beside the bandwidth at which loading breaks even."""
    for points in files.values():
        point = points[-1]
        measured = default_way(point, 0.0)
        loaded_bytes, load_s = (
            measured.median(name) if measured else 0 for name in ("loaded_bytes", "load_s")
        )
        if loaded_bytes and load_s:
            yield (
                f"{_what(point)}, {point.context:,} tokens of context: {loaded_bytes / _MB:.0f} MB of KV "
                f"against {point.full_s:.2f} s of full prefill. Loading breaks even at "
                f"{break_even(loaded_bytes, point.full_s) / _MB:,.0f} MB/s; from host memory it runs at "
                f"{loaded_bytes / load_s / _MB:,.0f} MB/s, the turning of keys included."
            )


def break_even(loaded_bytes: float, full_s: float) -> float:
    """Bytes per second at which loading takes as long as computing."""
    return loaded_bytes / full_s


def _what(point: Point) -> str:
    return f"{point.facts['model']}, {point.facts['engine_args']['dtype']}"
