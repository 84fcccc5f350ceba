"""Zero-configuration capture: LlamaIndex's own retrieval, told to the engine of the model that answers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex, get_response_synthesizer
from llama_index.core.agent.workflow import ReActAgent
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.llms.mock import MockLLM
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.core.query_engine import CitationQueryEngine, RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.tools import RetrieverTool
from llama_index_instrumentation import root_dispatcher

from cachecraft_rag.events import ChunkDecision, Reason
from cachecraft_rag.llama_index import CacheCraftLLM, CacheCraftRetriever, start_capture, stop_capture
from cachecraft_rag.testing import FakeEngine

ANSWER = "Goethe wrote it"
QUESTION = "Who wrote Faust?"


class Found(BaseRetriever):
    """A retriever of LlamaIndex's own kind: it knows no engine."""

    def __init__(self, nodes: list[TextNode]) -> None:
        self.nodes = nodes
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=node, score=1.0) for node in self.nodes]


@pytest.fixture(autouse=True)
def only_this_tests_models() -> Iterator[None]:
    """Models of earlier tests, which wait for the garbage collector, are no longer alive."""
    gc.collect()
    yield
    start_capture()


def told(engine: FakeEngine) -> set[str]:
    return {chunk.text for call in engine.calls if call.method == "prefetch" for chunk in call.chunks}


def tenants_told(engine: FakeEngine) -> set[Any]:
    return {call.options["tenant"] for call in engine.calls if call.method == "prefetch"}


def decisions(llm: CacheCraftLLM) -> list[ChunkDecision]:
    assert llm.last_report is not None
    return [chunk.decision for chunk in llm.last_report.chunks]


def test_users_own_index_is_reused_without_a_change(
    llm: CacheCraftLLM, nodes: list[TextNode], embed_model: BaseEmbedding
) -> None:
    """`index.as_query_engine(llm=...)` is all: the second question reuses the first one's chunks."""
    query_engine = VectorStoreIndex(nodes, embed_model=embed_model).as_query_engine(
        llm=llm, similarity_top_k=3
    )
    query_engine.query(QUESTION)
    assert decisions(llm) == [ChunkDecision.COMPUTED] * 3
    query_engine.query(QUESTION)
    assert decisions(llm) == [ChunkDecision.EXACT] * 3


async def test_awaited_synthesis_is_seen_too(llm: CacheCraftLLM, nodes: list[TextNode]) -> None:
    """As the plain one."""
    await RetrieverQueryEngine.from_args(Found(nodes), llm=llm).aquery(QUESTION)
    assert len(decisions(llm)) == 3


def test_synthesizer_alone_is_enough(llm: CacheCraftLLM, nodes: list[TextNode]) -> None:
    """Nodes that no retriever found are seen when they are given to a synthesizer."""
    given = [NodeWithScore(node=node) for node in nodes]
    get_response_synthesizer(llm=llm).synthesize(QUESTION, given)
    assert len(decisions(llm)) == 3


def test_chat_engine_is_reused(llm: CacheCraftLLM, nodes: list[TextNode]) -> None:
    """The chunks in a chat engine's system message are found in its second turn."""
    chat_engine = ContextChatEngine.from_defaults(retriever=Found(nodes), llm=llm)
    chat_engine.chat(QUESTION)
    chat_engine.chat("And in Norway?")
    assert len(decisions(llm)) == 3
    assert ChunkDecision.COMPUTED not in decisions(llm)


def test_text_after_postprocessors_counts(llm: CacheCraftLLM, engine: FakeEngine) -> None:
    """Of a sentence window the text that reaches the model is found, not the sentence."""
    window = "Before. Faust is a tragedy. After."
    node = TextNode(text="Faust is a tragedy.", metadata={"window": window})
    node.excluded_llm_metadata_keys = ["window"]
    RetrieverQueryEngine.from_args(
        Found([node]),
        llm=llm,
        node_postprocessors=[MetadataReplacementPostProcessor(target_metadata_key="window")],
    ).query(QUESTION)
    assert llm.last_report is not None
    [chunk] = llm.last_report.chunks
    assert chunk.num_tokens == len(engine.encode(window))


