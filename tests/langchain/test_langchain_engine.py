"""A whole chain on the embedded model: real embeddings, real vLLM, real reuse."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from pydantic import BaseModel, Field

from cachecraft_rag import default_model
from cachecraft_rag.chunks import Chunk
from cachecraft_rag.events import ReuseReport
from cachecraft_rag.langchain import CacheCraftCompletion, CacheCraftRetriever, ChatCacheCraft

pytestmark = pytest.mark.engine

PASSAGES = [
    "The stone bridge over the Elm was rebuilt in 1987, after the flood of 1954 had weakened its arches.",
    "The bakery in Mill Lane opens at six and sells rye bread, walnut rolls and plum cake on Sundays.",
    "The observatory on Cold Hill has a telescope with a mirror of two metres, made in Jena in 1931.",
]
PROMPT = ChatPromptTemplate.from_messages(
    [("system", "Answer from these notes.\n\n{context}"), ("human", "{question}")]
)


@pytest.fixture(scope="module")
def llm() -> Iterator[ChatCacheCraft]:
    engine_args = {"dtype": "float32", "max_model_len": 1024}
    with ChatCacheCraft(model=default_model(), engine_args=engine_args, max_tokens=8) as model:
        yield model


@pytest.fixture(scope="module")
def retriever(llm: ChatCacheCraft) -> CacheCraftRetriever:
    return CacheCraftRetriever.from_texts(PASSAGES, [{"source": str(i)} for i in range(3)], llm=llm, k=2)


class Clock(BaseModel):
    """Set a clock."""

    hour: int = Field(ge=0, le=23)


def format_docs(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def chunk_sources(message: AIMessage) -> list[str | None]:
    report = ReuseReport.from_dict(message.response_metadata["cachecraft"])
    return [chunk.doc_id for chunk in report.chunks]


def assert_reused(message: AIMessage) -> None:
    assert message.usage_metadata is not None
    details = message.usage_metadata["input_token_details"]
    assert details["cache_read"] == message.response_metadata["cachecraft"]["num_reused_tokens"] > 0


async def test_chain_reuses_retrieved_chunks(llm: ChatCacheCraft, retriever: CacheCraftRetriever) -> None:
    """The chunks of one question are found in its prompt, and reused by later ones of any kind."""
    chain = {"context": retriever | format_docs, "question": RunnablePassthrough()} | PROMPT | llm
    question = "When was the bridge rebuilt?"
    first = chain.invoke(question)
    sources = [document.metadata["source"] for document in retriever.invoke(question)]
    assert sources[0] == "0"
    assert chunk_sources(first) == sources

    backwards = {"context": format_docs(retriever.invoke(question)[::-1]), "question": "Who made the mirror?"}
    again = llm.invoke(PROMPT.invoke(backwards))
    assert chunk_sources(again) == sources[::-1]
    assert_reused(again)

    pieces = [piece async for piece in chain.astream(question)]
    assert len([piece for piece in pieces if piece.text]) > 1
    assert pieces[-1].chunk_position == "last"
    assert_reused(pieces[-1])


async def test_plain_prompts_share_the_engine(llm: ChatCacheCraft) -> None:
    """The completion twin runs on the same engine, whole and streamed, and reuses the same chunks."""
    twin = CacheCraftCompletion(model=llm.model, engine_args=llm.engine_args, max_tokens=8)
    assert twin.chat_engine is llm.chat_engine
    chunk = Chunk("The ferry over the Elm leaves at nine and at noon, and takes a quarter of an hour.")
    whole = twin.invoke(f"Note: {chunk.text}\nQuestion: when?\nAnswer:", chunks=[chunk])
    again = f"A longer note: {chunk.text}\nQuestion: when?\nAnswer:"
    pieces = [piece async for piece in twin.astream(again)]
    assert whole and len([piece for piece in pieces if piece]) > 1
    assert twin.last_report is not None and twin.last_report.num_reused_tokens > 0


def test_forced_tools_and_schemas_are_kept(llm: ChatCacheCraft) -> None:
    """A small model keeps a form that decoding is bound to."""
    called = llm.bind_tools([Clock], tool_choice="Clock").invoke("Set the clock to noon.", max_tokens=64)
    assert [call["name"] for call in called.tool_calls] == ["Clock"]
    assert called.tool_calls[0]["args"].keys() == {"hour"}
    for method in ("json_schema", "function_calling"):
        answer = llm.with_structured_output(Clock, method=method).invoke("Noon, please.", max_tokens=64)
        assert isinstance(answer, Clock)
