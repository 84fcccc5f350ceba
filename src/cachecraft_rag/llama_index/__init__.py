"""LlamaIndex on the embedded engine: a language model, and retrievers whose chunks it recognises.

The engine is told the texts that are retrieved, by our retriever and synthesizer or, with those of
LlamaIndex, by watching them, and finds them again in whatever prompt is built of them. Importing this
loads neither vLLM nor torch.
"""

from __future__ import annotations

from cachecraft_rag.errors import AnswerFormError, MissingDependencyError

try:
    import llama_index.core  # noqa: F401
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("llama_index"):
        raise
    raise MissingDependencyError(
        "cachecraft_rag.llama_index needs LlamaIndex: run `pip install 'cachecraft-rag[llama-index]'`"
    ) from error

from cachecraft_rag.llama_index._capture import start_capture, stop_capture
from cachecraft_rag.llama_index._events import ChunkReuseEvent
from cachecraft_rag.llama_index.documents import follow
from cachecraft_rag.llama_index.embedding import DefaultEmbedding
from cachecraft_rag.llama_index.llm import CacheCraftLLM
from cachecraft_rag.llama_index.retriever import CacheCraftRetriever, DenseRetriever
from cachecraft_rag.llama_index.synthesizer import CacheCraftSynthesizer

__all__ = [
    "AnswerFormError",
    "CacheCraftLLM",
    "CacheCraftRetriever",
    "CacheCraftSynthesizer",
    "ChunkReuseEvent",
    "DefaultEmbedding",
    "DenseRetriever",
    "follow",
    "start_capture",
    "stop_capture",
]
