"""LlamaIndex's instrumentation is told of each answered request."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterator
from typing import Any

import pytest
from llama_index.core import get_response_synthesizer
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.dispatcher import instrument_tags
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMCompletionEndEvent
from llama_index.core.instrumentation.span import active_span_id
from llama_index.core.schema import NodeWithScore, TextNode
from pydantic import Field

from cachecraft_rag import Chunk
from cachecraft_rag.errors import EngineClosedError
from cachecraft_rag.llama_index import CacheCraftLLM, ChunkReuseEvent
from cachecraft_rag.testing import FakeEngine

PASSAGE = "Faust is a tragedy by Goethe."
ENDPOINTS = [f"{kind}{name}" for name in ("chat", "complete") for kind in ("", "a", "stream_", "astream_")]


class Recorder(BaseEventHandler):
    """Notes our events and LlamaIndex's end events."""

    seen: list[BaseEvent] = Field(default_factory=list)

    def handle(self, event: BaseEvent, **_: Any) -> None:
        if isinstance(event, (ChunkReuseEvent, LLMChatEndEvent, LLMCompletionEndEvent)):
            self.seen.append(event)

    @property
    def reuse(self) -> list[ChunkReuseEvent]:
        return [event for event in self.seen if isinstance(event, ChunkReuseEvent)]


class Raising(BaseEventHandler):
    """A broken handler."""

    def handle(self, event: BaseEvent, **_: Any) -> None:
        raise RuntimeError("this handler is broken")


def attached(handler: BaseEventHandler) -> Iterator[BaseEventHandler]:
    root = get_dispatcher()
    root.add_event_handler(handler)
    yield handler
    root.event_handlers.remove(handler)


@pytest.fixture
def recorder() -> Iterator[BaseEventHandler]:
    yield from attached(Recorder())


@pytest.fixture
def broken_handler() -> Iterator[BaseEventHandler]:
    yield from attached(Raising())


async def started(llm: CacheCraftLLM, endpoint: str) -> Any:
    """A response, or a stream that was not read yet."""
    given: Any = f"{PASSAGE} Who?" if "complete" in endpoint else [ChatMessage(f"{PASSAGE} Who?")]
    result = getattr(llm, endpoint)(given)
    return await result if endpoint.startswith("a") else result


async def read(result: Any) -> Any:
    """The (last) response."""
    if isinstance(result, AsyncGenerator):
        return [piece async for piece in result][-1]
    return list(result)[-1] if isinstance(result, Generator) else result


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_each_answer_is_told_once(
    llm: CacheCraftLLM, engine: FakeEngine, recorder: Recorder, endpoint: str
) -> None:
    """With its report, under the endpoint's span, before LlamaIndex's end event."""
    engine.prefetch([Chunk(PASSAGE, doc_id="faust")])
    response = await read(await started(llm, endpoint))
    ours, end = recorder.seen
    assert isinstance(ours, ChunkReuseEvent)
    assert ours.report.to_dict() == response.additional_kwargs["cachecraft"]
    assert ours.report.chunks[0].doc_id == "faust"
    assert ours.model_name == "fake-model"
    assert ours.span_id == end.span_id and str(ours.span_id).startswith(f"CacheCraftLLM.{endpoint}-")


@pytest.mark.parametrize("endpoint", [name for name in ENDPOINTS if "stream" in name])
async def test_a_stream_is_told_of_at_its_end(llm: CacheCraftLLM, recorder: Recorder, endpoint: str) -> None:
    """Nothing is told while it runs, nor of one that is given up; its span is the one it began in."""
    stream = await started(llm, endpoint)
    given_up = await started(llm, endpoint)
    await anext(given_up) if isinstance(given_up, AsyncGenerator) else next(given_up)
    await given_up.aclose() if isinstance(given_up, AsyncGenerator) else given_up.close()
    assert recorder.reuse == []
    token = active_span_id.set("a span of the reader")
    await read(stream)
    active_span_id.reset(token)
    assert str(recorder.reuse[0].span_id).startswith(f"CacheCraftLLM.{endpoint}-")


def test_a_failed_request_is_not_told(llm: CacheCraftLLM, engine: FakeEngine, recorder: Recorder) -> None:
    """Nothing was answered."""
    engine.close()
    with pytest.raises(EngineClosedError):
        llm.complete("Who?")
    assert recorder.reuse == []


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_a_broken_handler_breaks_no_answer(
    llm: CacheCraftLLM, broken_handler: Raising, recorder: Recorder, endpoint: str
) -> None:
    """The answer comes, and other handlers are told."""
    response = await read(await started(llm, endpoint))
    assert response.raw["finish_reason"] == "stop"
    assert len(recorder.reuse) == 1


def test_tags_are_kept(llm: CacheCraftLLM, recorder: Recorder) -> None:
    """An application finds its own request again by LlamaIndex's tags."""
    with instrument_tags({"user": "ada"}):
        llm.complete("Who?")
    assert recorder.reuse[0].tags == {"user": "ada"}


def test_each_call_of_a_synthesizer_is_told(llm: CacheCraftLLM, recorder: Recorder) -> None:
    """One event per request, also where LlamaIndex makes several for one question."""
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in ("one", "two", "three")]
    get_response_synthesizer(llm=llm, response_mode="accumulate").synthesize("Who?", nodes)
    assert len({event.report.request_id for event in recorder.reuse}) == 3


def test_an_event_is_plain_data(llm: CacheCraftLLM, recorder: Recorder) -> None:
    """Tracing back ends dump events: the report's counts are in it."""
    llm.complete("Who?")
    dumped = recorder.reuse[0].model_dump(mode="json")
    assert dumped["class_name"] == "ChunkReuseEvent"
    assert dumped["report"]["num_prompt_tokens"] == 2
