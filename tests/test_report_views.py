"""What a report shows in a notebook and in a terminal, and that its numbers add up there."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from rich.console import Console

from cachecraft_rag.chunks import Chunk, ChunkKey
from cachecraft_rag.engine.api import Completion
from cachecraft_rag.events import (
    ChunkDecision,
    ChunkReport,
    PromptPiece,
    Reason,
    RequestDecision,
    ReuseReport,
)
from cachecraft_rag.report_html import MAX_SHOWN_CHARS
from cachecraft_rag.report_view import (
    Fate,
    Part,
    cells_of,
    count_fates,
    document_of,
    exactness,
    figures,
    parts_of,
    parts_of_piece,
    sentences,
)
from cachecraft_rag.testing import FakeEngine

EXACT = (ChunkDecision.EXACT, Reason.SAME_PREFIX, (100, 0, 0))
REUSED = (ChunkDecision.REUSED, Reason.OTHER_PREFIX, (100, 0, 0))
REPAIRED = (ChunkDecision.REPAIRED, Reason.OTHER_PREFIX, (80, 20, 0))
COMPUTED = (ChunkDecision.COMPUTED, Reason.NOT_CACHED, (0, 0, 100))
ALL_DECISIONS = (EXACT, REUSED, REPAIRED, COMPUTED)
DOCUMENTS = [Chunk("Warsaw lies on the Vistula.", "warsaw", "2"), Chunk("Lyon lies on the Rhône.", "lyon")]
ANSWERED = "Answer: the Vistula."


def make_chunk(kind: tuple[ChunkDecision, Reason, tuple[int, int, int]], **fields: Any) -> ChunkReport:
    decision, reason, (reused, recomputed, computed) = kind
    facts = {
        "chunk_key": ChunkKey("key"),
        "doc_id": "doc",
        "version": "1",
        "decision": decision,
        "reason": reason,
        "start": 10,
        "num_tokens": reused + recomputed + computed,
        "num_reused_tokens": reused,
        "num_recomputed_tokens": recomputed,
        "num_computed_tokens": computed,
        **fields,
    }
    return ChunkReport(**facts)


def make_report(*chunks: ChunkReport, num_outside: int = 0, **fields: Any) -> ReuseReport:
    """Ten tokens of text before the first chunk, ten between two, and ten after the last.

    Args:
        num_outside: reused tokens that are in none of the chunks.
    """
    placed = [c if c.start < 0 else replace(c, start=10 + 110 * i) for i, c in enumerate(chunks)]
    num_tokens = sum(chunk.num_tokens + 10 for chunk in placed if chunk.start >= 0) + 10
    reused = num_outside + sum(chunk.num_reused_tokens for chunk in placed)
    recomputed = sum(chunk.num_recomputed_tokens for chunk in placed)
    facts = {
        "request_id": "r",
        "decision": RequestDecision.REUSE if reused else RequestDecision.FULL,
        "reason": placed[0].reason if placed else Reason.NO_CHUNKS,
        "num_prompt_tokens": num_tokens,
        "num_reused_tokens": reused,
        "num_recomputed_tokens": recomputed,
        "num_computed_tokens": num_tokens - reused - recomputed,
        "chunks": tuple(placed),
        **fields,
    }
    return ReuseReport(**facts)


def with_pieces(report: ReuseReport, texts: Sequence[str]) -> ReuseReport:
    """The report with one text for each stretch of its prompt: text, chunk, text, chunk, …, text."""
    edges = [0, *(e for c in report.chunks for e in (c.start, c.start + c.num_tokens))]
    edges.append(report.num_prompt_tokens)
    spans = zip(edges, edges[1:], texts, strict=False)
    return replace(report, pieces=tuple(PromptPiece(text, start, end - start) for start, end, text in spans))


class Page(HTMLParser):
    """The elements and the visible text of some HTML; refuses elements that are not closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


def page_of(shown: ReuseReport | Completion) -> Page:
    return Page(shown._repr_html_())


