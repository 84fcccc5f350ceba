"""Shared by the LlamaIndex tests: a fake engine, a word embedding, and a few documents."""

from __future__ import annotations

import re
import zlib
from typing import Any, NoReturn

import pytest
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode

from cachecraft_rag.llama_index import CacheCraftLLM
from cachecraft_rag.testing import FakeEngine

NUM_DIMENSIONS = 512


class WordEmbedding(BaseEmbedding):
    """Counts words in hashed buckets: texts that share words are near, and no model is needed."""

    def _get_text_embedding(self, text: str) -> list[float]:
        vector = [0.0] * NUM_DIMENSIONS
        for word in re.findall(r"\w+", text.lower()):
            vector[zlib.crc32(word.encode()) % NUM_DIMENSIONS] += 1.0
        return vector

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine("Goethe wrote it", model_name="fake-model", max_model_len=4096)


@pytest.fixture
def llm(engine: FakeEngine) -> CacheCraftLLM:
    return CacheCraftLLM(engine=engine)


@pytest.fixture
def embed_model() -> WordEmbedding:
    return WordEmbedding()


@pytest.fixture
def nodes() -> list[TextNode]:
    """Three passages of two documents; the first shows the model a title and hides a date."""
    source = RelatedNodeInfo(node_id="doc-faust", hash="hash-of-faust")
    return [
        TextNode(
            id_="faust-1",
            text="  Faust is a tragedy by Goethe.\n",
            metadata={"title": "Faust", "date": "today"},
            excluded_llm_metadata_keys=["date"],
            relationships={NodeRelationship.SOURCE: source},
        ),
        TextNode(
            id_="faust-2",
            text="Mephisto makes a wager with {Faust}.",
            relationships={NodeRelationship.SOURCE: source},
        ),
        TextNode(id_="oslo", text="Oslo is the capital of Norway 🇳🇴."),
    ]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail at once on any attempt to reach a network."""
    import socket

    def refuse(*_: Any) -> NoReturn:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
