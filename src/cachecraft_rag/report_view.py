"""What a report shows, in whatever form: the fate of every token, and the sentences and table cells."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from cachecraft_rag.events import ChunkDecision, ChunkReport, PromptPiece, Reason, ReuseReport

NONE = "–"
MAX_VERSION_CHARS = 12


class Fate(enum.Enum):
    """What became of a token: a name, a glyph that is told apart without colour, a colour, a meaning.

    The colours are those of Okabe and Ito, which colour-blind people can tell apart.
    """

    EXACT = ("exact", "█", "#009e73", "KV reused behind the very tokens it was computed behind")
    REUSED = ("reused", "▓", "#56b4e9", "KV reused behind other text than it was computed behind")
    RECOMPUTED = ("recomputed", "▒", "#e69f00", "KV was cached, and computed again to repair it")
    NEW = ("new", "░", "#999999", "KV computed, as without a cache")

    @property
    def label(self) -> str:
        return self.value[0]

    @property
    def glyph(self) -> str:
        return self.value[1]

    @property
    def colour(self) -> str:
        return self.value[2]

    @property
    def meaning(self) -> str:
        return self.value[3]


@dataclass(frozen=True, slots=True)
class Part:
    fate: Fate
    num_tokens: int


def parts_of(report: ReuseReport) -> list[Part]:
    """The prompt's tokens in order, in parts that add up to `report.num_prompt_tokens`.

    A report counts a chunk's recomputed tokens and does not place them: they are put at its end.
    """
    parts: list[Part] = []
    position = 0
    for chunk in chunks_in_prompt(report):
        parts += _text_parts(report, position, chunk.start)
        parts += _chunk_parts(report, chunk)
        position = chunk.start + chunk.num_tokens
        if chunk.num_separator_tokens:
            # vLLM's own hit may end within the separator; what came with the chunk stands behind it.
            kept_from = max(position, report.num_prefix_tokens)
            parts += _text_parts(report, position, kept_from)
            parts.append(Part(_kept_fate(chunk), chunk.num_separator_tokens))
            position = kept_from + chunk.num_separator_tokens
    parts += _text_parts(report, position, report.num_prompt_tokens)
    return [part for part in parts if part.num_tokens > 0]


def parts_of_piece(parts: Sequence[Part], piece: PromptPiece) -> list[Part]:
    """Those of the whole prompt's `parts` that lie in `piece`, cut at its ends."""
    first, last, position = piece.start, piece.start + piece.num_tokens, 0
    found = []
    for part in parts:
        start, position = position, position + part.num_tokens
        num_inside = min(position, last) - max(start, first)
        if num_inside > 0:
            found.append(Part(part.fate, num_inside))
    return found


def count_fates(parts: Iterable[Part]) -> dict[Fate, int]:
    """Tokens of each fate that occurs, in the order of `Fate`."""
    counts: Counter[Fate] = Counter()
    for part in parts:
        counts[part.fate] += part.num_tokens
    return {fate: counts[fate] for fate in Fate if counts[fate]}


def cells_of(parts: Sequence[Part], width: int) -> Iterator[tuple[Fate, int]]:
    """(fate, number of cells) for each part, `width` cells in all. Rounding the ends instead of the
    lengths keeps the sum; a part much shorter than a cell may get none."""
    ends = list(accumulate(part.num_tokens for part in parts))
    total, previous = (ends[-1] if ends else 0), 0
    for part, end in zip(parts, ends, strict=True):
        edge = round(end * width / total)
        if edge > previous:
            yield part.fate, edge - previous
        previous = edge


def chunks_in_prompt(report: ReuseReport) -> list[ChunkReport]:
    """Without those that were passed and do not stand in the prompt."""
    return [chunk for chunk in report.chunks if chunk.start >= 0]


def sentences(report: ReuseReport) -> list[str]:
    """What there is to say of the request, the most important first: how much was reused, or why nothing
    was, with the reason that most chunks give."""
    if report.num_reused_tokens:
        return [figures(report), exactness(report), report.why]
    found = [f"Nothing was reused. {report.why}"]
    reasons = Counter(chunk.reason for chunk in report.chunks)
    for reason, count in reasons.most_common(1):
        if reason is not report.reason:
            found.append(f"{count} of {len(report.chunks)} chunks: {reason.sentence}")
    return [*found, figures(report), exactness(report)]


def figures(report: ReuseReport) -> str:
    """Counts, speed and strategy in one line."""
    counts = (
        f"{report.num_reused_tokens} of {report.num_prompt_tokens} prompt tokens reused "
        f"({report.reuse_ratio:.1%}), {report.num_recomputed_tokens} recomputed, "
        f"{report.num_computed_tokens} new"
    )
    speed = f"TTFT {1000 * report.ttft_s:.0f} ms" if report.ttft_s >= 0 else ""
    strategy = f"strategy {report.strategy}" if report.strategy else ""
    return " · ".join(filter(None, (counts, speed, strategy)))


def exactness(report: ReuseReport) -> str:
    """Whether the answer may differ from that of full compute."""
    if report.reason is Reason.REPORT_LOST:
        return "Whether anything was approximated is not known."
    chunks = chunks_in_prompt(report)
    num_moved = sum(Fate.REUSED in count_fates(_chunk_parts(report, chunk)) for chunk in chunks)
    return f"Approximate: {num_moved} of {len(chunks)} chunks." if num_moved else "No approximation."


def document_of(chunk: ChunkReport) -> str:
    """The document's id and the begin of its version, which may be a long hash."""
    if not chunk.doc_id:
        return NONE
    version = chunk.version or ""
    short = version if len(version) <= MAX_VERSION_CHARS else f"{version[:MAX_VERSION_CHARS]}…"
    return f"{chunk.doc_id} ({short})" if short else chunk.doc_id


def decision_of(chunk: ChunkReport) -> str:
    return chunk.decision.value if chunk.start >= 0 else NONE


def _chunk_parts(report: ReuseReport, chunk: ChunkReport) -> list[Part]:
    num_prefix = max(0, min(report.num_prefix_tokens - chunk.start, chunk.num_reused_tokens))
    return [
        Part(Fate.EXACT, num_prefix),
        Part(_kept_fate(chunk), chunk.num_reused_tokens - num_prefix),
        Part(Fate.RECOMPUTED, chunk.num_recomputed_tokens),
        Part(Fate.NEW, chunk.num_computed_tokens),
    ]


def _kept_fate(chunk: ChunkReport) -> Fate:
    return Fate.EXACT if chunk.decision is ChunkDecision.EXACT else Fate.REUSED


def _text_parts(report: ReuseReport, start: int, end: int) -> list[Part]:
    num_prefix = max(0, min(report.num_prefix_tokens, end) - start)
    return [Part(Fate.EXACT, num_prefix), Part(Fate.NEW, end - start - num_prefix)]
