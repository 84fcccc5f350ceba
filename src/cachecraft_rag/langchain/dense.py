"""A small retriever over the shared dense index, for those who have none of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict, Field, InstanceOf

from cachecraft_rag.retrieval import DenseIndex, Encoder


class DenseRetriever(BaseRetriever):
    """Returns the `k` documents nearest to a query by cosine similarity, best first.

    Args:
        index: ids are positions in `documents`.
        k: most documents to return; a call may say otherwise: `retriever.invoke(query, k=8)`.
    """

    model_config = ConfigDict(extra="forbid")

    documents: list[Document]
    index: InstanceOf[DenseIndex] = Field(exclude=True, repr=False)
    k: int = Field(default=4, ge=1)

    @classmethod
    def from_documents(
        cls, documents: Sequence[Document], *, k: int = 4, encoder: Encoder | None = None
    ) -> Self:
        """Embed `documents` by their `page_content`.

        Args:
            encoder: embeds texts; None takes the embedded default model.

        Raises:
            MissingDependencyError: FAISS or the default embedding model is not installed.
        """
        index = DenseIndex.from_texts([document.page_content for document in documents], encoder)
        return cls(documents=list(documents), index=index, k=k)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        return self._search(query, **kwargs)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        # In a thread: embedding the query takes milliseconds of the caller's loop.
        return await asyncio.to_thread(self._search, query, **kwargs)

    def _search(self, query: str, k: int | None = None) -> list[Document]:
        return [self.documents[i] for i, _ in self.index.search(query, self.k if k is None else k)]
