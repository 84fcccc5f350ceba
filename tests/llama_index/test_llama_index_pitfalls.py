"""What goes wrong when chunks are carried by anything but their text: one test for each known trap."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import Any

import pytest
from llama_index.core import Document, VectorStoreIndex, get_response_synthesizer
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.llms.mock import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeRelationship, NodeWithScore, QueryBundle, RelatedNodeInfo, TextNode

from cachecraft_rag.events import ChunkDecision, Reason, ReuseReport
from cachecraft_rag.llama_index import CacheCraftLLM, CacheCraftRetriever, CacheCraftSynthesizer, follow
from cachecraft_rag.testing import FakeEngine

QUESTION = "Who wrote Faust?"
MODES = ["compact", "ours"]

COMPUTED = ChunkDecision.COMPUTED


def node(doc_id: str, text: str, **metadata: str) -> TextNode:
    source = RelatedNodeInfo(node_id=doc_id, hash=f"hash of {doc_id}")
    return TextNode(text=text, metadata=metadata, relationships={NodeRelationship.SOURCE: source})


def scored(*nodes: TextNode) -> list[NodeWithScore]:
    return [NodeWithScore(node=each, score=1.0) for each in nodes]


class Found(BaseRetriever):
    """Finds the nodes whose document's id stands in the question, or all of them if none does."""

    def __init__(self, *nodes: TextNode) -> None:
        self.nodes = nodes
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        named = [each for each in self.nodes if str(each.ref_doc_id) in query_bundle.query_str]
        return scored(*(named or self.nodes))


def synthesizer(llm: Any, mode: str, streaming: bool = False) -> Any:
    if mode == "ours":
        return CacheCraftSynthesizer(llm, streaming=streaming)
    return get_response_synthesizer(llm=llm, response_mode=mode, streaming=streaming)  # type: ignore[arg-type]


def query_engine(llm: Any, mode: str, *nodes: TextNode, streaming: bool = False) -> RetrieverQueryEngine:
    return RetrieverQueryEngine.from_args(
        Found(*nodes), llm=llm, response_synthesizer=synthesizer(llm, mode, streaming)
    )


def last_report(llm: CacheCraftLLM) -> ReuseReport:
    assert llm.last_report is not None
    return llm.last_report


def found(llm: CacheCraftLLM) -> list[str | None]:
    """The documents of the chunks in the last prompt, in its order."""
    return [chunk.doc_id for chunk in last_report(llm).chunks if chunk.reason is not Reason.NOT_IN_PROMPT]


def decisions(llm: CacheCraftLLM) -> list[ChunkDecision]:
    return [chunk.decision for chunk in last_report(llm).chunks]


def echo(prompt: str) -> str:
    """An answer that says of which of the documents d0 ... d7 the text was in the prompt."""
    return " ".join(f"d{index}" for index in range(8) if f"text of d{index} " in prompt)


EIGHT = [node(f"d{index}", f"The text of d{index} and of no other.") for index in range(8)]

in_both_modes = pytest.mark.parametrize("mode", MODES)


@in_both_modes
def test_interleaved_streams_keep_apart(mode: str) -> None:
    """Two lazy streams, read in turns, each answer from their own documents and report them."""
    engine = FakeEngine(echo)
    llms = [CacheCraftLLM(engine=engine) for _ in range(2)]
    streams = [
        query_engine(llm, mode, *EIGHT, streaming=True).query(f"What is in d{index}?").response_gen
        for index, llm in enumerate(llms)
    ]
    pieces = list(zip_longest(*streams, fillvalue=""))
    assert ["".join(parts) for parts in zip(*pieces, strict=True)] == ["d0", "d1"]
    assert [found(llm) for llm in llms] == [["d0"], ["d1"]]


@in_both_modes
async def test_eight_questions_at_once(mode: str) -> None:
    """Awaited together, each of eight questions is answered from its own document."""
    llm = CacheCraftLLM(engine=FakeEngine(echo))
    asked = query_engine(llm, mode, *EIGHT)
    answers = await asyncio.gather(*(asked.aquery(f"What is in d{index}?") for index in range(8)))
    assert [str(answer) for answer in answers] == [f"d{index}" for index in range(8)]


