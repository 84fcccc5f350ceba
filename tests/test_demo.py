"""The parts of examples/demo.py that need no engine: its data, its order, its counting, its output."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle
from rich.console import Console

from cachecraft_rag.chunks import ChunkKey
from cachecraft_rag.events import ChunkDecision, ChunkReport, Reason, RequestDecision, ReuseReport
from cachecraft_rag.report_view import Fate
from cachecraft_rag.testing import FakeEngine

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from demo_parts import facts, rag, story, update
from demo_parts.data import Passage, Question, in_turns, load
from demo_parts.facts import Answer, Asked
from demo_parts.view import LOG_WIDTH, View

PASSAGE = Passage("doc", "Warsaw", "The bridge of 1817 is made of stone.")
QUESTION = Question("When was the bridge built?", ("1817",), PASSAGE)


def make_chunk(
    decision: ChunkDecision,
    reason: Reason,
    *,
    reused: int = 0,
    recomputed: int = 0,
    computed: int = 0,
    start: int = 10,
    same_predecessors: bool = False,
) -> ChunkReport:
    return ChunkReport(
        chunk_key=ChunkKey("key"),
        doc_id="doc",
        version="1",
        decision=decision,
        reason=reason,
        start=start,
        num_tokens=reused + recomputed + computed,
        num_reused_tokens=reused,
        num_recomputed_tokens=recomputed,
        num_computed_tokens=computed,
        same_predecessors=same_predecessors,
    )


def make_moved(start: int = 10) -> ChunkReport:
    return make_chunk(ChunkDecision.REPAIRED, Reason.OTHER_PREFIX, reused=80, recomputed=20, start=start)


def make_computed(start: int = 10) -> ChunkReport:
    return make_chunk(ChunkDecision.COMPUTED, Reason.NOT_CACHED, computed=100, start=start)


def make_exact(start: int = 10) -> ChunkReport:
    return make_chunk(
        ChunkDecision.EXACT, Reason.SAME_PREFIX, reused=100, start=start, same_predecessors=True
    )


def make_report(*chunks: ChunkReport, num_prompt_tokens: int = 0) -> ReuseReport:
    num_tokens = num_prompt_tokens or sum(chunk.num_tokens for chunk in chunks) + 20
    reused = sum(chunk.num_reused_tokens for chunk in chunks)
    recomputed = sum(chunk.num_recomputed_tokens for chunk in chunks)
    return ReuseReport(
        request_id="r",
        decision=RequestDecision.REUSE if reused else RequestDecision.FULL,
        reason=chunks[0].reason if chunks else Reason.NO_CHUNKS,
        num_prompt_tokens=num_tokens,
        num_reused_tokens=reused,
        num_recomputed_tokens=recomputed,
        num_computed_tokens=num_tokens - reused - recomputed,
        ttft_s=0.5,
        chunks=chunks,
    )


def make_asked(*chunks: ChunkReport, text: str = "In 1817.") -> Asked:
    report = make_report(*chunks)
    full = make_report(num_prompt_tokens=report.num_prompt_tokens)
    return Asked(QUESTION, Answer(text, report), Answer("In 1817.", full))


def make_view() -> tuple[View, io.StringIO]:
    """A view that prints as into a log."""
    out = io.StringIO()
    return View(Console(file=out, width=LOG_WIDTH, highlight=False)), out


class Fixed(BaseRetriever):
    """Returns these passages to every query."""

    def __init__(self, *passages: Passage) -> None:
        self._nodes = [rag.make_node(passage) for passage in passages]
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=node, score=1.0) for node in self._nodes]


def assert_fits(output: str) -> None:
    assert max(map(len, output.splitlines())) <= LOG_WIDTH


def test_the_data_is_as_large_as_promised_and_holds_its_answers() -> None:
    """At least 40 passages, at least 20 questions in the demo, each answered by its own passage."""
    passages, questions = load()
    assert len({passage.doc_id for passage in passages}) == len(passages) >= 40
    assert len(in_turns(questions, story.NUM_TOPICS)) >= 20
    assert all(question.is_answered_by(question.passage.text) for question in questions)


def test_questions_take_turns_by_topic() -> None:
    """One question of each chosen topic, then the next of each; a topic that has ended is left out."""
    topics = [Passage(name, name, "text") for name in ("a", "b", "c")]
    asked = [Question(f"{p.title}{n}", ("x",), p) for p in topics for n in range(1 if p.title == "a" else 3)]
    assert [question.text for question in in_turns(asked, 2)] == ["a0", "b0", "b1", "b2"]


def test_the_changed_question_is_one_of_those_asked() -> None:
    """The update changes the gold answer of a question whose passage is in the store by then."""
    _, questions = load()
    [question] = [q for q in in_turns(questions, story.NUM_TOPICS) if q.text == update.QUESTION]
    assert question.is_answered_by(update.OLD)
    changed = question.passage.with_text(update.OLD, update.NEW)
    assert update.OLD not in changed.text and update.NEW in changed.text


def test_text_that_does_not_occur_cannot_be_changed() -> None:
    """A change that would change nothing is refused."""
    with pytest.raises(ValueError, match="1900"):
        PASSAGE.with_text("1900", "1901")


def test_only_kept_tokens_of_moved_passages_count() -> None:
    """Recomputed, computed and exact tokens, and those behind the same passages, are no moved ones."""
    same = make_chunk(ChunkDecision.REUSED, Reason.OTHER_PREFIX, reused=40, same_predecessors=True)
    tokens = facts.count_tokens([make_report(make_moved(), make_computed()), make_report(make_exact(), same)])
    assert (tokens.moved, tokens.exact, tokens.recomputed, tokens.computed) == (80, 140, 20, 100)
    assert tokens.moved_share == pytest.approx(80 / 340)


def test_no_tokens_are_no_success() -> None:
    """A run in which no passage was found has a share of 0."""
    assert facts.count_tokens([make_report()]).moved_share == 0.0


def test_prompts_of_different_length_are_not_compared() -> None:
    """A full compute of another prompt is refused."""
    with pytest.raises(ValueError, match="120 and 121"):
        Asked(
            QUESTION,
            Answer("", make_report(make_moved())),
            Answer("", make_report(num_prompt_tokens=121)),
        )


@pytest.mark.parametrize(
    ("later", "faults", "exit_code"),
    [
        (make_moved(), [], 0),
        (make_computed(), [], 1),
        (make_exact(), [], 1),
        (make_moved(), ["the old text was not refused"], 1),
    ],
)
def test_the_exit_code_tells_whether_it_worked(later: ChunkReport, faults: list[str], exit_code: int) -> None:
    """Too little moved after the fifth question, or a fault of the update, ends with 1 and says so."""
    view, out = make_view()
    first = [make_asked(make_computed()) for _ in range(facts.NUM_FIRST)]
    assert story.judge(view, [*first, make_asked(later)], faults, 1.0) == exit_code
    assert ("FAIL: " in out.getvalue()) == bool(exit_code)
    assert_fits(out.getvalue())


def test_the_first_questions_do_not_count() -> None:
    """What is moved among the questions that fill the store does not help to pass."""
    view, _ = make_view()
    first = [make_asked(make_moved()) for _ in range(facts.NUM_FIRST)]
    assert story.judge(view, [*first, make_asked(make_computed())], [], 1.0) == 1


def test_a_question_tells_why_passages_were_computed() -> None:
    """Both answers, the decisions and the reason stand in the log, within its width."""
    view, out = make_view()
    view.asked("1/1", make_asked(make_moved(), make_computed(110), text="In the year 1818, " * 9))
    for expected in (
        "gold answer   1817",
        "full compute",
        "1 computed, 1 repaired",
        Reason.NOT_CACHED.sentence,
        Fate.REUSED.glyph,
    ):
        assert expected in out.getvalue()
    assert_fits(out.getvalue())


def test_a_question_computed_in_full_tells_why() -> None:
    """A request that reused nothing shows the reason of the request."""
    view, out = make_view()
    view.asked("1/1", make_asked())
    assert Reason.NO_CHUNKS.sentence in out.getvalue()


def test_the_table_fits_a_log() -> None:
    """One row per question with its figures, at 100 columns; markup in an answer is shown as it is."""
    view, out = make_view()
    view.table([make_asked(make_moved(), text="[bold]1817[/] " + "and so on " * 20)])
    assert "[bold]1817[/]" in out.getvalue() and "1.0×" in out.getvalue()
    assert_fits(out.getvalue())


def test_full_compute_neither_uses_nor_leaves_anything() -> None:
    """The pipeline to compare with asks the engine for no reuse, no storing and no prefix cache."""
    engine = FakeEngine("In 1817.")
    answer = rag.Pipeline(engine, Fixed(PASSAGE), **rag.FULL_COMPUTE).ask(QUESTION.text)
    assert answer.report.num_reused_tokens == 0
    assert {name: engine.last_call.options[name] for name in rag.FULL_COMPUTE} == rag.FULL_COMPUTE
    assert [chunk.doc_id for chunk in answer.report.chunks] == [PASSAGE.doc_id]


def test_langchain_reuses_what_llama_index_computed() -> None:
    """Both pipelines show the engine the same text of a passage, with the same id and version."""
    engine = FakeEngine("In 1817.")
    [first] = rag.Pipeline(engine, Fixed(PASSAGE)).ask(QUESTION.text).report.chunks
    answer = rag.answer_of(rag.make_chain(engine, Fixed(PASSAGE)).invoke(QUESTION.text))
    [second] = answer.report.chunks
    assert answer.text == "In 1817."
    assert (second.chunk_key, second.doc_id, second.version) == (first.chunk_key, first.doc_id, first.version)
    assert second.num_reused_tokens > 0


def make_update(after: ChunkReport, stale: Reason, num_dropped: int = 1) -> update.Update:
    old = make_chunk(ChunkDecision.COMPUTED, stale, computed=100)
    return update.Update(
        passage=PASSAGE,
        before=Answer("1817", make_report(make_moved())),
        num_dropped=num_dropped,
        after=Answer("1852", make_report(after)),
        again=Answer("1852", make_report(make_exact())),
        stale=Answer("1817", make_report(old)),
    )


def test_a_good_update_has_no_faults() -> None:
    """Old KV dropped, new text computed and then reused, old text refused."""
    assert make_update(make_computed(), Reason.SUPERSEDED_VERSION).faults() == []


@pytest.mark.parametrize(
    ("seen", "fault"),
    [
        (make_update(make_computed(), Reason.SUPERSEDED_VERSION, num_dropped=0), "dropped"),
        (make_update(make_moved(), Reason.SUPERSEDED_VERSION), "not computed"),
        (make_update(make_computed(), Reason.NOT_CACHED), "not refused"),
    ],
)
def test_an_update_that_kept_old_kv_is_found_out(seen: update.Update, fault: str) -> None:
    """Each way in which old KV could live on is a fault of its own."""
    [found] = seen.faults()
    assert fault in found
