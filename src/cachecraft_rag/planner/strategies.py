"""The named rules: which cached variant is used, how much of it is recomputed, and which tokens."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from cachecraft_rag.chunks import ChunkKey, RecordMeta
from cachecraft_rag.errors import InvalidRequestError
from cachecraft_rag.planner.impact import cfo
from cachecraft_rag.planner.live import LiveMethod
from cachecraft_rag.planner.overlap import beta_prime, paper_beta_prime


@dataclass(frozen=True, slots=True)
class StrategyOptions:
    """What a request says about the amount to recompute.

    Attributes:
        alpha: Cache-Craft eq. 12.
        share: share of a reused chunk to recompute for strategies without a formula of their own.
        recompute_ratio: a fixed share in [0, 1] in place of the strategy's own, None for its own.
    """

    alpha: float
    share: float = 0.0
    recompute_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The variant to use and the share of its tokens to recompute, in [0, 1]."""

    record: RecordMeta
    share: float


class StoredScore(enum.StrEnum):
    """Scores known before the request runs, by which each chunk's own share is chosen."""

    FIRST_TOKENS = "first_tokens"
    INTER_ATTENTION = "inter_attention"


Rank = Callable[[RecordMeta, Sequence[ChunkKey]], tuple[float, ...]]
"""From a variant and the new prefix to a key; the lowest is taken."""
Share = Callable[[RecordMeta, Sequence[ChunkKey], StrategyOptions], float]
"""From a variant, the new prefix and the options to the share of its tokens to recompute."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """One rule.

    Attributes:
        score: how tokens are chosen: a stored score, chunk by chunk, or a method of the workers, under
            one budget over all chunks.
        has_budget: whether a request's `recompute_ratio` replaces the share.
        reuses_exact: whether a variant behind the identical prefix is taken as it is.
    """

    name: str
    rank: Rank
    share: Share
    score: StoredScore | LiveMethod = StoredScore.INTER_ATTENTION
    has_budget: bool = True
    reuses_exact: bool = True

    def choose(
        self,
        variants: Sequence[RecordMeta],
        new_prefix: Sequence[ChunkKey],
        options: StrategyOptions,
    ) -> Choice:
        """The best of the `variants` (at least one) behind `new_prefix`.

        Variants whose own prefix was exact come before all others, as approximations must not pile
        up; then the strategy's rank, then the newest.

        Raises:
            PlanError: a variant's profile does not fit its prefix.
        """
        record = min(variants, key=lambda r: (not r.prefix_is_exact, *self.rank(r, new_prefix), -r.record_id))
        if self.has_budget and options.recompute_ratio is not None:
            return Choice(record, options.recompute_ratio)
        return Choice(record, self.share(record, new_prefix, options))


def _by_overhead(record: RecordMeta, new_prefix: Sequence[ChunkKey]) -> tuple[float, ...]:
    """Lowest CFO first, as the paper has it; alpha does not change the order."""
    return (cfo(record, new_prefix, 1.0, paper_beta_prime),)


def _by_overlap(record: RecordMeta, new_prefix: Sequence[ChunkKey]) -> tuple[float, ...]:
    """Largest overlap first, then the most context: KV that saw no other chunk is the worst."""
    return (-beta_prime(record, new_prefix), -len(record.prefix_chunks))


def _nothing(record: RecordMeta, new_prefix: Sequence[ChunkKey], options: StrategyOptions) -> float:
    return 0.0


def _everything(record: RecordMeta, new_prefix: Sequence[ChunkKey], options: StrategyOptions) -> float:
    return 1.0


def _paper_overhead(record: RecordMeta, new_prefix: Sequence[ChunkKey], options: StrategyOptions) -> float:
    return cfo(record, new_prefix, options.alpha, paper_beta_prime)


def _fixed(record: RecordMeta, new_prefix: Sequence[ChunkKey], options: StrategyOptions) -> float:
    return options.share


def _by_missing_context(
    record: RecordMeta, new_prefix: Sequence[ChunkKey], options: StrategyOptions
) -> float:
    """The share of what the chunk has not seen: a chunk behind its old neighbours needs no repair."""
    return options.share * (1.0 - beta_prime(record, new_prefix))


STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {
        strategy.name: strategy
        for strategy in (
            Strategy("focus", _by_overlap, _by_missing_context, LiveMethod.FOCUS),
            Strategy("question", _by_overlap, _fixed, LiveMethod.QUESTION),
            Strategy("cachecraft", _by_overhead, _paper_overhead),
            Strategy("cacheblend", _by_overlap, _fixed, LiveMethod.DEVIATION),
            Strategy("epic", _by_overlap, _fixed, StoredScore.FIRST_TOKENS),
            Strategy("naive", _by_overlap, _nothing, has_budget=False),
            Strategy("recompute_all", _by_overlap, _everything, has_budget=False, reuses_exact=False),
        )
    }
)
"""All strategies by name: ours, then those it is compared with.

focus: the question's attention and the stored need of each token, one budget over all chunks.
question: the question's attention alone (ProphetKV, arXiv 2602.02579; FusionRAG, arXiv 2601.12904).
cachecraft: CFO and stored inter-attention chunk by chunk (arXiv 2502.15734), its formulas as published.
cacheblend: tokens whose values deviate most on layer 1 (arXiv 2405.16444, as its released code does).
epic: the first tokens of each chunk (arXiv 2410.15332).

`recompute_ratio` does not move the two ends of the scale: `naive` never recomputes a token and
`recompute_all` recomputes every one, as tests and benchmarks rely on."""


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