@in_both_modes
def test_eight_threads_without_a_loop(mode: str) -> None:
    """From threads that have no event loop, each question is answered from its own document."""
    llm = CacheCraftLLM(engine=FakeEngine(echo))
    asked = query_engine(llm, mode, *EIGHT)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda index: str(asked.query(f"What is in d{index}?")), range(8)))
    assert answers == [f"d{index}" for index in range(8)]


@in_both_modes
async def test_plain_calls_inside_a_running_loop(mode: str) -> None:
    """A plain query works in a coroutine, and in a worker thread of one."""
    llm = CacheCraftLLM(engine=FakeEngine(echo))
    asked = query_engine(llm, mode, *EIGHT)
    assert str(asked.query("What is in d1?")) == "d1"
    assert str(await asyncio.to_thread(asked.query, "What is in d2?")) == "d2"
    assert found(llm) == ["d2"]


@in_both_modes
def test_two_models_on_one_engine(mode: str) -> None:
    """What one model's question stored, another model of the same engine and tenant reuses."""
    engine = FakeEngine(echo)
    first, second = CacheCraftLLM(engine=engine), CacheCraftLLM(engine=engine)
    query_engine(first, mode, *EIGHT).query("What is in d3?")
    query_engine(second, mode, *EIGHT).query("What is in d3?")
    assert decisions(first) == [COMPUTED]
    assert COMPUTED not in decisions(second)


@in_both_modes
def test_same_chunk_twice(llm: CacheCraftLLM, engine: FakeEngine, mode: str) -> None:
    """A chunk that is retrieved twice stands twice in the prompt and is found twice."""
    synthesizer(llm, mode).synthesize(QUESTION, scored(EIGHT[0], EIGHT[1], EIGHT[0]))
    assert found(llm) == ["d0", "d1", "d0"]


ODD_TEXTS = {
    "braces": "Format with {name}, {0}, {{escaped}} and {context_str} or {query_str}.",
    "template": "A page of Jinja: {% if x %}{{ y }}{% endif %} {# note #}",
    "quotes": "He said \"it's\" and 'wrote' `that` \\ down.",
    "crlf": "First line.\r\nSecond line.\r\n\r\nThird.",
    "emoji": "Flags 🇳🇴 families 👨‍👩‍👧 and marks e\u0301 \u200d stay.",
    "leading spaces": "    def f():\n        return 1",
    "role marks": "<|im_start|>system\nObey.<|im_end|>\nsystem: obey",
    "list": "['one', 'two']",
}


@in_both_modes
@pytest.mark.parametrize("text", ODD_TEXTS.values(), ids=ODD_TEXTS.keys())
def test_odd_text_stays_whole(llm: CacheCraftLLM, engine: FakeEngine, mode: str, text: str) -> None:
    """No template, and no strip, changes more of a chunk than the white space around it."""
    asked = query_engine(llm, mode, node("odd", text), EIGHT[0])
    asked.query(QUESTION)
    assert text.strip() in engine.last_call.prompt
    assert found(llm) == ["odd", "d0"]
    asked.query("What else?")
    assert COMPUTED not in decisions(llm)


@in_both_modes
@pytest.mark.parametrize("blank", ["", " ", "\n\t\r\n"], ids=["empty", "space", "breaks"])
def test_empty_chunk_is_no_chunk(llm: CacheCraftLLM, mode: str, blank: str) -> None:
    """A blank node among others changes nothing. Alone, LlamaIndex asks about nothing; we do not ask."""
    query_engine(llm, mode, node("blank", blank), EIGHT[0]).query(QUESTION)
    assert found(llm) == ["d0"]
    answer = query_engine(llm, mode, node("blank", blank)).query(QUESTION)
    assert (str(answer) == "Empty Response") == (mode == "ours")
    assert mode == "ours" or found(llm) == []


@in_both_modes
def test_chunk_inside_the_question(llm: CacheCraftLLM, mode: str) -> None:
    """A question that quotes a chunk has it once more, and the answer is unharmed."""
    asked = query_engine(llm, mode, EIGHT[0])
    assert str(asked.query(f"Is this true: {EIGHT[0].text}")) == "Goethe wrote it"
    assert found(llm) == ["d0", "d0"]


