"""Zero-configuration capture: retrieved documents become known without any of our retrievers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField, Runnable, RunnablePassthrough

from cachecraft_rag.events import ChunkDecision, ReuseReport
from cachecraft_rag.langchain import CacheCraftRetriever, ChatCacheCraft, resume_capture, stop_capture
from cachecraft_rag.testing import FakeEngine

PROMPT = ChatPromptTemplate.from_messages([("system", "Use this:\n{context}"), ("human", "{input}")])
BRIDGE = Document("The bridge is from 1987.", metadata={"source": "bridge.md"})
RIVER = Document("  The river is long.\n", id="river")


class LibraryRetriever(BaseRetriever):
    """A plain retriever: all documents whose text holds the query."""

    documents: list[Document] = [BRIDGE, RIVER]  # noqa: RUF012 -- a pydantic field: each instance has its own

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return [document for document in self.documents if query in document.page_content]


class KeepLast(BaseDocumentCompressor):
    """A reranker that drops all but the last document."""

    def compress_documents(self, documents: Any, query: str, callbacks: Any = None) -> list[Document]:
        return list(documents)[-1:]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """No model of another test is alive, and capture is on."""
    gc.collect()
    resume_capture()
    yield
    resume_capture()


def plain_chain(llm: Any, retriever: Any = None) -> Runnable[str, AIMessage]:
    """The chain of every tutorial."""
    context = (retriever or LibraryRetriever()) | (lambda docs: "\n\n".join(d.page_content for d in docs))
    return {"context": context, "input": RunnablePassthrough()} | PROMPT | llm


def chunks_of(message: AIMessage) -> list[tuple[str | None, ChunkDecision]]:
    report = ReuseReport.from_dict(message.response_metadata["cachecraft"])
    return [(chunk.doc_id, chunk.decision) for chunk in report.chunks]


def told(engine: FakeEngine) -> list[str]:
    """Texts that the engine was told of ahead of a call, in order."""
    return [chunk.text for call in engine.calls if call.method == "prefetch" for chunk in call.chunks]


async def test_a_plain_chain_finds_its_chunks_in_every_way_of_calling() -> None:
    """A plain retriever, `format_docs`, a prompt and our model: nothing else is needed."""
    chain = plain_chain(ChatCacheCraft(engine=FakeEngine()))
    assert chunks_of(chain.invoke("bridge")) == [("bridge.md", ChunkDecision.COMPUTED)]
    *_, streamed = chain.stream("bridge")
    *_, astreamed = [chunk async for chunk in chain.astream("bridge")]
    [batched] = chain.batch(["bridge"])
    [abatched] = await chain.abatch(["bridge"])
    for message in (await chain.ainvoke("bridge"), streamed, astreamed, batched, abatched):
        assert chunks_of(message) == [("bridge.md", ChunkDecision.EXACT)]


def test_a_two_step_call_finds_them_too() -> None:
    """Retrieving first and calling the model by hand later is the same to the engine."""
    llm = ChatCacheCraft(engine=FakeEngine())
    [document] = LibraryRetriever().invoke("river")
    assert chunks_of(llm.invoke(f"{document.page_content} How long?")) == [("river", ChunkDecision.COMPUTED)]


async def test_the_classic_retrieval_chain_finds_its_chunks() -> None:
    """`create_retrieval_chain` over `create_stuff_documents_chain`, unchanged."""
    llm = ChatCacheCraft(engine=FakeEngine("in 1987"))
    chain = create_retrieval_chain(LibraryRetriever(), create_stuff_documents_chain(llm, PROMPT))
    for result in (chain.invoke({"input": "bridge"}), await chain.ainvoke({"input": "bridge"})):
        assert result["answer"] == "in 1987"
        assert llm.last_report is not None
        assert [chunk.doc_id for chunk in llm.last_report.chunks] == ["bridge.md"]
    assert llm.last_report.num_reused_tokens > 0


def test_a_reranker_drops_documents_and_the_rest_is_found() -> None:
    """What was retrieved and dropped is known and no chunk of the prompt."""
    retriever = ContextualCompressionRetriever(base_retriever=LibraryRetriever(), base_compressor=KeepLast())
    chain = plain_chain(ChatCacheCraft(engine=FakeEngine()), retriever)
    assert chunks_of(chain.invoke("The")) == [("river", ChunkDecision.COMPUTED)]


def test_two_models_of_one_engine_are_one_target() -> None:
    """Several models may share an engine and a tenant."""
    engine = FakeEngine()
    models = [ChatCacheCraft(engine=engine, temperature=t) for t in (0.0, 1.0)]
    LibraryRetriever().invoke("bridge")
    assert told(engine) == [BRIDGE.page_content]
    assert len(models) == 2


@pytest.mark.parametrize("others_tenant", [None, "b"])
def test_nothing_is_told_where_it_could_be_anothers(others_tenant: str | None) -> None:
    """With two engines, or two tenants of one, nobody knows for whom a document was retrieved."""
    engine = FakeEngine()
    other_engine = FakeEngine() if others_tenant is None else engine
    models = [ChatCacheCraft(engine=engine), ChatCacheCraft(engine=other_engine, tenant=others_tenant)]
    LibraryRetriever().invoke("bridge")
    assert told(engine) == told(other_engine) == []
    del models[1:]
    gc.collect()
    LibraryRetriever().invoke("bridge")
    assert told(engine) == [BRIDGE.page_content]


def test_a_tenant_named_by_a_call_ends_capture() -> None:
    """Where calls name their tenants, one tenant's documents never reach another."""
    engine = FakeEngine()
    llm = ChatCacheCraft(engine=engine)
    plain_chain(llm.bind(tenant="b")).invoke("bridge")
    engine.calls.clear()
    plain_chain(llm.bind(tenant="c")).invoke("river")
    assert told(engine) == []


