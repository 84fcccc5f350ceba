"""The ways of answering that are compared: the one list to read or to add to.

A way's name says all of it: `strategy[@ratio]/regime[/gN]`, e.g. `focus@0.15/neighbours` or
`focus@0.15/neighbours/g4`, which recomputes tokens in runs of 4.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

REGIMES = ("alone", "single", "traffic", "neighbours")
"""How chunks were cached; `caches` says what each means."""
OURS = "focus"
OUR_REGIME = "neighbours"
BUDGETS = (0.05, 0.15, 0.30)
"""The recompute ratios at which strategies are compared."""
RIVAL_REGIMES = {
    "epic": "alone",
    "cacheblend": "alone",
    "cachecraft": "traffic",
    "question": "neighbours",
}
"""What each rival's paper prescribes: EPIC and CacheBlend cache chunks alone, Cache-Craft keeps the
variants of past requests, and FusionRAG puts a chunk's neighbours before it."""
FULL = "full"
"""Name of the reference in result files: full prefill, free greedy decoding."""

_NAME = re.compile(r"(?P<strategy>[a-z_]+)(@(?P<ratio>[0-9.]+))?/(?P<regime>[a-z]+)(/g(?P<granularity>\d+))?")


@dataclass(frozen=True, slots=True)
class Way:
    """One strategy at one budget over one kind of cache.

    Attributes:
        ratio: share of the loaded chunk tokens to recompute; None for strategies without a budget.
        granularity: tokens are recomputed in runs of this many.
    """

    strategy: str
    ratio: float | None
    regime: str
    granularity: int = 1

    @property
    def name(self) -> str:
        ratio = "" if self.ratio is None else f"@{self.ratio:g}"
        runs = "" if self.granularity == 1 else f"/g{self.granularity}"
        return f"{self.strategy}{ratio}/{self.regime}{runs}"

    @property
    def recomputes_all(self) -> bool:
        return self.strategy == "recompute_all" or self.ratio == 1.0

    @property
    def options(self) -> dict[str, Any]:
        """The engine's options for a request answered this way."""
        options: dict[str, Any] = {"reuse": self.strategy, "granularity": self.granularity}
        if self.recomputes_all:
            # Its KV is exact, so vLLM's prefix cache would keep it, and answer the other ways from it.
            options["read_prefix_cache"] = False
        return options if self.ratio is None else {**options, "recompute_ratio": self.ratio}

    @classmethod
    def parse(cls, name: str) -> Way:
        """The way called `name`.

        Raises:
            ValueError: the name is not of the form above, or its regime is unknown.
        """
        match = _NAME.fullmatch(name)
        if match is None or match["regime"] not in REGIMES:
            raise ValueError(f"way {name!r} is not strategy[@ratio]/regime[/gN] with a regime of {REGIMES}")
        ratio = float(match["ratio"]) if match["ratio"] else None
        return cls(match["strategy"], ratio, match["regime"], int(match["granularity"] or 1))


def _default_ways() -> list[Way]:
    ours = [Way(OURS, ratio, OUR_REGIME) for ratio in (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 1.0)]
    bounds = [Way("recompute_all", None, "alone")]
    bounds += [Way("naive", None, regime) for regime in ("alone", "traffic", "neighbours")]
    rivals = [Way(name, ratio, regime) for name, regime in RIVAL_REGIMES.items() for ratio in BUDGETS]
    over_ours = [
        Way(name, ratio, OUR_REGIME)
        for name, regime in RIVAL_REGIMES.items()
        if regime != OUR_REGIME
        for ratio in BUDGETS
    ]
    return [*ours, *bounds, *rivals, *over_ours, *ABLATIONS]


ABLATIONS = (
    Way(OURS, 0.15, "alone"),
    Way(OURS, 0.15, "traffic"),
    Way(OURS, 0.15, OUR_REGIME, granularity=4),
)
"""`focus@0.15/neighbours` with one thing changed. More ablations are other strategies at the same budget."""
DEFAULT_WAYS = tuple(_default_ways())
