"""CacheCraftLLM on the real engine with the default model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from llama_index.core import Document
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.query_engine import RetrieverQueryEngine

from cachecraft_rag import CacheCraftConfig, default_model
from cachecraft_rag.errors import InvalidRequestError
from cachecraft_rag.events import ChunkDecision
from cachecraft_rag.llama_index import CacheCraftLLM, CacheCraftRetriever

pytestmark = pytest.mark.engine

DOCUMENTS = [
    Document(id_="faust", text="Faust is a tragedy in two parts by Johann Wolfgang von Goethe."),
    Document(id_="oslo", text="Oslo is the capital and the most populous city of Norway, by a fjord."),
]


def assert_reused(llm: CacheCraftLLM) -> None:
    report = llm.last_report
    assert report is not None
    assert {chunk.doc_id for chunk in report.chunks} == {"faust", "oslo"}
    assert all(chunk.decision is not ChunkDecision.COMPUTED for chunk in report.chunks)
    assert report.num_reused_tokens > 0


@pytest.fixture
def llm() -> Iterator[CacheCraftLLM]:
    model = CacheCraftLLM(
        default_model(),
        config=CacheCraftConfig(self_test=False),
        max_tokens=8,
        engine_args={"dtype": "float32", "max_model_len": 2048, "in_process": True},
    )
    engine = model.engine
    yield model
    engine.close()


async def test_query_engine_on_the_real_engine(llm: CacheCraftLLM, embed_model: BaseEmbedding) -> None:
    """Chunks of the first question are reused by the next ones, in all four ways of asking."""
    retriever = CacheCraftRetriever.from_documents(
        DOCUMENTS, llm=llm, similarity_top_k=2, embed_model=embed_model
    )
    plain = RetrieverQueryEngine.from_args(retriever, llm=llm)
    streaming = RetrieverQueryEngine.from_args(retriever, llm=llm, streaming=True)

    assert str(plain.query("Who wrote Faust?"))
    assert str(await plain.aquery("Which city is by a fjord in Norway?"))
    assert_reused(llm)
    assert len(list(streaming.query("Which tragedy has two parts?").response_gen)) > 1
    assert_reused(llm)
    response = await streaming.aquery("What is the capital?")
    assert len([piece async for piece in response.async_response_gen()]) > 1
    assert_reused(llm)
    with pytest.raises(InvalidRequestError, match="'best_of'"):
        llm.complete("x", best_of=2)
