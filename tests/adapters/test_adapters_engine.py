"""Both adapters on one real engine, at the same time: right answers, right reports, nothing blocked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from langchain_core.messages import BaseMessage
from llama_index.core.base.llms.types import ChatMessage

from cachecraft_rag import CacheCraftConfig, CacheCraftEngine, Chunk, default_model
from cachecraft_rag.events import ChunkDecision, ReuseReport
from cachecraft_rag.langchain import ChatCacheCraft
from cachecraft_rag.llama_index import CacheCraftLLM

pytestmark = pytest.mark.engine

PASSAGES = Path(__file__).parents[2] / "examples" / "data" / "passages.jsonl"
SYSTEM = "Answer from the passages."
NUM_CHUNKS = 2
MAX_TOKENS = 8


@pytest.fixture(scope="module")
def chunks() -> list[Chunk]:
    rows = [json.loads(line) for line in PASSAGES.read_text().splitlines()]
    return [
        Chunk(row["text"], doc_id=row["doc_id"]) for row in sorted(rows, key=lambda r: len(r["text"]))[:16]
    ]


@pytest.fixture(scope="module")
def engine(chunks: list[Chunk]) -> Iterator[CacheCraftEngine]:
    # Everything recomputed in float32: then an answer with reuse is that of full compute, token for token.
    config = CacheCraftConfig(self_test=False, feedback_share=0)
    with CacheCraftEngine(default_model(), config=config, max_model_len=2048, dtype="float32") as engine:
        engine.warm(chunks, system=SYSTEM)
        yield engine


@pytest.fixture
def chat_model(engine: CacheCraftEngine) -> ChatCacheCraft:
    return ChatCacheCraft(engine=engine, max_tokens=MAX_TOKENS, reuse="recompute_all")


@pytest.fixture
def llm(engine: CacheCraftEngine) -> CacheCraftLLM:
    return CacheCraftLLM(engine=engine, max_tokens=MAX_TOKENS, reuse="recompute_all")


def prompt(chunks: Sequence[Chunk], question: str = "What is this about?") -> str:
    return "\n\n".join([*(chunk.text for chunk in chunks), question])


def for_langchain(text: str) -> list[tuple[str, str]]:
    return [("system", SYSTEM), ("human", text)]


def for_llama_index(text: str) -> list[ChatMessage]:
    return [ChatMessage(role="system", content=SYSTEM), ChatMessage(role="user", content=text)]


def full_answer(engine: CacheCraftEngine, text: str) -> str:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    return engine.chat(
        messages, reuse="off", store=False, read_prefix_cache=False, max_tokens=MAX_TOKENS
    ).text


def documents_of(report: dict[str, Any]) -> list[str | None]:
    return [chunk["doc_id"] for chunk in report["chunks"]]


def ids(chunks: Sequence[Chunk]) -> list[str | None]:
    return [chunk.doc_id for chunk in chunks]


def pairs(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Eight pairs of chunks; later ones come first, so that none stands where it was cached."""
    return [list(chunks[i : i + NUM_CHUNKS])[::-1] for i in range(0, 16, NUM_CHUNKS)]


def assert_right(engine: CacheCraftEngine, chosen: Sequence[Chunk], message: BaseMessage) -> None:
    """The answer is that of full compute, and its report names its own documents, found in the store."""
    assert message.content == full_answer(engine, prompt(chosen))
    report = message.response_metadata["cachecraft"]
    assert documents_of(report) == ids(chosen)
    assert all(chunk["decision"] != ChunkDecision.COMPUTED for chunk in report["chunks"])


def test_batch_of_eight_with_different_documents(
    engine: CacheCraftEngine, chat_model: ChatCacheCraft, chunks: list[Chunk]
) -> None:
    """Each of a batch has its own answer and its own report."""
    chosen = pairs(chunks)
    messages = chat_model.batch([for_langchain(prompt(pair)) for pair in chosen])
    for pair, message in zip(chosen, messages, strict=True):
        assert_right(engine, pair, message)


async def test_awaited_batch_from_a_running_loop(
    engine: CacheCraftEngine, chat_model: ChatCacheCraft, chunks: list[Chunk]
) -> None:
    """The same in the caller's event loop."""
    chosen = pairs(chunks)[:4]
    messages = await chat_model.abatch([for_langchain(prompt(pair)) for pair in chosen])
    for pair, message in zip(chosen, messages, strict=True):
        assert_right(engine, pair, message)


