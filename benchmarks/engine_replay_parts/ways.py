"""Ways of answering, each in an engine of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.engine_replay_parts.workload import ReplayRequest

from cachecraft_rag import CacheCraftConfig

BALANCED_BUDGET = 0.15
"""Share of the reused tokens that preset `balanced` recomputes (docs/quality.md)."""
NUM_NEIGHBOURS = 4


@dataclass(frozen=True, slots=True)
class Way:
    """One way.

    Attributes:
        what: one line for the reader.
        options: of each call.
        config: of `CacheCraftConfig`, beyond what all ways share.
        engine_args: of vLLM, beyond what all ways share.
        budget: share of the reused tokens that it may recompute, None for a way that reuses none.
        is_reordered: most popular passages first.
        warms_up: False for a way that keeps nothing.
        num_neighbours: fill the store by `engine.warm` with so many, and not by traffic.
    """

    name: str
    what: str
    options: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    budget: float | None = None
    is_reordered: bool = False
    warms_up: bool = True
    num_neighbours: int = 0

    @property
    def has_store(self) -> bool:
        return self.budget is not None

    def made_config(self) -> CacheCraftConfig:
        # Feedback answers again in idle time and moves the budget: neither is to be measured here.
        store = {} if self.has_store else {"host_store_bytes": 0}
        return CacheCraftConfig(**{"preset": "balanced", "feedback_share": 0.0, **store, **self.config})

    def sent(self, requests: Sequence[ReplayRequest]) -> list[ReplayRequest]:
        return [request.reordered() if self.is_reordered else request for request in requests]


def _ours(name: str, what: str, budget: float = BALANCED_BUDGET, **changes: Any) -> Way:
    return Way(name, what, budget=budget, **changes)


_OFF = {"reuse": "off"}
_ONE = {"max_num_seqs": 1}
WAYS: Mapping[str, Way] = {
    way.name: way
    for way in (
        Way(
            "full",
            "full prefill, no cache",
            options={**_OFF, "store": False, "read_prefix_cache": False},
            warms_up=False,
        ),
        Way("prefix", "vLLM's prefix caching", options=_OFF),
        Way(
            "prefix-reordered",
            "prefix caching, most popular passages first",
            options=_OFF,
            is_reordered=True,
        ),
        _ours("ours", "preset balanced: focus at 15 %, behind vLLM's prefix caching"),
        _ours("ours-0", "KV moved, nothing repaired", 0.0, options={"reuse": "naive"}),
        _ours("ours-30", "focus at 30 %", 0.3, config={"preset": "faithful"}),
        _ours("ours-g16", "focus at 15 % in runs of 16 tokens", config={"granularity": 16}),
        _ours(
            "ours-cachecraft",
            "cachecraft at 15 %: no look at the question",
            config={"strategy": "cachecraft", "recompute_ratio": BALANCED_BUDGET},
        ),
        _ours("ours-exact", "exact reuse only", 0.0, options={"reuse": "exact"}),
        _ours("ours-no-prefix", "without vLLM's prefix caching", options={"read_prefix_cache": False}),
        _ours("ours-reordered", "most popular passages first", is_reordered=True),
        _ours("ours-neighbours", "store filled by warm(neighbours=4)", num_neighbours=NUM_NEIGHBOURS),
        _ours("ours-one", "one request at a time: no shared pass, no batch", engine_args=_ONE),
        Way("prefix-one", "prefix caching, one request at a time", options=_OFF, engine_args=_ONE),
    )
}
BASELINE = "prefix"
FULL = "full"
DEFAULT_WAYS = ("prefix", "full", "prefix-reordered", "ours")


def chosen_ways(names: Sequence[str]) -> list[Way]:
    """The ways of these names, prefix caching first: the others' arrivals follow from its capacity.

    Raises:
        SystemExit: an unknown name.
    """
    unknown = [name for name in names if name not in WAYS]
    if unknown:
        raise SystemExit(f"unknown way {', '.join(unknown)}: choose from {', '.join(WAYS)}")
    return [WAYS[name] for name in dict.fromkeys((BASELINE, *names))]
