"""LangChain adapter: a chat model and a retriever that share one embedded engine.

The retriever makes the engine remember what it returned; the chat model sends the finished prompt,
in which the engine finds those texts again. Chains need no change in between.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from cachecraft_rag.errors import MissingDependencyError

if importlib.util.find_spec("langchain_core") is None:
    raise MissingDependencyError(
        "cachecraft_rag.langchain needs langchain-core: run `pip install 'cachecraft-rag[langchain]'`"
    )

from cachecraft_rag.langchain._capture import resume_capture, stop_capture
from cachecraft_rag.langchain.chain import create_cachecraft_rag_chain
from cachecraft_rag.langchain.chat_model import ChatCacheCraft
from cachecraft_rag.langchain.completion import CacheCraftCompletion
from cachecraft_rag.langchain.dense import DenseRetriever
from cachecraft_rag.langchain.embeddings import DefaultEmbeddings
from cachecraft_rag.langchain.indexing import aindex, index
from cachecraft_rag.langchain.retriever import CacheCraftRetriever
from cachecraft_rag.langchain.stuff import stuff_chunks

if TYPE_CHECKING:
    from cachecraft_rag.langchain.middleware import CacheCraftMiddleware as CacheCraftMiddleware

__all__ = [
    "CacheCraftCompletion",
    "CacheCraftRetriever",
    "ChatCacheCraft",
    "DefaultEmbeddings",
    "DenseRetriever",
    "aindex",
    "create_cachecraft_rag_chain",
    "index",
    "resume_capture",
    "stop_capture",
    "stuff_chunks",
]


def __getattr__(name: str) -> object:
    # Needs LangChain's agents, which the adapter does without. For the same reason it is not in `__all__`.
    if name == "CacheCraftMiddleware":
        from cachecraft_rag.langchain.middleware import CacheCraftMiddleware

        return CacheCraftMiddleware
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