def test_citations_are_reused_in_another_order(llm: CacheCraftLLM, nodes: list[TextNode]) -> None:
    """A citation engine numbers its sources; the text behind the number is the chunk."""
    retriever = Found(nodes)
    query_engine = CitationQueryEngine(retriever, llm=llm)
    query_engine.query(QUESTION)
    assert decisions(llm) == [ChunkDecision.COMPUTED] * 3
    retriever.nodes = nodes[::-1]
    query_engine.query(QUESTION)
    assert decisions(llm) == [ChunkDecision.REUSED] * 3
    assert llm.last_report is not None
    assert [chunk.doc_id for chunk in llm.last_report.chunks] == ["oslo", "doc-faust", "doc-faust"]


async def test_agent_tool_is_reused(nodes: list[TextNode]) -> None:
    """An agent's retrieval tool, which no synthesizer follows, is seen."""
    steps = [
        'Thought: I look.\nAction: books\nAction Input: {"input": "Faust"}',
        f"Thought: I know.\nAnswer: {ANSWER}",
    ]
    llm = CacheCraftLLM(engine=FakeEngine(steps))
    tool = RetrieverTool.from_defaults(Found(nodes), name="books", description="books")
    other = CacheCraftLLM(engine=FakeEngine(), tenant="other")
    answer = await ReActAgent(tools=[tool], llm=llm).run(QUESTION)
    assert str(answer) == ANSWER
    assert len(decisions(llm)) == 3
    assert told(other.engine) == set()


def test_each_model_is_told_its_own_only(nodes: list[TextNode]) -> None:
    """With several tenants on one engine each is told what its own question found."""
    engine = FakeEngine(ANSWER)
    ours, theirs = (CacheCraftLLM(engine=engine, tenant=tenant) for tenant in ("ours", "theirs"))
    RetrieverQueryEngine.from_args(Found(nodes[:1]), llm=ours).query(QUESTION)
    assert tenants_told(engine) == {"ours"}
    theirs.complete(f"{nodes[0].text} {QUESTION}")
    assert theirs.last_report is not None
    assert theirs.last_report.chunks == ()
    RetrieverQueryEngine.from_args(Found(nodes[2:]), llm=theirs).query(QUESTION)
    assert theirs.last_report is not None
    assert [chunk.doc_id for chunk in theirs.last_report.chunks] == ["oslo"]


def test_bare_retrieval_is_for_the_only_model(
    llm: CacheCraftLLM, engine: FakeEngine, nodes: list[TextNode]
) -> None:
    """Where a program retrieves by itself and one model is alive, it is told; a second tenant ends that."""
    Found(nodes[:1]).retrieve(QUESTION)
    # Both forms in which the node may be shown, with its title and without.
    assert told(engine) == {"title: Faust\n\n  " + nodes[0].text.strip(), nodes[0].text.strip()}
    second = CacheCraftLLM(engine=FakeEngine(), tenant="second")
    Found(nodes[2:]).retrieve(QUESTION)
    assert nodes[2].text not in told(engine) | told(second.engine)


@pytest.mark.parametrize("way", ["copy", "call"])
def test_bare_retrieval_is_for_nobody_when_a_model_serves_two_tenants(
    llm: CacheCraftLLM, engine: FakeEngine, nodes: list[TextNode], way: str
) -> None:
    """A copy for another tenant, and a tenant given with one call, are tenants as well."""
    if way == "copy":
        llm.model_copy(update={"tenant": "second"}).complete("x")
    else:
        llm.complete("x", tenant="second")
    Found(nodes).retrieve(QUESTION)
    assert told(engine) == set()


