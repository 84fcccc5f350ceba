"""`CacheCraftRetriever`: any LangChain retriever, with the engine told of what it returned."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever, RetrieverLike
from langchain_core.runnables import RunnableConfig
from pydantic import ConfigDict, Field, InstanceOf, SkipValidation

from cachecraft_rag.engine import ChatEngine
from cachecraft_rag.errors import ConfigurationError, InvalidRequestError
from cachecraft_rag.langchain._capture import TOLD_TAG, Target, count_target
from cachecraft_rag.langchain._documents import document_chunks
from cachecraft_rag.langchain.chat_model import ChatCacheCraft
from cachecraft_rag.langchain.dense import DenseRetriever
from cachecraft_rag.retrieval import Encoder


class CacheCraftRetriever(BaseRetriever):
    """Returns the base retriever's documents unchanged and remembers their texts in the engine,
    which then finds them in whatever prompt is built of them.

    A document is known to the engine by `page_content` without the white space around it. In
    reports its `doc_id` is `metadata["source"]`, else the document's id, and its version is
    `metadata["version"]`; neither decides what is reused.

    Args:
        base_retriever: a retriever, or any Runnable from a query to documents.
        llm: the chat model whose engine is told; its tenant is taken over.
        engine: the engine itself, instead of `llm`.
        k: number of documents to ask the base retriever for; None leaves it to that. Arguments of
            a call go to the base retriever too: `retriever.invoke(query, k=8)`.
        tenant: whose documents these are; needed only where it is not the chat model's.
        is_shared: all of them are public: KV that `engine.warm` stored for everybody is used.

    Raises:
        ConfigurationError: both or neither of `llm` and `engine` are given.
    """

    # LangChain's default is to ignore unknown arguments, which hides a misspelt one.
    model_config = ConfigDict(extra="forbid")

    base_retriever: InstanceOf[RetrieverLike]
    llm: InstanceOf[ChatCacheCraft] | None = None
    # Not validated: a protocol check would read `max_model_len`, which starts the engine.
    engine: Annotated[ChatEngine | None, SkipValidation] = Field(default=None, exclude=True, repr=False)
    k: int | None = Field(default=None, ge=1)
    tenant: str | None = None
    is_shared: bool = False

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        if (self.llm is None) == (self.engine is None):
            raise ConfigurationError("give either llm= or engine=: one of them is told of the documents")
        # Capture, which does not know whose documents these are, leaves our runs alone.
        self.tags = [*(self.tags or ()), TOLD_TAG]
        count_target(self, CacheCraftRetriever._target)

    @classmethod
    def from_texts(
        cls,
        texts: Sequence[str],
        metadatas: Sequence[Mapping[str, Any]] | None = None,
        *,
        k: int = 4,
        encoder: Encoder | None = None,
        **settings: Any,
    ) -> Self:
        """`from_documents` for plain texts and, if given, one metadata mapping for each.

        Raises:
            InvalidRequestError: there are not as many metadata mappings as texts.
        """
        metadatas = [{}] * len(texts) if metadatas is None else metadatas
        if len(metadatas) != len(texts):
            raise InvalidRequestError(
                f"metadatas has {len(metadatas)} entries for {len(texts)} texts: give one for each, or none"
            )
        documents = [
            Document(page_content=text, metadata=dict(metadata))
            for text, metadata in zip(texts, metadatas, strict=True)
        ]
        return cls.from_documents(documents, k=k, encoder=encoder, **settings)

    @classmethod
    def from_documents(
        cls,
        documents: Sequence[Document],
        *,
        k: int = 4,
        encoder: Encoder | None = None,
        **settings: Any,
    ) -> Self:
        """A retriever over these documents with the embedded default embedding model and FAISS.

        Args:
            settings: arguments of the class: `llm` or `engine`, `tenant`, `is_shared`.
            encoder: embeds texts; None takes the embedded default model.

        Raises:
            MissingDependencyError: FAISS or the default embedding model is not installed.
        """
        return cls(base_retriever=DenseRetriever.from_documents(documents, k=k, encoder=encoder), **settings)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        documents = self.base_retriever.invoke(query, _config_below(run_manager), **self._arguments(kwargs))
        self._remember(documents)
        return documents

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        documents = await self.base_retriever.ainvoke(
            query, _config_below(run_manager), **self._arguments(kwargs)
        )
        # In a thread: hashing many texts takes milliseconds of the caller's loop.
        await asyncio.to_thread(self._remember, documents)
        return documents

    def _arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return kwargs if self.k is None else {"k": self.k, **kwargs}

    def _remember(self, documents: list[Document]) -> None:
        target = self._target()
        target.engine.prefetch(document_chunks(documents, is_shared=self.is_shared), tenant=target.tenant)

    def _target(self) -> Target:
        engine, tenant = self.engine, self.tenant
        if self.llm is not None:
            engine, tenant = self.llm.chat_engine, tenant or self.llm.tenant
        assert engine is not None  # checked by __init__
        return Target(engine, tenant, self.is_shared)


def _config_below(
    run_manager: CallbackManagerForRetrieverRun | AsyncCallbackManagerForRetrieverRun,
) -> RunnableConfig:
    return {"callbacks": run_manager.get_child(), "tags": [TOLD_TAG]}
