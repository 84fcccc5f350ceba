"""What happens in a soak, in order: questions, updates of documents, invalidations and purges.

The same seed gives the same events. What is not a question comes at fixed intervals, so that every part
of a run has as much of it as any other: else a hit rate could not be compared between them.
"""

from __future__ import annotations

import enum
import itertools
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

TENANTS = ("red", "blue")
REUSE = ("auto", "auto", "auto", "cachecraft", "naive", "exact")
"""Drawn evenly; "auto" stands for what most users leave alone."""


class Action(enum.StrEnum):
    ASK = "ask"
    REPLACE = "replace"
    INVALIDATE = "invalidate"
    PURGE = "purge"


class Abort(enum.StrEnum):
    NONE = ""
    CANCEL = "cancel"
    """The task is cancelled `abort_after_s` after its start."""
    CLOSE = "close"
    """The stream is closed after its first piece."""


@dataclass(frozen=True, slots=True)
class Version:
    """One version of one document; versions count from 0."""

    document: int
    number: int


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happens.

    Attributes:
        number: of the question, from 0; other events have the number of the question after them.
        versions: what a question was retrieved, or the one that a replace or invalidate is about.
        is_checked: ask again with every token recomputed, with exact reuse, and in full.
    """

    action: Action
    number: int
    tenant: str
    versions: tuple[Version, ...] = ()
    reuse: str = "auto"
    abort: Abort = Abort.NONE
    abort_after_s: float = 0.0
    is_checked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """How much of what.

    Attributes:
        num_documents: of each tenant, with the same popularity.
        zipf_exponent: popularity of the document of rank r is r to the power of minus this.
        num_chunks: fewest and most documents of a question.
        replace_every, invalidate_every, purge_every, abort_every: questions between two of them.
        lag_every: questions between two that were retrieved a version that is no longer current.
        check_every: questions between two that are checked.
    """

    num_documents: int
    num_chunks: tuple[int, int]
    check_every: int
    zipf_exponent: float = 0.9
    replace_every: int = 20
    invalidate_every: int = 50
    purge_every: int = 500
    abort_every: int = 12
    lag_every: int = 70


@dataclass(slots=True)
class Churn:
    """Makes the events of one run."""

    mix: Mix
    seed: int
    _rng: random.Random = field(init=False)
    _cumulative: list[float] = field(init=False)
    _current: dict[tuple[str, int], int] = field(init=False, default_factory=lambda: defaultdict(int))

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        ranks = range(1, self.mix.num_documents + 1)
        self._cumulative = list(itertools.accumulate(rank**-self.mix.zipf_exponent for rank in ranks))

    def events(self, num_questions: int) -> Iterator[Event]:
        for number in range(num_questions):
            yield from self._changes(number)
            yield self._question(number)

    def _changes(self, number: int) -> Iterator[Event]:
        mix, tenant = self.mix, self._rng.choice(TENANTS)
        if _is_due(number, mix.replace_every):
            (document,) = self._documents(1)
            self._current[tenant, document] += 1
            yield Event(Action.REPLACE, number, tenant, (self._version(tenant, document),))
        if _is_due(number, mix.invalidate_every):
            (document,) = self._documents(1)
            yield Event(Action.INVALIDATE, number, tenant, (self._version(tenant, document),))
        if _is_due(number, mix.purge_every):
            # In turn: which tenant it is must not be left to chance, as it happens seldom.
            yield Event(Action.PURGE, number, TENANTS[number // mix.purge_every % len(TENANTS)])

    def _question(self, number: int) -> Event:
        mix, rng = self.mix, self._rng
        tenant, reuse = rng.choice(TENANTS), rng.choice(REUSE)
        versions = [self._version(tenant, each) for each in self._documents(rng.randint(*mix.num_chunks))]
        if _is_due(number, mix.lag_every):
            versions = [Version(each.document, max(0, each.number - 1)) for each in versions]
        abort, after_s = Abort.NONE, 0.0
        if _is_due(number, mix.abort_every):
            # How long after its start a request is in which stage depends on the machine, so the delays
            # spread evenly over the orders of magnitude.
            abort, after_s = rng.choice((Abort.CANCEL, Abort.CLOSE)), 10 ** rng.uniform(-3, -0.3)
        is_checked = abort is Abort.NONE and number % mix.check_every == 0
        return Event(Action.ASK, number, tenant, tuple(versions), reuse, abort, after_s, is_checked)

    def _documents(self, count: int) -> Sequence[int]:
        """Distinct documents by popularity, in any order."""
        found: list[int] = []
        while len(found) < min(count, self.mix.num_documents):
            drawn = self._rng.choices(range(self.mix.num_documents), cum_weights=self._cumulative)[0]
            if drawn not in found:
                found.append(drawn)
        return found

    def _version(self, tenant: str, document: int) -> Version:
        return Version(document, self._current[tenant, document])


def _is_due(number: int, every: int) -> bool:
    return number % every == every - 1