def test_a_configured_tenant_ends_capture() -> None:
    """The same where the tenant is a configurable field, which makes a model for each call."""
    engine = FakeEngine()
    llm = ChatCacheCraft(engine=engine).configurable_fields(tenant=ConfigurableField("tenant"))
    plain_chain(llm).invoke("bridge", {"configurable": {"tenant": "b"}})
    engine.calls.clear()
    plain_chain(llm).invoke("river", {"configurable": {"tenant": "c"}})
    assert told(engine) == []


def test_a_wrapped_retriever_of_another_tenant_is_not_captured() -> None:
    """What goes through a `CacheCraftRetriever` of tenant b is told to b alone, whatever wraps it."""
    engine = FakeEngine()
    llm = ChatCacheCraft(engine=engine)
    ours = CacheCraftRetriever(base_retriever=LibraryRetriever(), engine=engine, tenant="b")
    ContextualCompressionRetriever(base_retriever=ours, base_compressor=KeepLast()).invoke("bridge")
    assert [call.options["tenant"] for call in engine.calls] == ["b"]
    assert llm.tenant is None


def test_a_public_corpus_stays_public() -> None:
    """Documents of a shared retriever are not told once more as the tenant's own."""
    engine = FakeEngine()
    llm = ChatCacheCraft(engine=engine)
    ours = CacheCraftRetriever(base_retriever=LibraryRetriever(), llm=llm, is_shared=True)
    ContextualCompressionRetriever(base_retriever=ours, base_compressor=KeepLast()).invoke("bridge")
    assert [chunk.is_shared for call in engine.calls for chunk in call.chunks] == [True]


def test_our_retriever_tells_once() -> None:
    """Capture does not repeat what `CacheCraftRetriever` has said, nor what its base retriever returned."""
    engine = FakeEngine()
    llm = ChatCacheCraft(engine=engine)
    CacheCraftRetriever(base_retriever=LibraryRetriever(), llm=llm).invoke("bridge")
    assert told(engine) == [BRIDGE.page_content]


def test_capture_can_be_stopped() -> None:
    """After `stop_capture` a plain chain answers and reuses nothing, also for models made later."""
    stop_capture()
    chain = plain_chain(ChatCacheCraft(engine=FakeEngine("ok")))
    chain.invoke("bridge")
    answer = chain.invoke("bridge")
    assert (answer.content, chunks_of(answer)) == ("ok", [])


def test_a_closed_engine_is_not_told_and_does_not_count() -> None:
    """A model whose engine was closed stands in nobody's way, and retrieval goes on without one."""
    closed, engine = FakeEngine(), FakeEngine()
    models = [ChatCacheCraft(engine=closed)]
    closed.close()
    assert LibraryRetriever().invoke("bridge") == [BRIDGE]
    models.append(ChatCacheCraft(engine=engine))
    LibraryRetriever().invoke("bridge")
    assert (told(closed), told(engine)) == ([], [BRIDGE.page_content])


def test_capture_does_not_start_the_engine() -> None:
    """Telling an engine that has not started is remembering, no more."""
    llm = ChatCacheCraft(model="no-such-model")
    LibraryRetriever().invoke("bridge")
    assert not llm.chat_engine.is_started


def test_plain_models_are_left_alone() -> None:
    """With another model, and ours alive beside it, chains work as ever."""
    llm = ChatCacheCraft(engine=FakeEngine())
    other = FakeListChatModel(responses=["plain"])
    assert plain_chain(other).invoke("bridge").content == "plain"
    assert llm.last_report is None
