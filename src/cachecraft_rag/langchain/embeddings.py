"""The embedded default embedding model, for LangChain."""

from __future__ import annotations

from langchain_core.embeddings import Embeddings

from cachecraft_rag.retrieval import default_encoder


# The asynchronous methods are those of `Embeddings`, which run these in threads.
class DefaultEmbeddings(Embeddings):
    """all-MiniLM-L6-v2 on the CPU, one for the whole process: English, 384 dimensions, reads the
    first 256 tokens of a text. Loaded by the first use; nothing is fetched over a network.

    Raises:
        MissingDependencyError: at the first use, without `cachecraft-rag[embeddings]`.

    Example:
        store = InMemoryVectorStore.from_texts(texts, embedding=DefaultEmbeddings())
    """

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        vectors: list[list[float]] = default_encoder()(texts).tolist()
        return vectors

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]
