"""One document changes: its old KV is gone, and the answer comes from the new text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cachecraft_rag import CacheCraftEngine, Chunk
from cachecraft_rag.events import ChunkDecision, ChunkReport, Reason, ReuseReport
from demo_parts.data import Passage, Question
from demo_parts.facts import Answer
from demo_parts.rag import Pipeline, make_index, make_node
from demo_parts.view import View, describe

QUESTION = "When was Warsaw's first stock exchange established?"
OLD, NEW = "1817", "1852"


@dataclass(frozen=True, slots=True)
class Update:
    """What was seen of the passage, before and after it changed.

    Attributes:
        before, after, again: answers from the old text, from the new one, and from the new one once more.
        stale: the answer over an index that still holds the old text.
        num_dropped: stored KV records that went with the old text.
    """

    passage: Passage
    before: Answer
    num_dropped: int
    after: Answer
    again: Answer
    stale: Answer

    def faults(self) -> list[str]:
        """What did not go as it must; empty if the old KV is gone and the new is in use."""
        doc_id = self.passage.doc_id
        after, again, stale = (chunk_of(a.report, doc_id) for a in (self.after, self.again, self.stale))
        checks = {
            "no stored KV was dropped": self.num_dropped > 0,
            "the new text was not computed": after is not None and after.reason is Reason.NOT_CACHED,
            "the new text was not reused": again is not None and again.decision is not ChunkDecision.COMPUTED,
            "the old text was not refused": stale is not None and stale.reason is Reason.SUPERSEDED_VERSION,
        }
        return [fault for fault, is_right in checks.items() if not is_right]


def chunk_of(report: ReuseReport, doc_id: str) -> ChunkReport | None:
    return next((chunk for chunk in report.chunks if chunk.doc_id == doc_id), None)


def run(
    engine: CacheCraftEngine, old: Pipeline, passages: Sequence[Passage], question: Question, view: View
) -> Update:
    """Ask, change the document, ask again, and ask once over the index that was not updated.

    Args:
        old: the pipeline over the index of the unchanged passages.
    """
    passage, changed = question.passage, question.passage.with_text(OLD, NEW)
    view.line(f"One passage says {OLD}; it is changed to say {NEW}. Watch what is done with it.")
    before = _ask(old, "old", question, OLD, view)
    num_before = num_records(engine)
    num_dropped = replace_passage(engine, changed)
    view.line(
        f"\nengine.replace(...) dropped {num_dropped} record(s) of the old text: the store held {num_before} "
        f"and holds {num_records(engine)}.\nThe passages are indexed again; those that did not change keep "
        "their KV.",
    )
    new = Pipeline(engine, make_index([changed if p is passage else p for p in passages]))
    after = _ask(new, "new", question, NEW, view)
    again = _ask(new, "again", question, NEW, view)
    view.line("\nA retriever whose index was not updated still finds the old text. No KV is used for it:")
    stale = _ask(old, "stale", question, OLD, view)
    return Update(passage, before, num_dropped, after, again, stale)


def replace_passage(engine: CacheCraftEngine, passage: Passage) -> int:
    """Make this text the current version of its document; the number of records that were dropped."""
    # The version that the adapters report too: the hash of LlamaIndex's node.
    return engine.replace(passage.doc_id, make_node(passage).hash, [Chunk(passage.content)])


def num_records(engine: CacheCraftEngine) -> int:
    return int(engine.stats()["num_records"])


def _ask(pipeline: Pipeline, label: str, question: Question, gold: str, view: View) -> Answer:
    answer = pipeline.ask(question.text)
    view.question(label, question, gold)
    view.answered(answer)
    chunk = chunk_of(answer.report, question.passage.doc_id)
    view.detail("this passage", describe(chunk) if chunk else "was not retrieved", "bold")
    return answer
