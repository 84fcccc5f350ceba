"""Retrievers: one that tells the engine what any other one finds, and a small dense one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.llms.llm import LLM
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode, Document, MetadataMode, NodeWithScore, QueryBundle

from cachecraft_rag.engine.api import ChatEngine
from cachecraft_rag.errors import ConfigurationError
from cachecraft_rag.llama_index._answering import engine_backed, tenant_of
from cachecraft_rag.llama_index._convert import to_chunks
from cachecraft_rag.llama_index._shared import note_shared
from cachecraft_rag.llama_index.embedding import DefaultEmbedding
from cachecraft_rag.retrieval import DenseIndex

if TYPE_CHECKING:
    from llama_index.core.indices.base import BaseIndex

DEFAULT_TOP_K = 4
# The default embedding model reads 256 tokens. No overlap: text that stands in two chunks would be
# computed and read twice.
DEFAULT_CHUNK_SIZE = 256


class CacheCraftRetriever(BaseRetriever):
    """Hands out what `base_retriever` finds, unchanged and in its order, and tells the engine these
    texts, so that it recognises them in the prompt LlamaIndex builds.

    The model sees a node's text together with its metadata, so both are part of the chunk. Put keys
    that change often into the node's `excluded_llm_metadata_keys`, or their chunks are computed anew.

    Args:
        base_retriever: any LlamaIndex retriever.
        llm: the model that will answer; its engine and its tenant are used. A model of another make is
            told nothing.
        engine: an engine in place of `llm`.
        tenant: whose chunks these are; None takes the model's, else the engine's default.
        is_shared: all of them are public: KV that `engine.warm` stored for everybody is used.

    Raises:
        ConfigurationError: not exactly one of `llm` and `engine` is given.

    Example:
        retriever = CacheCraftRetriever(index.as_retriever(), llm=llm)
        answer = RetrieverQueryEngine.from_args(retriever, llm=llm).query("Who?")
        print(llm.last_report.why)
    """

    tells_engine = True

    def __init__(
        self,
        base_retriever: BaseRetriever,
        *,
        llm: LLM | None = None,
        engine: ChatEngine | None = None,
        tenant: str | None = None,
        is_shared: bool = False,
    ) -> None:
        if (llm is None) == (engine is None):
            raise ConfigurationError(
                "CacheCraftRetriever needs either llm= or engine=, to tell it what was retrieved"
            )
        self._base = base_retriever
        self._llm = llm
        self._engine = engine
        self._tenant = tenant
        self._is_shared = is_shared
        super().__init__(callback_manager=getattr(base_retriever, "callback_manager", None))

    @classmethod
    def from_index(
        cls,
        index: BaseIndex[Any],
        *,
        llm: LLM | None = None,
        engine: ChatEngine | None = None,
        tenant: str | None = None,
        is_shared: bool = False,
        similarity_top_k: int = DEFAULT_TOP_K,
        **retriever_options: Any,
    ) -> CacheCraftRetriever:
        """Wrap `index.as_retriever(similarity_top_k=..., **retriever_options)`."""
        base = index.as_retriever(similarity_top_k=similarity_top_k, **retriever_options)
        return cls(base, llm=llm, engine=engine, tenant=tenant, is_shared=is_shared)

    @classmethod
    def from_documents(
        cls,
        documents: Sequence[Document],
        *,
        llm: LLM | None = None,
        engine: ChatEngine | None = None,
        tenant: str | None = None,
        is_shared: bool = False,
        similarity_top_k: int = DEFAULT_TOP_K,
        embed_model: BaseEmbedding | None = None,
        chunk_size: int = DEFAULT_CHUNK_SIZE,
        chunk_overlap: int = 0,
    ) -> CacheCraftRetriever:
        """Split documents at sentences, embed them, and search them with `DenseRetriever`.

        Args:
            chunk_size: most tokens of a chunk, its metadata included, by LlamaIndex's tokenizer.
        """
        splitter = SentenceSplitter(chunk_size=chunk_size, chunk_overlap=chunk_overlap)
        nodes = splitter.get_nodes_from_documents(documents)
        base = DenseRetriever(nodes, embed_model=embed_model, similarity_top_k=similarity_top_k)
        return cls(base, llm=llm, engine=engine, tenant=tenant, is_shared=is_shared)

    @property
    def base_retriever(self) -> BaseRetriever:
        return self._base

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return self._remembered(self._base.retrieve(query_bundle))

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return self._remembered(await self._base.aretrieve(query_bundle))

    def _remembered(self, nodes: list[NodeWithScore]) -> list[NodeWithScore]:
        chunks = to_chunks(nodes, is_shared=self._is_shared)
        target = self._target()
        if chunks and target is not None:
            engine, tenant = target
            note_shared(engine, tenant, chunks)
            engine.prefetch(chunks, tenant=tenant)
        return nodes

    def _target(self) -> tuple[ChatEngine, str | None] | None:
        if self._engine is not None:
            return self._engine, self._tenant
        llm = engine_backed(self._llm)
        return None if llm is None else (llm.engine, self._tenant or tenant_of(llm))


class DenseRetriever(BaseRetriever):
    """The nodes nearest to the question by cosine similarity, searched exhaustively with FAISS.

    Hands out copies, because postprocessors may change the nodes they are given.

    Args:
        embed_model: None takes `DefaultEmbedding`.

    Raises:
        MissingDependencyError: faiss, or the default embedding model, is not installed.
        InvalidRequestError: `similarity_top_k` is not a positive number (when retrieving).
    """

    def __init__(
        self,
        nodes: Sequence[BaseNode],
        *,
        embed_model: BaseEmbedding | None = None,
        similarity_top_k: int = DEFAULT_TOP_K,
    ) -> None:
        self._nodes = list(nodes)
        self._embed_model = embed_model or DefaultEmbedding()
        self._similarity_top_k = similarity_top_k
        texts = [node.get_content(metadata_mode=MetadataMode.EMBED) for node in self._nodes]
        self._index = DenseIndex.from_texts(texts, self._encode)
        super().__init__()

    def _encode(self, texts: Sequence[str]) -> list[list[float]]:
        return self._embed_model.get_text_embedding_batch(list(texts))

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        vector = query_bundle.embedding
        if vector is None:
            vector = self._embed_model.get_agg_embedding_from_queries(query_bundle.embedding_strs)
        return self._search(vector)

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        vector = query_bundle.embedding
        if vector is None:
            strings = query_bundle.embedding_strs
            vector = await self._embed_model.aget_agg_embedding_from_queries(strings)
        return await asyncio.to_thread(self._search, vector)

    def _search(self, vector: list[float]) -> list[NodeWithScore]:
        found = self._index.search_vector(vector, self._similarity_top_k)
        return [
            NodeWithScore(node=self._nodes[index].model_copy(deep=True), score=score)
            for index, score in found
        ]
