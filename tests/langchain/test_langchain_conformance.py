"""LangChain's own conformance suites, run against the fake engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.retrievers import BaseRetriever
from langchain_tests.integration_tests import ChatModelIntegrationTests, RetrieversIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from cachecraft_rag.chunks import Chunk
from cachecraft_rag.langchain import CacheCraftRetriever, ChatCacheCraft, DenseRetriever
from cachecraft_rag.testing import FakeAnswer, FakeEngine

PASSAGE = "The bridge was rebuilt in 1987 by the council."
JOKE = json.dumps({"setup": "Why do cats purr?", "punchline": "To keep the engine warm."})
# What a model that can call tools would answer to the suite's questions.
ANSWERS = {
    "magic_function(3)": FakeAnswer("", (("magic_function", {"input": 3}),)),
    "weather in San Francisco": FakeAnswer("", (("get_weather", {"location": "San Francisco, CA"}),)),
    "'你好啊集团'": FakeAnswer("", (("unicode_customer", {"customer_name": "你好啊集团"}),)),
    "'こんにちは株式会社'": FakeAnswer("", (("unicode_customer", {"customer_name": "こんにちは株式会社"}),)),
    "joke about cats": JOKE,
}

# The suites pass settings of remote models to every class.
pytestmark = pytest.mark.filterwarnings("ignore:.* has no effect.*:UserWarning")


def answer(prompt: str) -> str | FakeAnswer:
    question = prompt.rpartition("\n")[2]
    return next((reply for asked, reply in ANSWERS.items() if asked in question), "a fake answer")


def encode_length(texts: Sequence[str]) -> np.ndarray:
    return np.array([[1.0, len(text)] for text in texts], dtype=np.float32)


class TestChatUnit(ChatModelUnitTests):
    """Construction and tracing parameters."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatCacheCraft

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": FakeEngine(answer)}


class TestChatIntegration(ChatModelIntegrationTests):
    """Calls, streams, events, batches, tools, structured answers and usage."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatCacheCraft

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": FakeEngine(answer)}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supported_usage_metadata_details(self) -> dict[str, Any]:
        return {"invoke": ["cache_read_input", "cache_creation_input"], "stream": []}

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        return ChatCacheCraft(**self.chat_model_params).invoke(PASSAGE, chunks=[Chunk(PASSAGE)])

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        llm = ChatCacheCraft(**self.chat_model_params)
        llm.invoke(PASSAGE, chunks=[Chunk(PASSAGE)])
        answer = llm.invoke(PASSAGE)
        assert answer.usage_metadata["input_token_details"]["cache_read"] > 0
        return answer


class TestChatIntegrationByTools(TestChatIntegration):
    """The same, with structured answers by forced tools."""

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "function_calling"}


class TestRetriever(RetrieversIntegrationTests):
    """Calls with and without `k`."""

    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return CacheCraftRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        llm = ChatCacheCraft(engine=FakeEngine())
        texts = [f"{PASSAGE}{'!' * i}" for i in range(5)]
        dense = CacheCraftRetriever.from_texts(texts, llm=llm, encoder=encode_length).base_retriever
        assert isinstance(dense, DenseRetriever)
        return {"base_retriever": dense, "llm": llm}

    @property
    def retriever_query_example(self) -> str:
        return "When was the bridge rebuilt?"