def printed(shown: ReuseReport | Completion, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(shown)
    return out.getvalue()


def both(report: ReuseReport) -> list[str]:
    return [page_of(report).text, printed(report, width=400)]


def ask(engine: FakeEngine, chunks: Sequence[Chunk], **options: Any) -> Completion:
    content = "Read:\n\n" + "\n\n".join(chunk.text for chunk in chunks) + "\n\nWhich river?"
    return engine.chat([{"role": "user", "content": content}], chunks=chunks, **options)


def test_parts_are_in_prompt_order() -> None:
    """Prefix, chunks, what came with a chunk, and the text between and after them."""
    moved = make_chunk(REPAIRED, num_separator_tokens=4)
    report = make_report(moved, make_chunk(COMPUTED), make_chunk(EXACT), num_outside=8, num_prefix_tokens=4)
    assert [(part.fate, part.num_tokens) for part in parts_of(report)] == [
        (Fate.EXACT, 4),
        (Fate.NEW, 6),
        (Fate.REUSED, 80),
        (Fate.RECOMPUTED, 20),
        (Fate.REUSED, 4),
        (Fate.NEW, 6),
        (Fate.NEW, 100),
        (Fate.NEW, 10),
        (Fate.EXACT, 100),
        (Fate.NEW, 10),
    ]


def test_a_prefix_that_ends_in_a_chunk_is_exact() -> None:
    """vLLM's own prefix cache may hold the begin of a chunk of which nothing else is reused."""
    begun = make_chunk((ChunkDecision.COMPUTED, Reason.NOT_CACHED, (22, 0, 78)))
    report = make_report(begun, num_outside=10, num_prefix_tokens=32)
    fates = [(part.fate, part.num_tokens) for part in parts_of(report)]
    assert fates == [(Fate.EXACT, 10), (Fate.EXACT, 22), (Fate.NEW, 78), (Fate.NEW, 10)]
    assert exactness(report) == "No approximation."


@pytest.mark.parametrize("kinds", [(), ALL_DECISIONS, ALL_DECISIONS[::-1], (REPAIRED,) * 3])
def test_fates_add_up_to_the_counts(kinds: Sequence[Any]) -> None:
    """What is shown of a prompt are the report's own counts, and pieces split them without a rest."""
    report = make_report(*map(make_chunk, kinds))
    report = with_pieces(report, [str(number) for number in range(2 * len(kinds) + 1)])
    parts = parts_of(report)
    counts = count_fates(parts)
    assert counts.get(Fate.EXACT, 0) + counts.get(Fate.REUSED, 0) == report.num_reused_tokens
    assert counts.get(Fate.RECOMPUTED, 0) == report.num_recomputed_tokens
    assert counts.get(Fate.NEW, 0) == report.num_computed_tokens
    assert count_fates(p for piece in report.pieces for p in parts_of_piece(parts, piece)) == counts


@pytest.mark.parametrize("sizes", [[1], [5, 0, 5], [1] * 300, [1000, 1, 999]])
def test_a_bar_is_as_wide_as_asked(sizes: list[int]) -> None:
    """The cells add up to the width, whatever the parts are."""
    parts = [Part(Fate.NEW, size) for size in sizes]
    assert sum(count for _, count in cells_of(parts, 80)) == 80


def test_an_empty_prompt_has_no_cells() -> None:
    """Nothing to show is shown as nothing."""
    assert list(cells_of([], 80)) == []


def test_all_decisions_are_shown_with_words() -> None:
    """No fate, decision or reason is told by colour alone."""
    report = make_report(*map(make_chunk, ALL_DECISIONS), ttft_s=0.0454, strategy="focus")
    rows = [line for line in printed(report).splitlines() if "doc (1)" in line]
    for number, decision in enumerate(kind[0].value for kind in ALL_DECISIONS):
        assert decision in rows[number].split()
        assert decision in page_of(report).texts
    for shown in both(report):
        for fate in Fate:
            assert fate.label in shown
        for figure in ("280 of 450", "62.2%", "TTFT 45 ms", "strategy focus", "Approximate: 2 of 4 chunks."):
            assert figure in shown
        for reason in (Reason.SAME_PREFIX, Reason.OTHER_PREFIX, Reason.NOT_CACHED):
            assert reason.sentence in shown


def test_the_legend_counts_every_fate() -> None:
    """Tokens of each fate, zero included."""
    text = page_of(make_report(make_chunk(REPAIRED))).text
    for expected in ("0 exact", "80 reused", "20 recomputed", "20 new"):
        assert expected in text


def test_what_is_not_known_is_not_shown() -> None:
    """A report without a first token, strategy, chunks and pieces shows no empty places for them."""
    report = make_report()
    assert figures(report) == "0 of 10 prompt tokens reused (0.0%), 0 recomputed, 10 new"
    page = page_of(report)
    assert "table" not in page.tags and "Prompt:" not in page.text
    assert "document" not in printed(report)


def test_a_report_of_no_prompt_can_be_shown() -> None:
    """No count is divided by zero."""
    report = ReuseReport("r", RequestDecision.FULL, Reason.PLAN_FAILED)
    for shown in both(report):
        assert "0 of 0 prompt tokens reused (0.0%)" in shown


def test_nothing_reused_is_explained_first() -> None:
    """The request's sentence is the first thing said, then what most chunks say."""
    late = make_chunk((ChunkDecision.COMPUTED, Reason.TOO_SHORT, (0, 0, 100)))
    chunks = [late, late, make_chunk(COMPUTED)]
    report = make_report(*chunks, reason=Reason.TOO_MANY_MISSING, detail="2 of 3 are missing.")
    first = f"Nothing was reused. {Reason.TOO_MANY_MISSING.sentence} 2 of 3 are missing."
    assert sentences(report)[:2] == [first, f"2 of 3 chunks: {Reason.TOO_SHORT.sentence}"]
    for shown in both(report):
        assert shown.strip().startswith(first)
        assert f"2 of 3 chunks: {Reason.TOO_SHORT.sentence}" in shown


def test_the_same_reason_is_not_said_twice() -> None:
    """Where the chunks' reason is the request's, one sentence is enough."""
    report = make_report(make_chunk(COMPUTED))
    first = f"Nothing was reused. {Reason.NOT_CACHED.sentence}"
    assert sentences(report) == [first, figures(report), exactness(report)]


def test_a_long_version_is_shortened() -> None:
    """LangChain's and LlamaIndex's hashes of a text must not fill the table."""
    assert document_of(make_chunk(EXACT, version="0123456789abcdef")) == "doc (0123456789ab…)"
    assert document_of(make_chunk(EXACT, version=None)) == "doc"
    assert document_of(make_chunk(EXACT, version=None, doc_id=None)) == "–"


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (make_report(make_chunk(EXACT), make_chunk(COMPUTED)), "No approximation."),
        (make_report(make_chunk(EXACT), make_chunk(REPAIRED)), "Approximate: 1 of 2 chunks."),
        (
            make_report(make_chunk((ChunkDecision.REPAIRED, Reason.RECOMPUTE_ALL, (0, 100, 0)))),
            "No approximation.",
        ),
        (make_report(reason=Reason.REPORT_LOST), "Whether anything was approximated is not known."),
    ],
    ids=["exact", "moved", "all recomputed", "lost"],
)
def test_approximation_is_said(report: ReuseReport, expected: str) -> None:
    """Only KV that was moved and kept approximates; a lost report claims nothing."""
    assert exactness(report) == expected


