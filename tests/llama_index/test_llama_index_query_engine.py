"""LlamaIndex's own query and chat engines over CacheCraftLLM: chunks are found in their prompts."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import TextNode

from cachecraft_rag.events import ChunkDecision, Reason, ReuseReport
from cachecraft_rag.llama_index import CacheCraftLLM, CacheCraftRetriever, DenseRetriever
from cachecraft_rag.testing import FakeEngine

ANSWER = "Goethe wrote it"


@pytest.fixture
def retriever(llm: CacheCraftLLM, nodes: list[TextNode], embed_model: BaseEmbedding) -> CacheCraftRetriever:
    dense = DenseRetriever(nodes, embed_model=embed_model, similarity_top_k=3)
    return CacheCraftRetriever(dense, llm=llm)


def last_report(llm: CacheCraftLLM) -> ReuseReport:
    assert llm.last_report is not None
    return llm.last_report


def assert_all_found(report: ReuseReport, *decisions: ChunkDecision) -> None:
    """All three passages stand in the prompt, each with one of these decisions."""
    assert sorted(str(chunk.doc_id) for chunk in report.chunks) == ["doc-faust", "doc-faust", "oslo"]
    assert {chunk.decision for chunk in report.chunks} <= set(decisions)


@pytest.mark.parametrize("mode", ["compact", "tree_summarize", "compact_accumulate"])
def test_query_engine_reuses_what_was_retrieved(
    llm: CacheCraftLLM, retriever: CacheCraftRetriever, mode: str, offline: None
) -> None:
    """The first question computes the chunks, another one about them reuses them, with no network."""
    query_engine = RetrieverQueryEngine.from_args(retriever, llm=llm, response_mode=mode)
    assert ANSWER in str(query_engine.query("Who wrote Faust?"))
    assert_all_found(last_report(llm), ChunkDecision.COMPUTED)
    query_engine.query("Who makes a wager in Norway?")
    assert_all_found(last_report(llm), ChunkDecision.EXACT, ChunkDecision.REUSED)
    assert last_report(llm).num_reused_tokens > 0


@pytest.mark.parametrize("mode", ["refine", "accumulate"])
def test_one_chunk_a_call_is_found_too(
    llm: CacheCraftLLM, engine: FakeEngine, retriever: CacheCraftRetriever, mode: str
) -> None:
    """Modes that show the model one passage at a time find one chunk in each call."""
    query_engine = RetrieverQueryEngine.from_args(retriever, llm=llm, response_mode=mode)
    query_engine.query("Who wrote Faust?")
    assert [call.method for call in engine.calls if call.method != "prefetch"] == ["chat"] * 3
    [chunk] = last_report(llm).chunks
    assert chunk.reason is Reason.NOT_CACHED


async def test_async_query_engine(llm: CacheCraftLLM, engine: FakeEngine, retriever: Any) -> None:
    """An awaited query uses the engine's coroutine and finds the chunks."""
    response = await RetrieverQueryEngine.from_args(retriever, llm=llm).aquery("Who wrote Faust?")
    assert str(response) == ANSWER
    assert engine.last_call.method == "achat"
    assert_all_found(last_report(llm), ChunkDecision.COMPUTED)


def test_streaming_query_engine(llm: CacheCraftLLM, engine: FakeEngine, retriever: Any) -> None:
    """A streamed answer arrives in pieces, and its report when it has been read."""
    response = RetrieverQueryEngine.from_args(retriever, llm=llm, streaming=True).query("Who wrote Faust?")
    assert [piece for piece in response.response_gen if piece] == ["Goethe", " wrote", " it"]
    assert engine.last_call.method == "stream_chat"
    assert_all_found(last_report(llm), ChunkDecision.COMPUTED)


async def test_async_streaming_query_engine(llm: CacheCraftLLM, engine: FakeEngine, retriever: Any) -> None:
    """As the streamed answer, awaited."""
    query_engine = RetrieverQueryEngine.from_args(retriever, llm=llm, streaming=True)
    response = await query_engine.aquery("Who wrote Faust?")
    pieces = [piece async for piece in response.async_response_gen()]
    assert [piece for piece in pieces if piece] == ["Goethe", " wrote", " it"]
    assert engine.last_call.method == "astream_chat"
    assert_all_found(last_report(llm), ChunkDecision.COMPUTED)


def test_chat_engine_finds_chunks_in_its_system_message(
    llm: CacheCraftLLM, retriever: CacheCraftRetriever
) -> None:
    """A context chat engine reuses the chunks in its second turn."""
    chat_engine = ContextChatEngine.from_defaults(retriever=retriever, llm=llm)
    assert str(chat_engine.chat("Who wrote Faust?")) == ANSWER
    assert_all_found(last_report(llm), ChunkDecision.COMPUTED)
    chat_engine.chat("Who wrote Faust, again?")
    assert_all_found(last_report(llm), ChunkDecision.EXACT, ChunkDecision.REUSED)


def test_prompt_without_known_chunks_says_so(llm: CacheCraftLLM) -> None:
    """A question without retrieved text is answered in full, with the reason."""
    llm.complete("Who wrote Faust?")
    assert last_report(llm).reason is Reason.NO_CHUNKS
