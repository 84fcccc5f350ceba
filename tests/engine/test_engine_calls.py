"""What a call does between its entry and its answer, on a backend without vLLM."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cachecraft_rag.chunks import Chunk
from cachecraft_rag.engine import CacheCraftEngine, Completion
from cachecraft_rag.engine.api import ChatEngine
from cachecraft_rag.engine.backend import BackendOutput
from cachecraft_rag.engine.router import FullCompute
from cachecraft_rag.errors import (
    EngineError,
    GenerationError,
    InvalidRequestError,
    PromptTooLongError,
)
from cachecraft_rag.events import Reason, RequestDecision

RIVER = Chunk("The river flows from the hills to the sea.", doc_id="river", version="1")
QUEEN = Chunk("The queen answered the letter in June.", doc_id="queen")


def ask(*chunks: Chunk) -> list[dict[str, str]]:
    return [{"role": "user", "content": "\n\n".join([*(c.text for c in chunks), "When?"])}]


def text_of_spans(engine: CacheCraftEngine, completion: Completion, spans: Any) -> list[str]:
    ids = completion.prompt_token_ids
    decode = engine._running._tokenizer.decode  # type: ignore[union-attr]
    return [decode(ids[span.start : span.end]) for span in spans]


def assert_reason(completion: Completion, reason: Reason, detail: str = "") -> None:
    assert completion.report.reason is reason
    assert completion.report.detail == detail


def test_engine_has_the_protocol_of_the_adapters(engine: CacheCraftEngine) -> None:
    """The engine is a `ChatEngine`, which is all the adapters know of it."""
    engine.start()
    assert isinstance(engine, ChatEngine)


def test_chat_answers_with_text_and_report(engine: CacheCraftEngine) -> None:
    """A chat call gives the whole text, the tokens, and a report with a time to first token."""
    completion = engine.chat(ask(RIVER), chunks=[RIVER])
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("one two", (0, 1), "stop")
    assert completion.report.decision is RequestDecision.REUSE
    assert completion.report.ttft_s > 0
    assert completion.report.num_prompt_tokens == completion.num_prompt_tokens


def test_chunks_are_sent_with_spans_that_hold_their_text(engine, backend, spec_of) -> None:
    """The spec names each chunk of the prompt, in order, by the tokens that are its text."""
    completion = engine.chat(ask(QUEEN, RIVER), chunks=[RIVER, QUEEN])
    spans = [chunk.span for chunk in spec_of(backend.requests[0]).chunks]
    assert text_of_spans(engine, completion, spans) == [QUEEN.text, RIVER.text]


@pytest.mark.parametrize("reuse", ["auto", "off"])
def test_a_report_shows_the_prompt(engine, backend, tokenizer, reuse: str) -> None:
    """Its pieces are the rendered prompt, cut at the chunks, at the tokens that were sent."""
    messages = ask(QUEEN, RIVER)
    completion = engine.chat(messages, chunks=[RIVER, QUEEN], reuse=reuse)
    pieces = completion.report.pieces
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert "".join(piece.text for piece in pieces) == rendered
    ids = backend.requests[0].token_ids
    for piece in pieces:
        assert tokenizer.decode(ids[piece.start : piece.start + piece.num_tokens]) == piece.text
    assert {QUEEN.text, RIVER.text} < {piece.text for piece in pieces}
    assert QUEEN.text in completion._repr_html_()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_async_calls_answer_like_the_others(engine: CacheCraftEngine, is_stream: bool) -> None:
    """Awaited and streamed calls give the same completion from a loop of the caller's own."""
    if is_stream:
        deltas = [delta async for delta in engine.astream_complete("Hello")]
        completion = deltas[-1].completion
    else:
        completion = await engine.acomplete("Hello")
    assert completion is not None
    assert completion.text == "one two"


def test_stream_gives_pieces_then_the_completion(engine: CacheCraftEngine) -> None:
    """Streamed pieces add up to the text; only the last delta carries the completion."""
    deltas = list(engine.stream_chat(ask(RIVER)))
    assert [delta.text for delta in deltas] == ["one", " two", ""]
    assert [delta.completion is None for delta in deltas] == [True, True, False]
    assert deltas[-1].completion.text == "one two"  # type: ignore[union-attr]


async def test_blocking_call_works_inside_a_running_loop(engine: CacheCraftEngine) -> None:
    """A notebook's running loop does not forbid the blocking calls."""
    assert engine.complete("Hello").text == "one two"


