"""The embedded default embedding model, for LlamaIndex."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding

from cachecraft_rag.embeddings import MODEL_PACKAGE
from cachecraft_rag.retrieval import default_encoder


class DefaultEmbedding(BaseEmbedding):
    """all-MiniLM-L6-v2 on the CPU, one for the whole process: English, 384 dimensions, reads the
    first 256 tokens of a text. Loaded by the first use; nothing is fetched over a network.

    Raises:
        MissingDependencyError: at the first use, without `cachecraft-rag[embeddings]`.

    Example:
        index = VectorStoreIndex.from_documents(documents, embed_model=DefaultEmbedding())
    """

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{"model_name": MODEL_PACKAGE, **fields})

    @classmethod
    def class_name(cls) -> str:
        return "CacheCraftDefaultEmbedding"

    def _get_text_embedding(self, text: str) -> list[float]:
        return _encode([text])[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return _encode(texts)

    def _get_query_embedding(self, query: str) -> list[float]:
        return _encode([query])[0]

    # In threads: encoding takes milliseconds to seconds of the caller's loop.
    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return await asyncio.to_thread(self._get_text_embedding, text)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)


def _encode(texts: Sequence[str]) -> list[list[float]]:
    vectors: list[list[float]] = default_encoder()(texts).tolist()
    return vectors
