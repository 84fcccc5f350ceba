"""The named rules by which a cached variant is chosen and its share to recompute is set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from cachecraft_rag.chunks import ChunkKey, RecordMeta
from cachecraft_rag.errors import InvalidRequestError
from cachecraft_rag.planner.impact import cfo


@dataclass(frozen=True, slots=True)
class StrategyOptions:
    """What a request says about the amount to recompute.

    Attributes:
        alpha: Cache-Craft eq. 12.
        recompute_ratio: a fixed share in [0, 1] in place of the strategy's own, None for its own.
    """

    alpha: float
    recompute_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The variant to use and the share of its tokens to recompute, in [0, 1]."""

    record: RecordMeta
    share: float


@dataclass(frozen=True, slots=True)
class Strategy:
    """One rule.

    Attributes:
        share: from a variant's CFO and the options to the share of its tokens to recompute.
        reuses_exact: whether a variant behind the identical prefix is taken as it is.
    """

    name: str
    share: Callable[[float, StrategyOptions], float]
    reuses_exact: bool = True

    def choose(
        self,
        variants: Sequence[RecordMeta],
        new_prefix: Sequence[ChunkKey],
        options: StrategyOptions,
    ) -> Choice:
        """The best of the `variants` (at least one) behind `new_prefix`.

        Variants whose own prefix was exact come before all others, as approximations must not pile
        up; then the lowest CFO, then the newest.

        Raises:
            PlanError: a variant's profile does not fit its prefix.
        """
        overheads = [cfo(record, new_prefix, options.alpha) for record in variants]
        overhead, record = min(
            zip(overheads, variants, strict=True),
            key=lambda pair: (not pair[1].prefix_is_exact, pair[0], -pair[1].record_id),
        )
        return Choice(record, self.share(overhead, options))


def _nothing(overhead: float, options: StrategyOptions) -> float:
    return 0.0


def _overhead_or_ratio(overhead: float, options: StrategyOptions) -> float:
    return overhead if options.recompute_ratio is None else options.recompute_ratio


def _everything(overhead: float, options: StrategyOptions) -> float:
    return 1.0


STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {
        strategy.name: strategy
        for strategy in (
            Strategy("naive", _nothing),
            Strategy("cachecraft", _overhead_or_ratio),
            Strategy("recompute_all", _everything, reuses_exact=False),
        )
    }
)
"""All strategies by name. `recompute_ratio` does not move the two ends of the scale: `naive` never
recomputes a token and `recompute_all` recomputes every one, as tests and benchmarks rely on."""


def get_strategy(name: str) -> Strategy:
    """The strategy called `name`.

    Raises:
        InvalidRequestError: there is none.
    """
    try:
        return STRATEGIES[name]
    except KeyError:
        raise InvalidRequestError(
            f"strategy is {name!r}: choose one of {', '.join(sorted(STRATEGIES))}"
        ) from None