def test_closing_a_stream_aborts_the_request(engine: CacheCraftEngine, backend) -> None:
    """A consumer that stops early ends the request in vLLM."""
    stream = engine.stream_complete("Hello")
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    engine.complete("Hello")  # behind the abort on the engine's loop
    assert backend.num_aborted == 1


async def test_cancelling_an_awaited_call_aborts_the_request(engine, backend) -> None:
    """Cancelling the caller's task ends the request in vLLM."""
    backend.gate = asyncio.Event()
    task = asyncio.create_task(engine.acomplete("Hello"))
    while not backend.requests:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    backend.gate = None
    await engine.acomplete("Hello")
    assert backend.num_aborted == 1


def test_fault_with_reuse_on_is_answered_without(engine: CacheCraftEngine, backend) -> None:
    """A request that fails once is sent again in full, and its report says why."""
    backend.scripts.extend([GenerationError("boom"), ("fine",)])
    completion = engine.chat(ask(RIVER), chunks=[RIVER])
    assert completion.text == "fine"
    assert_reason(completion, Reason.ENGINE_FAULT, "boom")
    first, second = backend.requests
    assert first.request_id != second.request_id
    assert first.token_ids == second.token_ids


def test_error_finish_counts_as_a_fault(engine: CacheCraftEngine, backend) -> None:
    """vLLM's own error ending is answered again like a raised one."""
    backend.scripts.extend([BackendOutput("", (), "error"), ("fine",)])
    assert_reason(
        engine.chat(ask(RIVER)), Reason.ENGINE_FAULT, "vLLM ended the request with an error of its own"
    )


def test_fault_in_full_compute_is_raised(engine: CacheCraftEngine, backend) -> None:
    """A request that failed with reuse off as well is the caller's to know."""
    backend.scripts.append(GenerationError("boom"))
    with pytest.raises(GenerationError, match="boom"):
        engine.chat(ask(RIVER), reuse="off")
    backend.scripts.extend([GenerationError("boom"), GenerationError("boom again")])
    with pytest.raises(GenerationError, match="boom again"):
        engine.chat(ask(RIVER))


def test_stream_that_fails_before_its_first_piece_is_sent_again(engine, backend) -> None:
    """As long as nothing was handed out, a failed stream starts over without reuse."""
    backend.scripts.extend([GenerationError("boom"), ("fine",)])
    *_, last = engine.stream_chat(ask(RIVER))
    assert last.completion is not None
    assert_reason(last.completion, Reason.ENGINE_FAULT, "boom")


def test_dead_engine_is_not_asked_again(engine: CacheCraftEngine, backend) -> None:
    """A dead engine is reported as such, at once."""
    backend.scripts.append(EngineError("the process died"))
    with pytest.raises(EngineError, match="died"):
        engine.chat(ask(RIVER))
    assert len(backend.requests) == 1


def test_report_is_fetched_when_it_did_not_come_with_the_answer(engine, backend) -> None:
    """A report that the last output lacks is asked for, until it is there."""
    backend.delivers_report, backend.polls_until_reply = False, 2
    completion = engine.chat(ask(RIVER), chunks=[RIVER])
    assert completion.report.decision is RequestDecision.REUSE
    assert backend.polls == ["cachecraft_take_report"] * 3


def test_delivered_report_is_not_asked_for(engine: CacheCraftEngine, backend) -> None:
    """No question is sent where the report came with the answer."""
    engine.chat(ask(RIVER))
    assert backend.polls == []


def test_lost_report_does_not_lose_the_answer(engine: CacheCraftEngine, backend) -> None:
    """An answer without a report says so, with counts that add up."""
    backend.delivers_report = backend.keeps_report = False
    completion = engine.chat(ask(RIVER), chunks=[RIVER])
    assert completion.text == "one two"
    assert_reason(completion, Reason.REPORT_LOST)
    assert [chunk.reason for chunk in completion.report.chunks] == [Reason.REPORT_LOST]
    assert completion.report.num_computed_tokens == completion.num_prompt_tokens


def test_chunk_that_is_not_in_the_prompt_is_reported(engine: CacheCraftEngine) -> None:
    """A passed chunk whose text is not in the prompt gets a report of its own, without tokens."""
    absent = engine.chat(ask(RIVER), chunks=[RIVER, QUEEN]).report.chunks[-1]
    assert (absent.doc_id, absent.reason, absent.num_tokens) == ("queen", Reason.NOT_IN_PROMPT, 0)