def test_a_chunk_that_is_not_in_the_prompt_has_a_row_of_its_own() -> None:
    """It is listed with its reason, has no decision, and takes no place in the bar."""
    absent = make_chunk((ChunkDecision.COMPUTED, Reason.NOT_IN_PROMPT, (0, 0, 0)), doc_id="gone", start=-1)
    report = make_report(make_chunk(EXACT), absent)
    assert sum(part.num_tokens for part in parts_of(report)) == report.num_prompt_tokens
    assert page_of(report).texts[-10:] == [
        *("2", "gone (1)", "–", "0", "–", "0", "0", "0", "–"),
        Reason.NOT_IN_PROMPT.sentence,
    ]
    [row] = [line for line in printed(report).splitlines() if "gone" in line]
    assert row.split() == ["2", "gone", "(1)", "–", "0", "0", "0", "–", "not_in_prompt"]


def test_text_is_escaped() -> None:
    """Markup in documents, their ids, details and answers is text."""
    evil = '<script>alert("x")</script><img src=x onerror=alert(1)>'
    chunk = make_chunk(REPAIRED, doc_id=evil, version=evil)
    report = with_pieces(make_report(chunk, detail=evil, strategy=evil), [evil, evil, evil])
    page = page_of(Completion(evil, (), "stop", report))
    assert not {"script", "img"} & set(page.tags)
    assert page.text.count(evil) >= 7
    assert not any(name.startswith("on") or name in ("src", "href") for name, _ in page.attributes)


