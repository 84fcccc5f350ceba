"""A report in a notebook: HTML with its styles inline and no script, so that it shows wherever it is saved.

Colours are laid over the notebook's own background and text colour: both a light and a dark theme stay
readable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

from cachecraft_rag.events import ChunkReport, PromptPiece, ReuseReport
from cachecraft_rag.report_view import (
    NONE,
    Fate,
    Part,
    count_fates,
    decision_of,
    document_of,
    parts_of,
    parts_of_piece,
    sentences,
)

MAX_SHOWN_CHARS = 400
_LINE = "1px solid rgba(128,128,128,.4)"
_HEADINGS = ("#", "document", "start", "tokens", "decision", "reused", "recomputed", "new", "from", "why")


def report_html(report: ReuseReport) -> str:
    """Sentences and figures, the prompt in colours if the report knows it, and a row per chunk."""
    first, *others = sentences(report)
    parts = parts_of(report)
    content = (
        _div(escape(first), "font-size:115%;font-weight:bold"),
        *(_div(escape(sentence)) for sentence in others),
        _bar(parts, "height:14px;margin:6px 0"),
        _legend(count_fates(parts)),
        _prompt(report, parts),
        _table(report.chunks),
    )
    # Without the classes, a notebook would typeset what stands between two dollar signs in a document.
    return (
        '<div class="tex2jax_ignore mathjax_ignore" style="color:inherit;line-height:1.45;max-width:70em">'
        f"{''.join(content)}</div>"
    )


def _legend(counts: Mapping[Fate, int]) -> str:
    """Every fate with its meaning, also those that do not occur: colours mean the same in each report."""
    return "".join(
        _div(f"{_badge(fate, counts.get(fate, 0))} {escape(fate.meaning)}", "font-size:90%") for fate in Fate
    )


def _prompt(report: ReuseReport, parts: list[Part]) -> str:
    if not report.pieces:
        return ""
    numbers = {chunk.start: number for number, chunk in enumerate(report.chunks, start=1)}
    note = _div(
        "Prompt: each piece has the colour of what became of most of its tokens. The bar above a mixed piece "
        "shows the shares, not the places: a report counts recomputed tokens and does not place them.",
        "font-size:90%;margin-top:10px",
    )
    pieces = (
        _piece(piece, parts_of_piece(parts, piece), report, numbers.get(piece.start))
        for piece in report.pieces
    )
    return note + _div("".join(pieces), f"border:{_LINE};padding:4px;max-height:40em;overflow:auto")


def _piece(piece: PromptPiece, parts: list[Part], report: ReuseReport, number: int | None) -> str:
    counts = count_fates(parts)
    colour = max(counts, key=counts.__getitem__, default=Fate.NEW).colour
    name = "text" if number is None else f"chunk {number}: {document_of(report.chunks[number - 1])}"
    badges = " ".join(_badge(fate, count) for fate, count in counts.items())
    bar = _bar(parts, "height:5px;max-width:24em;margin:2px 0") if len(counts) > 1 else ""
    return _div(
        _div(f"<b>{escape(name)}</b> {badges}", "font-size:85%") + bar + _text(piece.text),
        f"border-left:6px solid {colour};background:{colour}26;padding:2px 8px;margin:2px 0",
    )


def _text(text: str) -> str:
    style = "white-space:pre-wrap;overflow-wrap:anywhere"
    if not text.strip():
        return ""
    if len(text) <= MAX_SHOWN_CHARS:
        return _div(escape(text.strip("\n")), style)
    half = MAX_SHOWN_CHARS // 2
    short = escape(f"{text[:half]} … {text[-half:]}")
    summary = f'<summary style="cursor:pointer;font-size:85%">all {len(text)} characters</summary>'
    return _div(short, style) + f"<details>{summary}{_div(escape(text), style)}</details>"


def _bar(parts: Iterable[Part], style: str) -> str:
    fields = (
        f'<div title="{part.num_tokens} {part.fate.label}" '
        f'style="flex:{part.num_tokens} 0 0;background:{part.fate.colour}"></div>'
        for part in parts
    )
    return _div("".join(fields), f"display:flex;{style}")


def _badge(fate: Fate, count: int) -> str:
    style = f"background:{fate.colour};color:#000;border-radius:3px;padding:0 5px;white-space:nowrap"
    return f'<span style="{style}">{count} {fate.label}</span>'


def _table(chunks: Iterable[ChunkReport]) -> str:
    rows = "".join(_row(_cells(number, chunk), "td") for number, chunk in enumerate(chunks, start=1))
    if not rows:
        return ""
    # A page in quirks mode does not hand its text colour down to tables.
    style = "color:inherit;border-collapse:collapse;min-width:62em;font-size:90%"
    table = f'<table style="{style}">{_row(_HEADINGS, "th")}{rows}</table>'
    return _div(table, "overflow-x:auto;margin-top:10px")


def _row(cells: Iterable[object], tag: str) -> str:
    style = f"text-align:left;vertical-align:top;padding:2px 8px;border-bottom:{_LINE}"
    return "<tr>" + "".join(f'<{tag} style="{style}">{escape(str(cell))}</{tag}>' for cell in cells) + "</tr>"


def _cells(number: int, chunk: ChunkReport) -> tuple[object, ...]:
    return (
        number,
        document_of(chunk),
        chunk.start if chunk.start >= 0 else NONE,
        chunk.num_tokens,
        decision_of(chunk),
        chunk.num_reused_tokens,
        chunk.num_recomputed_tokens,
        chunk.num_computed_tokens,
        chunk.tier or NONE,
        chunk.reason.sentence,
    )


def _div(content: str, style: str = "") -> str:
    return f'<div style="{style}">{content}</div>' if style else f"<div>{content}</div>"