async def test_plain_call_inside_a_running_loop(
    engine: CacheCraftEngine, chat_model: ChatCacheCraft, llm: CacheCraftLLM, chunks: list[Chunk]
) -> None:
    """Notebooks run a loop: the calls that are not awaited work in it too."""
    chosen = pairs(chunks)[0]
    assert_right(engine, chosen, chat_model.invoke(for_langchain(prompt(chosen))))
    assert llm.chat(for_llama_index(prompt(chosen))).message.content == full_answer(engine, prompt(chosen))


def test_threads_of_both_frameworks(
    engine: CacheCraftEngine, chat_model: ChatCacheCraft, llm: CacheCraftLLM, chunks: list[Chunk]
) -> None:
    """Two models on one engine, called from eight threads: all read what was cached for both."""
    chosen = pairs(chunks)

    def ask(number: int) -> tuple[str, dict[str, Any]]:
        text = prompt(chosen[number])
        if number % 2:
            message = chat_model.invoke(for_langchain(text))
            return str(message.content), message.response_metadata["cachecraft"]
        response = llm.chat(for_llama_index(text))
        return str(response.message.content), response.additional_kwargs["cachecraft"]

    with ThreadPoolExecutor(8) as threads:
        for pair, (text, report) in zip(chosen, threads.map(ask, range(8)), strict=True):
            assert text == full_answer(engine, prompt(pair))
            assert documents_of(report) == ids(pair)
            assert ReuseReport.from_dict(report).num_computed_tokens < report["num_prompt_tokens"]


def test_interleaved_streams(
    engine: CacheCraftEngine, chat_model: ChatCacheCraft, llm: CacheCraftLLM, chunks: list[Chunk]
) -> None:
    """Two streams read in turn, one of each framework: neither gets the other's text or report."""
    first, second = pairs(chunks)[1:3]
    left = chat_model.stream(for_langchain(prompt(first)))
    right = llm.stream_chat(for_llama_index(prompt(second)))
    merged = next(left)
    response = next(right)
    for piece in left:
        merged += piece
        response = next(right, response)
    for response in right:  # noqa: B007  (the last one is wanted)
        pass
    assert_right(engine, first, merged)
    assert response.message.content == full_answer(engine, prompt(second))
    assert documents_of(response.additional_kwargs["cachecraft"]) == ids(second)


def test_follow_up_turn_and_same_question_hit_the_exact_prefix(
    engine: CacheCraftEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was computed in full is found in vLLM's own prefix cache by the next turn, and by the same
    question: no chunk of it is moved or recomputed."""
    rows = [json.loads(line) for line in PASSAGES.read_text().splitlines()]
    longest = sorted((row["text"] for row in rows), key=len)[-4:]
    model = ChatCacheCraft(engine=engine, max_tokens=MAX_TOKENS)
    engine.prefetch([Chunk(text) for text in longest])
    history: list[Any] = for_langchain("\n\n".join([*longest, "What is the first passage about?"]))
    answers = [model.invoke(history)]
    answers.append(model.invoke(history))
    answers.append(model.invoke([*history, answers[0], ("human", "And the second?")]))
    first, *later = [message.response_metadata["cachecraft"] for message in answers]
    assert {chunk["decision"] for chunk in first["chunks"]} == {ChunkDecision.COMPUTED.value}
    for report in later:
        assert {chunk["decision"] for chunk in report["chunks"]} == {ChunkDecision.EXACT.value}
        assert report["num_recomputed_tokens"] == 0
        assert report["num_computed_tokens"] < first["num_computed_tokens"] / 4
    assert answers[1].content == answers[0].content
    with capsys.disabled():
        names = ("first turn", "the same question", "turn 2")
        figures = [f"{name} {r['ttft_s']:.3f} s" for name, r in zip(names, (first, *later), strict=True)]
        print("\nTTFT:", ", ".join(figures))


async def test_async_server_answers_others_during_a_generation(engine: CacheCraftEngine) -> None:
    """An app on one event loop answers health checks between the pieces of a streamed answer."""
    model = ChatCacheCraft(engine=engine)
    app = FastAPI()

    @app.get("/health")
    async def health() -> dict[str, bool]:
        return {"ok": True}

    @app.get("/answer")
    async def answer() -> StreamingResponse:
        async def pieces() -> AsyncIterator[str]:
            async for piece in model.astream(
                "Count from one to one hundred.", max_tokens=64, ignore_eos=True
            ):
                yield str(piece.content)

        return StreamingResponse(pieces())

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as client:
        generation = asyncio.create_task(client.get("/answer", timeout=60))
        num_answered = 0
        while not generation.done():
            assert (await client.get("/health")).json() == {"ok": True}
            num_answered += 1
            await asyncio.sleep(0)
        assert generation.result().text
    # A loop that is blocked by the generation answers once, before it begins.
    assert num_answered > 10
