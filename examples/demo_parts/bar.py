"""A prompt as one line of cells, each showing what was done with the tokens it stands for."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from cachecraft_rag.events import ChunkDecision, ChunkReport, ReuseReport


class Cell(enum.Enum):
    """A glyph that can be told apart without colour, a colour, and what it means."""

    EXACT = ("█", "green", "reused, exact")
    MOVED = ("▓", "cyan", "reused behind others")
    RECOMPUTED = ("▒", "yellow", "recomputed")
    NEW = ("░", "red", "computed")

    @property
    def glyph(self) -> str:
        return self.value[0]

    @property
    def style(self) -> str:
        return self.value[1]

    @property
    def meaning(self) -> str:
        return self.value[2]


@dataclass(frozen=True, slots=True)
class Part:
    cell: Cell
    num_tokens: int


def parts_of(report: ReuseReport) -> list[Part]:
    """The prompt's tokens in order, in parts that add up to `report.num_prompt_tokens`.

    A report counts a passage's recomputed tokens and does not place them: they are drawn at its end.
    """
    in_chunks = sum(chunk.num_reused_tokens for chunk in report.chunks)
    num_head = report.num_reused_tokens - in_chunks
    parts = [Part(Cell.EXACT, num_head)]
    position = num_head
    for chunk in report.chunks:
        parts.append(Part(Cell.NEW, chunk.start - position))
        parts += _chunk_parts(chunk)
        position = chunk.start + chunk.num_tokens
    parts.append(Part(Cell.NEW, report.num_prompt_tokens - position))
    return [part for part in parts if part.num_tokens > 0]


def cells_of(parts: Sequence[Part], width: int) -> Iterator[tuple[Cell, int]]:
    """(kind, number of cells) for each part, `width` cells in all. Rounding the ends instead of the
    lengths keeps the sum; a part much shorter than a cell may get none."""
    ends = list(accumulate(part.num_tokens for part in parts))
    total, previous = (ends[-1] if ends else 0), 0
    for part, end in zip(parts, ends, strict=True):
        edge = round(end * width / total)
        if edge > previous:
            yield part.cell, edge - previous
        previous = edge


def _chunk_parts(chunk: ChunkReport) -> list[Part]:
    kept = Cell.EXACT if chunk.decision is ChunkDecision.EXACT else Cell.MOVED
    return [
        Part(kept, chunk.num_reused_tokens),
        Part(Cell.RECOMPUTED, chunk.num_recomputed_tokens),
        Part(Cell.NEW, chunk.num_computed_tokens),
    ]
