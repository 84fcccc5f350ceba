"""Whole chains: retriever, prompt, model and parser, with the fake engine."""

from __future__ import annotations

import functools
import operator
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_classic.chains import create_history_aware_retriever
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel, FakeListLLM
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

import cachecraft_rag
from cachecraft_rag.chunks import Chunk
from cachecraft_rag.errors import InvalidRequestError
from cachecraft_rag.events import ChunkDecision, Reason, ReuseReport
from cachecraft_rag.langchain import CacheCraftRetriever, ChatCacheCraft, create_cachecraft_rag_chain
from cachecraft_rag.testing import FakeEngine

DOCS = Path(__file__).parents[2] / "docs" / "langchain.md"
PROMPT = ChatPromptTemplate.from_messages([("system", "Use this:\n{context}"), ("human", "{question}")])
LIBRARY = {
    "bridge": [Document("The bridge is from 1987.", id="b1"), Document("It has {three} arches.\n", id="b2")],
    "river": [Document("It has {three} arches.\n", id="b2"), Document("  The river is long.", id="r1")],
}


def format_docs(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def make_chain(llm: ChatCacheCraft, library: dict[str, list[Document]] = LIBRARY) -> Runnable[str, AIMessage]:
    """The usual chain, over a retriever whose queries are the keys of `library`."""
    base = RunnableLambda(lambda query: library[query])
    retriever = CacheCraftRetriever(base_retriever=base, llm=llm)
    return {"context": retriever | format_docs, "question": RunnablePassthrough()} | PROMPT | llm


def report_of(message: AIMessage) -> ReuseReport:
    return ReuseReport.from_dict(message.response_metadata["cachecraft"])


def assert_chunks(message: AIMessage, expected: list[tuple[str, ChunkDecision]]) -> None:
    """The document ids in prompt order, with what was done with each."""
    assert [(chunk.doc_id, chunk.decision) for chunk in report_of(message).chunks] == expected


def test_chunks_are_found_in_the_chains_prompt() -> None:
    """The first question computes its chunks; a later one reuses what it has in common."""
    chain = make_chain(ChatCacheCraft(engine=FakeEngine()))
    assert_chunks(chain.invoke("bridge"), [("b1", ChunkDecision.COMPUTED), ("b2", ChunkDecision.COMPUTED)])
    assert_chunks(chain.invoke("river"), [("b2", ChunkDecision.REUSED), ("r1", ChunkDecision.COMPUTED)])


async def test_chunks_are_found_in_async_and_streams() -> None:
    """The asynchronous and the streamed chain find the same chunks."""
    chain = make_chain(ChatCacheCraft(engine=FakeEngine()))
    exact = [("b1", ChunkDecision.EXACT), ("b2", ChunkDecision.EXACT)]
    chain.invoke("bridge")
    *_, streamed = chain.stream("bridge")
    *_, astreamed = [chunk async for chunk in chain.astream("bridge")]
    for message in (await chain.ainvoke("bridge"), streamed, astreamed):
        assert_chunks(message, exact)


async def test_parsed_chain_streams_text() -> None:
    """Behind a parser the answer is text and arrives in pieces; the report is on the model."""
    llm = ChatCacheCraft(engine=FakeEngine("in 1987 then"))
    chain = make_chain(llm) | StrOutputParser()
    assert chain.invoke("bridge") == "in 1987 then"
    assert [text for text in chain.stream("bridge") if text] == ["in", " 1987", " then"]
    assert [text async for text in chain.astream("bridge") if text] == ["in", " 1987", " then"]
    assert llm.last_report is not None and llm.last_report.num_reused_tokens > 0


def test_a_batch_in_threads_keeps_documents_apart() -> None:
    """Eight questions at once: each answer and report is about its own document."""
    library = {f"q{i}": [Document(f"Document number {i} speaks.", id=str(i))] for i in range(8)}
    chain = make_chain(ChatCacheCraft(engine=FakeEngine(lambda prompt: prompt)), library)
    answers = chain.batch(list(library), {"max_concurrency": 8})
    for i, answer in enumerate(answers):
        assert f"Document number {i} speaks." in answer.content
        assert_chunks(answer, [(str(i), ChunkDecision.COMPUTED)])


async def test_an_async_batch_keeps_documents_apart() -> None:
    """The same on one event loop."""
    library = {f"q{i}": [Document(f"Document number {i} speaks.", id=str(i))] for i in range(8)}
    chain = make_chain(ChatCacheCraft(engine=FakeEngine()), library)
    for i, answer in enumerate(await chain.abatch(list(library))):
        assert_chunks(answer, [(str(i), ChunkDecision.COMPUTED)])


def test_tenants_do_not_share_chunks() -> None:
    """What one tenant's chain stored is computed again for another."""
    engine = FakeEngine()
    for tenant in ("a", "b"):
        answer = make_chain(ChatCacheCraft(engine=engine, tenant=tenant)).invoke("bridge")
        assert {chunk.decision for chunk in report_of(answer).chunks} == {ChunkDecision.COMPUTED}


def test_a_prompt_without_the_documents_still_answers() -> None:
    """Where the documents' text does not reach the prompt, nothing is reused and the report says so."""
    llm = ChatCacheCraft(engine=FakeEngine("ok"))
    retriever = CacheCraftRetriever(base_retriever=RunnableLambda(lambda q: LIBRARY[q]), llm=llm)
    chain = retriever | (lambda documents: f"{len(documents)} documents") | llm
    answer = chain.invoke("bridge")
    assert answer.content == "ok"
    assert "No known chunk" in report_of(answer).why


@pytest.mark.parametrize("options", [{"reuse": "off"}, {"precision_critical": True}])
def test_bound_options_apply_in_a_chain(options: dict[str, Any]) -> None:
    """Reuse can be switched off for one chain by binding."""
    llm = ChatCacheCraft(engine=FakeEngine())
    make_chain(llm).invoke("bridge")
    bound = PROMPT | llm.bind(**options)
    answer = bound.invoke({"context": format_docs(LIBRARY["bridge"]), "question": "When?"})
    assert report_of(answer).num_reused_tokens == 0


class LibraryRetriever(BaseRetriever):
    """A plain retriever whose queries are the keys of the library."""

    library: dict[str, list[Document]] = LIBRARY

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return self.library[query]


BRIDGE_CHUNKS = [("b1", ChunkDecision.COMPUTED), ("b2", ChunkDecision.COMPUTED)]
RIVER_CHUNKS = [("b2", ChunkDecision.REUSED), ("r1", ChunkDecision.COMPUTED)]


def test_the_rag_chain_answers_and_hands_on_its_documents() -> None:
    """Input, context and answer, as of LangChain's own chain; a bare question will do."""
    llm = ChatCacheCraft(engine=FakeEngine("in 1987"))
    chain = create_cachecraft_rag_chain(LibraryRetriever(), llm)
    expected = {"input": "bridge", "context": LIBRARY["bridge"], "answer": "in 1987"}
    assert chain.invoke("bridge") == chain.invoke({"input": "bridge"}) == expected


async def test_the_rag_chain_finds_its_chunks_in_every_way_of_calling() -> None:
    """Sync, async, streams and batches; two engines alive, so nothing is left to capture."""
    other = ChatCacheCraft(engine=FakeEngine())
    llm = ChatCacheCraft(engine=FakeEngine())
    chain = create_cachecraft_rag_chain(LibraryRetriever(), llm, output_parser=RunnablePassthrough())
    assert_chunks(chain.invoke("bridge")["answer"], BRIDGE_CHUNKS)
    assert_chunks((await chain.ainvoke("river"))["answer"], RIVER_CHUNKS)
    streamed = functools.reduce(operator.add, chain.stream("bridge"))
    astreamed = functools.reduce(operator.add, [piece async for piece in chain.astream("bridge")])
    [batched], [abatched] = chain.batch(["bridge"]), await chain.abatch(["bridge"])
    for result in (streamed, astreamed, batched, abatched):
        assert_chunks(result["answer"], [("b1", ChunkDecision.EXACT), ("b2", ChunkDecision.EXACT)])
        assert result["context"] == LIBRARY["bridge"]
    assert other.last_report is None


async def test_the_rag_chain_streams_the_answer_in_pieces() -> None:
    """Documents come before the first word, and words as they are made."""
    chain = create_cachecraft_rag_chain(LibraryRetriever(), ChatCacheCraft(engine=FakeEngine("in 1987 then")))
    for pieces in (list(chain.stream("bridge")), [piece async for piece in chain.astream("bridge")]):
        assert [piece["answer"] for piece in pieces if piece.get("answer")] == ["in", " 1987", " then"]
        keys = [key for piece in pieces for key in piece]
        assert keys.index("context") < keys.index("answer")


async def test_a_batch_of_the_rag_chain_keeps_documents_apart() -> None:
    """Eight questions with documents of their own, in threads and on one loop."""
    library = {f"q{i}": [Document(f"Document number {i} speaks.", id=str(i))] for i in range(8)}
    llm = ChatCacheCraft(engine=FakeEngine(lambda prompt: prompt))
    retriever = LibraryRetriever(library=library)
    chain = create_cachecraft_rag_chain(retriever, llm, output_parser=RunnablePassthrough())
    results = chain.batch(list(library), {"max_concurrency": 8}) + await chain.abatch(list(library))
    for i, result in zip([*range(8)] * 2, results, strict=True):
        assert f"Document number {i} speaks." in result["answer"].content
        assert [chunk.doc_id for chunk in report_of(result["answer"]).chunks] == [str(i)]


def test_history_stands_before_the_passages() -> None:
    """A follow-up question begins with the conversation as it was."""
    engine = FakeEngine()
    chain = create_cachecraft_rag_chain(LibraryRetriever(), ChatCacheCraft(engine=engine))
    history = [HumanMessage("What is it?"), AIMessage("A bridge.")]
    chain.invoke({"input": "bridge", "chat_history": history})
    assert [message["role"] for message in engine.last_call.messages] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    assert engine.last_call.prompt.endswith("It has {three} arches.\n\n\nQuestion: bridge")


def test_the_rag_chain_takes_other_variables_and_document_prompts() -> None:
    """A prompt of one's own may have more variables, and shows metadata as part of the chunk."""
    engine = FakeEngine()
    prompt = ChatPromptTemplate.from_template("{tone}\n{context}\n{input}")
    named = PromptTemplate.from_template("{source}: {page_content}")
    library = {"q": [Document("It flows.", metadata={"source": "river.md"})]}
    chain = create_cachecraft_rag_chain(
        LibraryRetriever(library=library), ChatCacheCraft(engine=engine), prompt, document_prompt=named
    )
    chain.invoke({"input": "q", "tone": "Be brief."})
    assert engine.last_call.prompt == "user: Be brief.\nriver.md: It flows.\nq"
    assert Chunk("river.md: It flows.", "river.md") in [
        chunk for call in engine.calls for chunk in call.chunks
    ]


@pytest.mark.parametrize(
    "retriever",
    [
        LibraryRetriever() | RunnableLambda(lambda documents: documents[::-1][::-1]),
        LibraryRetriever().with_config(tags=["x"]),
        RunnableLambda(lambda variables: LIBRARY[variables["input"]]),
    ],
    ids=["reranked", "bound", "of the mapping"],
)
def test_the_rag_chain_takes_any_retriever(retriever: Any) -> None:
    """What takes text gets the question, other runnables the whole input."""
    llm = ChatCacheCraft(engine=FakeEngine())
    assert create_cachecraft_rag_chain(retriever, llm).invoke("bridge")["context"] == LIBRARY["bridge"]
    assert llm.last_report is not None
    assert [chunk.doc_id for chunk in llm.last_report.chunks] == ["b1", "b2"]


def test_a_retriever_of_another_engine_tells_both() -> None:
    """The chain's model is told of documents that the retriever announced elsewhere."""
    llm, other = ChatCacheCraft(engine=FakeEngine()), FakeEngine()
    retriever = CacheCraftRetriever(base_retriever=LibraryRetriever(), engine=other)
    create_cachecraft_rag_chain(retriever, llm).invoke("bridge")
    assert [call.method for call in other.calls] == ["prefetch"]
    assert llm.last_report is not None
    assert [chunk.doc_id for chunk in llm.last_report.chunks] == ["b1", "b2"]


def test_a_history_aware_retriever_sees_the_history() -> None:
    """LangChain's rewriter of follow-up questions fits in front."""
    rewriter = FakeListChatModel(responses=["river"])
    rewrite = ChatPromptTemplate.from_messages([("placeholder", "{chat_history}"), ("human", "{input}")])
    retriever = create_history_aware_retriever(rewriter, LibraryRetriever(), rewrite)
    chain = create_cachecraft_rag_chain(retriever, ChatCacheCraft(engine=FakeEngine()))
    assert chain.invoke({"input": "bridge"})["context"] == LIBRARY["bridge"]
    result = chain.invoke({"input": "And how long?", "chat_history": [HumanMessage("The river?")]})
    assert result["context"] == LIBRARY["river"]


def test_the_rag_chain_takes_any_model() -> None:
    """A chat model and a completion model of others, and ours bound to options."""
    for model in (FakeListChatModel(responses=["plain"]), FakeListLLM(responses=["plain"])):
        assert create_cachecraft_rag_chain(LibraryRetriever(), model).invoke("bridge")["answer"] == "plain"
    llm = ChatCacheCraft(engine=FakeEngine())
    create_cachecraft_rag_chain(LibraryRetriever(), llm.bind(tenant="a")).invoke("bridge")
    assert llm.last_report is not None
    assert [chunk.doc_id for chunk in llm.last_report.chunks] == ["b1", "b2"]


@pytest.mark.parametrize("wrong", [{}, {"question": "Who?"}, 7])
def test_a_chain_without_a_question_says_so(wrong: Any) -> None:
    """The error names what was given."""
    chain = create_cachecraft_rag_chain(LibraryRetriever(), ChatCacheCraft(engine=FakeEngine()))
    with pytest.raises(InvalidRequestError, match="'input'"):
        chain.invoke(wrong)


def test_the_quick_start_of_the_docs_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a reader would run it; in under 15 lines."""
    [quick_start, *_] = re.findall(r"^```python\n(.*?)^```", DOCS.read_text(), flags=re.DOTALL | re.MULTILINE)
    fake = FakeEngine("Ada Lund")
    monkeypatch.setattr(cachecraft_rag, "default_model", lambda: "a-model", raising=False)
    monkeypatch.setattr("cachecraft_rag.langchain._base.shared_engine", lambda *args, **kwargs: fake)
    monkeypatch.setattr(
        "cachecraft_rag.retrieval.SentenceEncoder.__call__", lambda self, texts: np.ones((len(texts), 4))
    )
    exec(compile(quick_start, DOCS.name, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.splitlines() == ["Ada Lund", Reason.NOT_CACHED.sentence]
    assert len(quick_start.splitlines()) < 15
