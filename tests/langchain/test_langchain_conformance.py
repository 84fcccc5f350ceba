"""LangChain's own conformance suites, run against the fake engine and the real one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.retrievers import BaseRetriever
from langchain_tests.integration_tests import ChatModelIntegrationTests, RetrieversIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from cachecraft_rag import default_model
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


def real_settings() -> dict[str, Any]:
    return {"model": default_model(), "engine_args": {"max_model_len": 2048}, "max_tokens": 128}


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


@pytest.fixture(scope="class")
def shared_engine() -> Iterator[None]:
    """Each test makes a model of its own; they share one engine, which ends with the class."""
    yield
    ChatCacheCraft(**real_settings()).close()


@pytest.mark.engine
@pytest.mark.usefixtures("shared_engine")
class TestChatEngine(ChatModelIntegrationTests):
    """The suite on the embedded model, which has 135 million parameters and no tool template."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatCacheCraft

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return real_settings()

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supported_usage_metadata_details(self) -> dict[str, Any]:
        return {"invoke": ["cache_read_input", "cache_creation_input"], "stream": []}

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        passage = "The mill on the Elm was built in 1612 and burnt down twice, in 1740 and in 1866."
        answer = ChatCacheCraft(**real_settings()).invoke(f"Read: {passage}", chunks=[Chunk(passage)])
        assert answer.usage_metadata["input_token_details"]["cache_creation"] > 0
        return answer

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        llm = ChatCacheCraft(**real_settings())
        llm.invoke(f"Read: {PASSAGE}", chunks=[Chunk(PASSAGE)])
        answer = llm.invoke(f"Read this again, please: {PASSAGE}")
        assert answer.usage_metadata["input_token_details"]["cache_read"] > 0
        return answer


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
