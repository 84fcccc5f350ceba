"""LangChain adapter: a chat model and a retriever that share one embedded engine.

The retriever makes the engine remember what it returned; the chat model sends the finished prompt,
in which the engine finds those texts again. Chains need no change in between.
"""

from __future__ import annotations

import importlib.util

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
from cachecraft_rag.langchain.retriever import CacheCraftRetriever
from cachecraft_rag.langchain.stuff import stuff_chunks

__all__ = [
    "CacheCraftCompletion",
    "CacheCraftRetriever",
    "ChatCacheCraft",
    "DefaultEmbeddings",
    "DenseRetriever",
    "create_cachecraft_rag_chain",
    "resume_capture",
    "stop_capture",
    "stuff_chunks",
]
