"""Whole chains: retriever, prompt, model and parser, with the fake engine."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from cachecraft_rag.events import ChunkDecision, ReuseReport
from cachecraft_rag.langchain import CacheCraftRetriever, ChatCacheCraft
from cachecraft_rag.testing import FakeEngine

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
