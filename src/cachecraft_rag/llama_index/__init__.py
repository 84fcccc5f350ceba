"""LlamaIndex on the embedded engine: a language model, and retrievers whose chunks it recognises.

The retriever tells the engine the texts it hands out; the engine finds them again in whatever prompt
LlamaIndex builds of them. Importing this loads neither vLLM nor torch.
"""

from __future__ import annotations

from cachecraft_rag.errors import MissingDependencyError

try:
    import llama_index.core  # noqa: F401
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("llama_index"):
        raise
    raise MissingDependencyError(
        "cachecraft_rag.llama_index needs LlamaIndex: run `pip install 'cachecraft-rag[llama-index]'`"
    ) from error

from cachecraft_rag.llama_index._events import ChunkReuseEvent
from cachecraft_rag.llama_index._structured import AnswerFormError
from cachecraft_rag.llama_index.embedding import DefaultEmbedding
from cachecraft_rag.llama_index.llm import CacheCraftLLM
from cachecraft_rag.llama_index.retriever import CacheCraftRetriever, DenseRetriever

__all__ = [
    "AnswerFormError",
    "CacheCraftLLM",
    "CacheCraftRetriever",
    "ChunkReuseEvent",
    "DefaultEmbedding",
    "DenseRetriever",
]
