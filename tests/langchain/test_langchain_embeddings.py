"""`DefaultEmbeddings`: the embedded model behind LangChain's interface."""

from __future__ import annotations

import pytest
from langchain_core.vectorstores import InMemoryVectorStore

from cachecraft_rag.langchain import DefaultEmbeddings

TEXTS = [
    "The harbour froze in January.",
    "The recipe needs two eggs and flour.",
    "A goal in the last minute.",
]


def test_a_vector_store_finds_what_is_meant() -> None:
    """Texts are found by their meaning, through a store that knows nothing of us."""
    store = InMemoryVectorStore.from_texts(TEXTS, embedding=DefaultEmbeddings())
    assert store.similarity_search("How do I bake a cake?", k=1)[0].page_content == TEXTS[1]


async def test_one_text_is_embedded_as_many_are() -> None:
    """Queries and documents share one space; awaiting gives the same vectors."""
    embeddings = DefaultEmbeddings()
    [document] = embeddings.embed_documents(TEXTS[:1])
    assert embeddings.embed_query(TEXTS[0]) == pytest.approx(document)
    assert await embeddings.aembed_query(TEXTS[0]) == pytest.approx(document)