def test_closed_models_do_not_count(llm: CacheCraftLLM, engine: FakeEngine, nodes: list[TextNode]) -> None:
    """A model that was closed, or whose engine was, leaves the other one the only one."""
    closed = CacheCraftLLM(engine=FakeEngine(), tenant="closed")
    ended = CacheCraftLLM(engine=FakeEngine(), tenant="ended")
    closed.close()
    ended.engine.close()
    Found(nodes[2:]).retrieve(QUESTION)
    assert told(engine) == {nodes[2].text}


def test_other_makes_answers_are_not_told(
    llm: CacheCraftLLM, engine: FakeEngine, nodes: list[TextNode]
) -> None:
    """What a model of another make answers from is none of our engine's business."""
    RetrieverQueryEngine.from_args(Found(nodes), llm=MockLLM()).query(QUESTION)
    assert told(engine) == set()


def test_our_retriever_tells_its_own_tenant_only(
    llm: CacheCraftLLM, engine: FakeEngine, nodes: list[TextNode]
) -> None:
    """A retriever of one tenant is not told to the only model alive, which has another."""
    CacheCraftRetriever(Found(nodes), engine=engine, tenant="theirs").retrieve(QUESTION)
    assert tenants_told(engine) == {"theirs"}


def test_public_chunks_stay_public(llm: CacheCraftLLM, engine: FakeEngine, nodes: list[TextNode]) -> None:
    """What our retriever hands out as public is not told again as the tenant's own."""
    retriever = CacheCraftRetriever(Found(nodes), llm=llm, is_shared=True)
    RetrieverQueryEngine.from_args(retriever, llm=llm).query(QUESTION)
    calls = [call for call in engine.calls if call.method == "prefetch"]
    assert len(calls) > 1
    assert all(chunk.is_shared for call in calls for chunk in call.chunks)


def test_stopped_capture_tells_nothing(llm: CacheCraftLLM, engine: FakeEngine, nodes: list[TextNode]) -> None:
    """After `stop_capture` nothing is told, by later models neither, until `start_capture`."""
    stop_capture()
    later = CacheCraftLLM(engine=engine)
    RetrieverQueryEngine.from_args(Found(nodes), llm=later).query(QUESTION)
    assert told(engine) == set()
    assert later.last_report is not None
    assert later.last_report.reason is Reason.NO_CHUNKS
    start_capture()
    RetrieverQueryEngine.from_args(Found(nodes), llm=later).query(QUESTION)
    assert len(decisions(later)) == 3


def test_handlers_are_registered_once(engine: FakeEngine) -> None:
    """Many models, and many starts, add one handler of each kind."""
    for _ in range(3):
        CacheCraftLLM(engine=engine)
        start_capture()
    for handlers in (root_dispatcher.span_handlers, root_dispatcher.event_handlers):
        assert sum("CacheCraft" in handler.class_name() for handler in handlers) == 1


def test_fault_of_the_engine_does_not_reach_the_retrieval(
    llm: CacheCraftLLM, engine: FakeEngine, nodes: list[TextNode]
) -> None:
    """Retrieval goes on when the engine refuses what it is told."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no room")

    engine.prefetch = refuse  # type: ignore[method-assign]
    assert len(Found(nodes).retrieve(QUESTION)) == 3
    assert str(RetrieverQueryEngine.from_args(Found(nodes), llm=llm).query(QUESTION)) == ANSWER


def test_capture_starts_no_engine(nodes: list[TextNode], tmp_path: Any) -> None:
    """Being told leaves an engine unstarted: starting one takes a minute."""
    (tmp_path / "config.json").write_text("{}")
    llm = CacheCraftLLM(tmp_path, engine_args={"max_model_len": 512})
    Found(nodes).retrieve(QUESTION)
    assert not llm.engine.is_started
    assert llm.engine.stats()["engine"]["num_known_chunks"] == 4  # type: ignore[attr-defined]
    llm.engine.close()


def test_models_are_not_kept_alive(engine: FakeEngine) -> None:
    """Watching keeps no model, and with it no engine, alive."""
    import weakref

    alive = weakref.ref(CacheCraftLLM(engine=engine))
    gc.collect()
    assert alive() is None