def test_model_that_cannot_be_reused_says_why(make_engine, backend) -> None:
    """Without the connector every report carries the reason, and chunks are counted as computed."""
    engine = make_engine(is_attached=False, off=FullCompute(Reason.UNSUPPORTED_MODEL, "MLA"))
    completion = engine.chat(ask(RIVER), chunks=[RIVER])
    assert_reason(completion, Reason.UNSUPPORTED_MODEL, "MLA")
    assert completion.report.chunks[0].num_computed_tokens > 0
    assert backend.requests[0].params is None


def test_max_tokens_is_clipped_to_the_window(engine: CacheCraftEngine, backend) -> None:
    """An answer longer than the room left is cut short rather than refused."""
    completion = engine.complete("Hello", max_tokens=10_000, min_tokens=9_000)
    sampling = backend.requests[0].sampling
    assert sampling.max_tokens == engine.max_model_len - completion.num_prompt_tokens
    assert sampling.min_tokens == sampling.max_tokens


def test_prompt_that_fills_the_window_is_refused(engine: CacheCraftEngine, backend) -> None:
    """A prompt without room for one token is refused with the figures, before vLLM sees it."""
    with pytest.raises(PromptTooLongError, match="max_model_len is 512"):
        engine.complete("When? " * 600)
    assert backend.requests == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reuse": "sometimes"}, "reuse is 'sometimes'"),
        ({"recompute_ratio": 1.5}, "recompute_ratio is 1.5"),
        ({"chunks": ["text"]}, r"chunks\[0\] is a str"),
        ({"chunks": "text"}, "chunks is a str"),
        ({"tenant": ""}, "tenant is ''"),
        ({"store": "yes"}, "store is 'yes'"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"best_of": 2}, "unknown sampling option 'best_of'"),
    ],
)
def test_bad_argument_is_refused_before_the_start(engine, arguments, message) -> None:
    """A wrong argument is named in the error, and no engine is started for it."""
    for call in (engine.chat, engine.stream_chat, engine.astream_chat):
        with pytest.raises(InvalidRequestError, match=message):
            call(ask(RIVER), **arguments)
    assert not engine.is_started


@pytest.mark.parametrize("messages", [[], "Hello", [{"role": "user"}], ["Hello"]])
def test_messages_of_another_form_are_refused(engine: CacheCraftEngine, messages: Any) -> None:
    """Messages must be a non-empty list of mappings with role and content."""
    with pytest.raises(InvalidRequestError, match="messages"):
        engine.chat(messages)
    assert not engine.is_started


def test_empty_prompt_is_refused(engine: CacheCraftEngine) -> None:
    """There is nothing to continue in an empty prompt."""
    with pytest.raises(InvalidRequestError, match="prompt is ''"):
        engine.complete("")


def test_counters_add_up(engine: CacheCraftEngine, backend) -> None:
    """`stats` counts requests, reuse and faults."""
    backend.replies["stats"] = {"num_records": 3}
    backend.scripts.extend([GenerationError("boom"), ("fine",)])
    engine.chat(ask(RIVER), chunks=[RIVER])
    engine.chat(ask(RIVER))
    stats = engine.stats()
    assert stats["num_records"] == 3
    counted = {name: stats["engine"][name] for name in ("num_requests", "num_faults", "num_known_chunks")}
    assert counted == {"num_requests": 2, "num_faults": 1, "num_known_chunks": 1}
    assert stats["engine"]["num_requests_with_reuse"] == 1


@pytest.mark.parametrize(
    "option",
    [
        {"max_tokens": "x"},
        {"max_tokens": 2.5},
        {"max_tokens": True},
        {"temperature": "hot"},
        {"temperature": float("nan")},
        {"top_p": None},
        {"top_k": "a"},
        {"seed": "a"},
        {"logprobs": "a"},
        {"stop": 3},
        {"stop": [3]},
    ],
    ids=str,
)
def test_options_of_a_wrong_type_are_named(engine: CacheCraftEngine, option: dict[str, Any]) -> None:
    """The message says which option and which value, before the engine starts."""
    [name] = option
    with pytest.raises(InvalidRequestError, match=name):
        engine.chat(ask(), **option)
    assert not engine.is_started


@pytest.mark.parametrize("chunks", [RIVER, 3, "text"], ids=["chunk", "number", "text"])
def test_chunks_must_be_a_sequence(engine: CacheCraftEngine, chunks: Any) -> None:
    """One chunk by itself is an error that says what to pass."""
    with pytest.raises(InvalidRequestError, match="sequence of Chunk"):
        engine.warm(chunks)