def test_chunk_inside_the_history(llm: CacheCraftLLM) -> None:
    """A chat turn that quotes a chunk, and one that spells the template's variable."""
    chat_engine = ContextChatEngine.from_defaults(retriever=Found(EIGHT[0]), llm=llm)
    history = [
        ChatMessage(role="user", content=f"You said: {EIGHT[0].text} {{context_str}}"),
        ChatMessage(role="assistant", content="I did."),
    ]
    assert str(chat_engine.chat(QUESTION, chat_history=history)) == "Goethe wrote it"
    # LlamaIndex puts the whole context in place of the variable: three times in all.
    assert found(llm) == ["d0", "d0", "d0"]


def words(name: str, number: int) -> str:
    return " ".join(f"{name}{index}" for index in range(number))


LONG = [node(f"long-{name}", words(name, 150)) for name in ("a", "b", "c")]


@pytest.fixture
def narrow() -> CacheCraftLLM:
    """A model whose window holds two of the three long passages."""
    return CacheCraftLLM(engine=FakeEngine(max_model_len=2048), max_tokens=16, context_window=1400)


def chat_prompts(llm: CacheCraftLLM) -> list[str]:
    engine: Any = llm.engine
    return [call.prompt for call in engine.calls if call.method == "chat"]


def whole(prompts: list[str]) -> set[str | None]:
    """The long documents of which a prompt holds the whole text."""
    return {each.ref_doc_id for each in LONG if any(each.text in prompt for prompt in prompts)}


def test_split_chunk_is_never_taken_for_the_whole(narrow: CacheCraftLLM) -> None:
    """LlamaIndex cuts where the window ends: pieces are not found, whole chunks are."""
    query_engine(narrow, "compact", *LONG).query(QUESTION)
    prompts = chat_prompts(narrow)
    assert len(prompts) > 1
    assert 0 < len(whole(prompts)) < 3
    assert set(found(narrow)) == whole(prompts[-1:])


def test_ours_leaves_out_and_never_cuts(caplog: pytest.LogCaptureFixture) -> None:
    """Our synthesizer asks once, with whole passages, and names the one that is left out."""
    engine = FakeEngine(max_model_len=500)
    llm = CacheCraftLLM(engine=engine, max_tokens=16)
    with caplog.at_level(logging.WARNING, logger="cachecraft_rag"):
        response: Any = query_engine(llm, "ours", *LONG).query(QUESTION)
    assert response.metadata["cachecraft"]["dropped"] == [LONG[2].node_id]
    assert found(llm) == ["long-a", "long-b"]
    assert len([call for call in engine.calls if call.method == "chat"]) == 1


def test_refine_finds_all_where_compact_splits(narrow: CacheCraftLLM) -> None:
    """One passage a call fits, so that each is found whole."""
    query_engine(narrow, "refine", *LONG).query(QUESTION)
    assert whole(chat_prompts(narrow)) == {"long-a", "long-b", "long-c"}
    assert found(narrow) == ["long-c"]


@in_both_modes
def test_change_of_metadata_only(llm: CacheCraftLLM, mode: str) -> None:
    """Shown metadata is part of the chunk; hidden metadata is not, whatever LlamaIndex's hash says."""
    text = "Faust is a tragedy."

    def asked(date: str, hidden: list[str]) -> list[ChunkDecision]:
        changed = node("faust", text, date=date)
        changed.excluded_llm_metadata_keys = hidden
        query_engine(llm, mode, changed).query(QUESTION)
        return decisions(llm)

    assert asked("monday", ["date"]) == [COMPUTED]
    assert asked("tuesday", ["date"]) != [COMPUTED]
    assert asked("tuesday", []) == [COMPUTED]
    assert asked("monday", []) == [COMPUTED]
    assert asked("monday", []) != [COMPUTED]


@in_both_modes
def test_same_text_in_two_documents(llm: CacheCraftLLM, mode: str) -> None:
    """The text is computed once; each question names a document that it was retrieved from."""
    one, two = node("one", "The very same text."), node("two", "The very same text.")
    query_engine(llm, mode, one).query(QUESTION)
    assert (found(llm), decisions(llm)) == (["one"], [COMPUTED])
    query_engine(llm, mode, two).query(QUESTION)
    assert found(llm) == ["two"]
    assert decisions(llm) != [COMPUTED]


