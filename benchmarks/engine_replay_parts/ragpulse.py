"""Requests of the RAGPulse trace with texts of the traced lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine_replay_parts.texts import CountTokens, TextFiller, corpus_texts
from benchmarks.engine_replay_parts.workload import SEPARATOR, Passage, ReplayRequest, Workload
from benchmarks.replay.traces import rows_of

FILL_PASSAGES = 6
"""Passages of one request that fills the store: the median of the trace."""
TAIL_KINDS = ("history", "web", "user")

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RagpulseShape:
    """How much of it.

    Attributes:
        first: position in the trace of the first measured request.
        scale: of all lengths, to fit the machine.
    """

    scale: float = 0.4
    first: int = 1500
    max_output_tokens: int = 16
    num_warm_up: int = 30
    num_saturated: int = 300
    num_moderate: int = 60


def ragpulse_workload(folder: Path, count_tokens: CountTokens, shape: RagpulseShape) -> Workload:
    """Consecutive requests of the trace: ids, lengths, order and popularity are its own."""
    rows = list(rows_of(folder, "trace_ragpulse"))
    lengths = {row["id"]: row["tokens"] for row in rows_of(folder, "trace_ragpulse_lengths")}
    return workload_of(rows, lengths, TextFiller(corpus_texts(folder), count_tokens), count_tokens, shape)


def workload_of(
    rows: Sequence[Row],
    lengths: Mapping[int, int],
    filler: TextFiller,
    count_tokens: CountTokens,
    shape: RagpulseShape,
) -> Workload:
    """The parts before `shape.first` fill the store and warm up, those from it on are measured."""
    second = shape.first + shape.num_saturated
    begin, end = max(0, shape.first - shape.num_warm_up), second + shape.num_moderate
    used = rows[begin:end]
    earlier = list(filling_rows(rows[:begin], used))
    makes = _RequestMaker(lengths, filler, count_tokens, ranks([*earlier, *used]), shape)
    fill = [makes.request(row).only_first_token() for row in earlier]
    requests = [makes.request(row) for row in used]
    cuts = (shape.first - begin, second - begin)
    measured = rows[shape.first : end]
    facts = {
        "scale": shape.scale,
        "first": shape.first,
        "num_filling_requests": len(fill),
        "num_filling_passages": sum(len(request.passages) for request in fill),
        "num_without_passages": sum(not row["passages"] for row in measured),
        "num_distinct_passages": len({p for row in measured for p in row["passages"]}),
        "max_output_tokens": shape.max_output_tokens,
        "measured_span_s": _span_s(measured),
    }
    parts = (requests[: cuts[0]], requests[cuts[0] : cuts[1]], requests[cuts[1] :])
    return Workload("ragpulse", tuple(fill), *map(tuple, parts), facts)


def filling_rows(earlier: Sequence[Row], used: Iterable[Row]) -> Iterator[Row]:
    """Requests that name each passage of `used` which `earlier` named too, once: what is left in a store.

    From the latest back, packed to as many passages as the trace's own requests have. Sending all of
    the earlier traffic was rejected: hours, for the same store.
    """
    needed = {passage for row in used for passage in row["passages"]}
    packed: list[int] = []
    for row in reversed(earlier):
        found = [passage for passage in dict.fromkeys(row["passages"]) if passage in needed]
        needed.difference_update(found)
        packed += found
        while len(packed) >= FILL_PASSAGES:
            yield _filling_row(row, packed[:FILL_PASSAGES])
            packed = packed[FILL_PASSAGES:]
    if packed:
        yield _filling_row(earlier[0], packed)


def _span_s(rows: Sequence[Row]) -> float:
    return float(rows[-1]["t"] - rows[0]["t"]) if rows else 0.0


def ranks(rows: Iterable[Row]) -> dict[int, int]:
    """Passages by how many requests name them, 0 the most."""
    counts = Counter(passage for row in rows for passage in dict.fromkeys(row["passages"]))
    ordered = sorted(counts, key=lambda passage: (-counts[passage], passage))
    return {passage: rank for rank, passage in enumerate(ordered)}


def _filling_row(row: Row, passages: list[int]) -> Row:
    return {**row, "passages": passages, "history": [], "web": []}


class _RequestMaker:
    """Equal ids are equal texts, different ids different ones."""

    def __init__(
        self,
        lengths: Mapping[int, int],
        filler: TextFiller,
        count_tokens: CountTokens,
        rank_of: Mapping[int, int],
        shape: RagpulseShape,
    ) -> None:
        self._lengths = lengths
        self._filler = filler
        self._count: Callable[[str], int] = count_tokens
        self._ranks = rank_of
        self._shape = shape
        self._texts: dict[int, tuple[str, int]] = {}

    def request(self, row: Row) -> ReplayRequest:
        system = [self._text(number) for number in dict.fromkeys(row["sys"])]
        numbers = dict.fromkeys(number for number in row["passages"] if self._lengths[number])
        passages = [Passage(str(n), *self._text(n), rank=self._ranks[n]) for n in numbers]
        tail = [self._text(number) for kind in TAIL_KINDS for number in row[kind] if self._lengths[number]]
        return ReplayRequest(
            system=SEPARATOR.join(text for text, _ in system),
            passages=tuple(passages),
            tail=SEPARATOR.join(text for text, _ in tail),
            num_tokens=sum(size for _, size in (*system, *tail)) + sum(p.num_tokens for p in passages),
            max_tokens=self._scaled(row["out"], self._shape.max_output_tokens),
            time_s=row["t"],
            ignore_eos=True,
        )

    def _text(self, number: int) -> tuple[str, int]:
        if number not in self._texts:
            text = self._filler.take(self._scaled(self._lengths[number]))
            self._texts[number] = (text, self._count(text))
        return self._texts[number]

    def _scaled(self, num_tokens: int, most: int | None = None) -> int:
        scaled = max(1, round(num_tokens * self._shape.scale))
        return scaled if most is None else min(scaled, most)
