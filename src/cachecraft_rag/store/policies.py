"""Eviction policies as pure functions, by name.

A policy maps what is known of a record and one use of it to a new `Score`. The order of two scores
does not depend on when it is asked for: ageing lifts what is used later instead of lowering what
waits. So a record is scored when it is used and at no other time, and a heap finds the victim
(`eviction.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Protocol

from cachecraft_rag.errors import ConfigurationError, StoreError

HALF_LIFE: Final = 3.0
"""Half-life of a use in `hybrid`, in turnovers (see `Use.age`); chosen by replay, see docs/policies.md."""

MIN_CFO: Final = 1e-2
"""What `cachecraft` takes for a smaller CFO: an exact use counts as much as 100 full recomputes.

The published rule divides by zero there. Another implementation takes 1e-6, with which one exact use
outweighs whatever else happens to other chunks.
"""


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a record, its storing included.

    Attributes:
        age: a clock in turnovers: each use of any record moves it on by 1 / (number of records).
        now_s: time of the use, by a clock that does not go backwards.
        size_bytes: bytes that evicting the record frees.
        cost: what computing the record again costs, in tokens or seconds, the same for all records.
        cfo: share of the record's tokens recomputed in this use (Cache-Craft eq. 12); 1 when stored.

    Raises:
        StoreError: a value is out of its range.
    """

    age: float
    now_s: float
    size_bytes: int
    cost: float
    cfo: float = 1.0

    def __post_init__(self) -> None:
        if self.size_bytes < 1:
            raise StoreError(f"Use.size_bytes is {self.size_bytes}: a record holds at least 1 byte")
        if not 0 <= self.cost < math.inf:
            raise StoreError(f"Use.cost is {self.cost}: it must be finite and not negative")
        if not 0 <= self.cfo <= 1:
            raise StoreError(f"Use.cfo is {self.cfo}: it is a share, so within [0, 1]")


@dataclass(frozen=True, slots=True)
class Score:
    """What a policy knows of a record.

    Attributes:
        priority: the record with the lowest one is the victim.
        frequency: uses counted by the policy's own weights; 0 where it counts none.
        expires_s: from this time on the record must not be used, see `with_ttl`.
    """

    priority: float
    frequency: float = 0.0
    expires_s: float = math.inf


class Policy(Protocol):
    """Pure: the same arguments give the same score."""

    def __call__(self, previous: Score | None, use: Use, floor: float) -> Score:
        """Score of a record after `use`.

        Args:
            previous: its score before, None when it is stored.
            floor: highest priority evicted so far, 0 before the first eviction.
        """
        ...


def lru(previous: Score | None, use: Use, floor: float) -> Score:
    """Least recently used first."""
    return Score(use.age)


def lfu(previous: Score | None, use: Use, floor: float) -> Score:
    """LFU with dynamic ageing, `K = F + L`: uses, plus the floor at the last of them.

    Without the floor old favourites would never leave. Source: Arlitt et al., "Evaluating Content
    Management Techniques for Web Proxy Caches", 1999 (LFU-DA).
    """
    frequency = _frequency(previous) + 1
    return Score(floor + frequency, frequency)


def gdsf(previous: Score | None, use: Use, floor: float) -> Score:
    """Greedy-dual size-frequency, `K = L + F * cost / size`: uses times cost saved per byte.

    Source: Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching
    Policy", HP Labs 1998.
    """
    frequency = _frequency(previous) + 1
    return Score(floor + frequency * use.cost / use.size_bytes, frequency)


def cachecraft(previous: Score | None, use: Use, floor: float) -> Score:
    """Cache-Craft's `f_r += 1 / CFO` for each reuse; storing counts nothing (arXiv 2502.15734).

    There is no ageing in it: what was popular once stays until something else was as popular.
    """
    gain = 0.0 if previous is None else 1 / max(use.cfo, MIN_CFO)
    frequency = _frequency(previous) + gain
    return Score(frequency, frequency)


def hybrid(half_life: float = HALF_LIFE) -> Policy:
    """Recency and frequency in one: the record whose uses, weighted by age, sum up lowest goes first.

    The weight of a use halves every `half_life` turnovers: `C(t) = sum_i 2^-((t - t_i) / half_life)`.
    That is LRFU's combined recency and frequency with lambda = 1 / half_life (Lee et al., "LRFU: A
    Spectrum of Policies", IEEE Trans. Computers 2001): near 0 it is LRU, near infinity LFU. LRFU
    counts t in uses; in turnovers one half-life suits caches of any size. All sums shrink by the same
    factor as time passes, so `log2 C(t) + t / half_life` keeps their order and needs no clock.

    Raises:
        ConfigurationError: the half-life is not a positive number.
    """
    if not 0 < half_life < math.inf:
        raise ConfigurationError(f"half_life is {half_life!r}: it must be positive and finite")

    def score(previous: Score | None, use: Use, floor: float) -> Score:
        this = use.age / half_life
        return Score(this if previous is None else log2_sum(previous.priority, this))

    return score


def with_ttl(policy: Policy, ttl_s: float) -> Policy:
    """`policy`, and every record expires `ttl_s` seconds after it was stored, used or not.

    Raises:
        ConfigurationError: `ttl_s` is not positive.
    """
    if not ttl_s > 0:
        raise ConfigurationError(f"ttl_s is {ttl_s!r}: it must be positive, and inf stands for never")

    def score(previous: Score | None, use: Use, floor: float) -> Score:
        expires_s = use.now_s + ttl_s if previous is None else previous.expires_s
        return replace(policy(previous, use, floor), expires_s=expires_s)

    return score


POLICIES: Final[Mapping[str, Policy]] = MappingProxyType(
    {"gdsf": gdsf, "hybrid": hybrid(), "lfu": lfu, "lru": lru, "cachecraft": cachecraft}
)
DEFAULT_POLICY: Final = "gdsf"
"""What the replay favours over both traces, see docs/policies.md."""


def policy_named(name: str) -> Policy:
    """The registered policy of this name.

    Raises:
        ConfigurationError: there is none.
    """
    if name not in POLICIES:
        raise ConfigurationError(f"the eviction policy is {name!r}: choose one of {', '.join(POLICIES)}")
    return POLICIES[name]


def _frequency(previous: Score | None) -> float:
    return 0.0 if previous is None else previous.frequency


def log2_sum(a: float, b: float) -> float:
    """log2(2^a + 2^b) without overflow."""
    return max(a, b) + math.log1p(2.0 ** -abs(a - b)) / math.log(2)