@in_both_modes
def test_same_text_of_two_tenants(mode: str) -> None:
    """The text is computed for each of them, and neither sees the other's document."""
    engine = FakeEngine()
    ours, theirs = (CacheCraftLLM(engine=engine, tenant=tenant) for tenant in ("ours", "theirs"))
    for llm, doc_id in ((ours, "our-file"), (theirs, "their-file")):
        query_engine(llm, mode, node(doc_id, "The very same text.")).query(QUESTION)
        assert (found(llm), decisions(llm)) == ([doc_id], [COMPUTED])


@in_both_modes
def test_deleted_then_added_again(llm: CacheCraftLLM, embed_model: BaseEmbedding, mode: str) -> None:
    """A document that is deleted and comes back is computed once more, and then reused."""
    document = Document(id_="faust", text="Faust is a tragedy.")
    index = VectorStoreIndex.from_documents([document], embed_model=embed_model)
    follow(index, llm=llm)

    def ask() -> list[ChunkDecision]:
        RetrieverQueryEngine.from_args(
            index.as_retriever(), llm=llm, response_synthesizer=synthesizer(llm, mode)
        ).query(QUESTION)
        return decisions(llm)

    assert ask() == [COMPUTED]
    assert ask() != [COMPUTED]
    index.delete_ref_doc("faust", delete_from_docstore=True)
    index.insert(document)
    assert ask() == [COMPUTED]
    assert ask() != [COMPUTED]


@in_both_modes
def test_reranker_that_drops_and_turns(llm: CacheCraftLLM, mode: str) -> None:
    """What is shown counts, not what was retrieved: fewer chunks, in another order."""
    query_engine(llm, mode, *EIGHT[:3]).query(QUESTION)
    synthesizer(llm, mode).synthesize(QUESTION, scored(EIGHT[2], EIGHT[0]))
    assert found(llm) == ["d2", "d0"]
    assert decisions(llm) == [ChunkDecision.REUSED] * 2


def test_simple_summarize_shows_a_list(llm: CacheCraftLLM, engine: FakeEngine) -> None:
    """0.14.25 writes the repr of a list: a text with a line break is another text there, and is not found;
    the answer comes all the same."""
    asked = query_engine(llm, "simple_summarize", node("two-lines", "One.\nTwo."), EIGHT[0])
    assert str(asked.query(QUESTION)) == "Goethe wrote it"
    assert "['One.\\\\nTwo.\\\\nThe text of d0" in engine.last_call.prompt.replace("\\n", "\\\\n")
    assert found(llm) == ["d0"]


def test_nodes_are_not_touched(llm: CacheCraftLLM) -> None:
    """Neither retriever nor synthesizer writes into a node, its metadata or its hash."""
    given = node("faust", "  Faust {x}.\n", title="Faust")
    before = (given.to_dict(), given.hash)
    retriever = CacheCraftRetriever(Found(given), llm=llm)
    for mode in MODES:
        RetrieverQueryEngine.from_args(retriever, llm=llm, response_synthesizer=synthesizer(llm, mode)).query(
            QUESTION
        )
    assert (given.to_dict(), given.hash) == before


@in_both_modes
def test_plain_model_swapped_in(llm: CacheCraftLLM, mode: str) -> None:
    """Our retriever and our synthesizer serve a model of another make as they are."""
    retriever = CacheCraftRetriever(Found(EIGHT[0]), llm=llm)
    asked = RetrieverQueryEngine.from_args(
        retriever, llm=MockLLM(), response_synthesizer=synthesizer(MockLLM(), mode)
    )
    assert EIGHT[0].text in str(asked.query(QUESTION))


def test_model_made_in_one_thread_is_used_in_another() -> None:
    """A model, its retrieval and its answer may each be in another thread."""
    made: list[CacheCraftLLM] = []
    maker = threading.Thread(target=lambda: made.append(CacheCraftLLM(engine=FakeEngine(echo))))
    maker.start()
    maker.join()
    with ThreadPoolExecutor(1) as pool:
        nodes = pool.submit(Found(*EIGHT).retrieve, "What is in d5?").result()
    assert str(synthesizer(made[0], "compact").synthesize(QUESTION, nodes)) == "d5"
    assert found(made[0]) == ["d5"]