def test_rich_markup_is_text() -> None:
    """Brackets in an id or an answer are printed as they are."""
    report = make_report(make_chunk(EXACT, doc_id="[bold]doc[/]"), detail="[red]why[/]")
    shown = printed(Completion("[link]answer[/]", (), "stop", report), width=200)
    assert "[bold]doc[/]" in shown and "[red]why[/]" in shown and "[link]answer[/]" in shown


def test_a_long_text_is_shortened_in_its_middle() -> None:
    """Both ends are shown, and the whole text on demand; a short one is shown as it is."""
    long = "begin " + "word " * 200 + "end"
    page = page_of(with_pieces(make_report(make_chunk(EXACT)), ["short", long, "tail"]))
    half = MAX_SHOWN_CHARS // 2
    assert f"{long[:half]} … {long[-half:]}" in page.texts
    assert long in page.texts and page.tags.count("details") == 1
    assert "short" in page.texts


def test_a_prompt_shows_which_piece_is_which() -> None:
    """Each chunk's text stands below its number, its document and its counts."""
    chunks = make_chunk(REPAIRED, doc_id="first"), make_chunk(COMPUTED, doc_id="second")
    texts = page_of(with_pieces(make_report(*chunks), ["head", "one", "\n\n", "two", "tail"])).texts
    start = texts.index("chunk 1: first (1)")
    shown = [text for text in texts[start : texts.index("tail")] if text.strip()]
    assert shown == [
        *("chunk 1: first (1)", "80 reused", "20 recomputed", "one"),
        *("text", "10 new"),
        *("chunk 2: second (1)", "100 new", "two"),
        *("text", "10 new"),
    ]


@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_terminal_is_not_exceeded(width: int) -> None:
    """Bar, sentences and table fit, and the bar takes the whole width."""
    report = make_report(*map(make_chunk, ALL_DECISIONS))
    lines = printed(report, width).splitlines()
    assert max(map(len, lines)) == width
    assert any(len(line) == width and set(line) <= {fate.glyph for fate in Fate} for line in lines)


def test_a_fake_engine_shows_its_prompt() -> None:
    """Pieces join to the prompt, tile its tokens, and each chunk's report names one of them."""
    engine = FakeEngine(ANSWERED)
    for chunks in (DOCUMENTS, DOCUMENTS[::-1]):
        completion = ask(engine, chunks)
        pieces = completion.report.pieces
        assert "".join(piece.text for piece in pieces) == engine.last_call.prompt
        ends = [piece.start + piece.num_tokens for piece in pieces]
        assert [piece.start for piece in pieces] == [0, *ends[:-1]]
        assert ends[-1] == completion.num_prompt_tokens == completion.report.num_prompt_tokens
        at = {(piece.start, piece.num_tokens): piece.text for piece in pieces}
        assert [at[c.start, c.num_tokens] for c in completion.report.chunks] == [c.text for c in chunks]
    for shown in (page_of(completion).text, printed(completion)):
        assert ANSWERED in shown and "Approximate: 2 of 2 chunks." in shown


def test_data_holds_no_prompt_text() -> None:
    """Neither the plain data nor `repr` of a report tells what was asked or read, and both ways agree."""
    report = ask(FakeEngine(ANSWERED), DOCUMENTS).report
    assert report.pieces
    for written in (json.dumps(report.to_dict()), repr(report)):
        assert "Vistula" not in written and "river" not in written and "pieces" not in written
    returned = ReuseReport.from_dict(report.to_dict())
    assert returned == report and not returned.pieces


def test_reports_of_before_can_be_read() -> None:
    """Data without the counts that came later is a report with none of them."""
    data = make_report(make_chunk(EXACT)).to_dict()
    del data["num_prefix_tokens"], data["chunks"][0]["num_separator_tokens"]
    assert ReuseReport.from_dict(data) == make_report(make_chunk(EXACT))
