"""`ChatCacheCraft` against the fake engine."""

from __future__ import annotations

import copy
import functools
import operator
import pickle
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler, UsageMetadataCallbackHandler
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.runnables import ConfigurableField

from cachecraft_rag.chunks import Chunk
from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.engine import CompletionDelta, Message
from cachecraft_rag.errors import ConfigurationError, EngineClosedError, InvalidRequestError
from cachecraft_rag.events import ChunkDecision, ReuseReport
from cachecraft_rag.langchain import ChatCacheCraft
from cachecraft_rag.testing import FakeEngine

PASSAGE = "The bridge was rebuilt in 1987 by the council."


class ClosingEngine(FakeEngine):
    """Records whether its streams were closed."""

    num_closed = 0

    def stream_chat(
        self, messages: Sequence[Message], *, chunks: Sequence[Chunk] = (), **options: Any
    ) -> Iterator[CompletionDelta]:
        try:
            yield from super().stream_chat(messages, chunks=chunks, **options)
        finally:
            self.num_closed += 1

    async def astream_chat(
        self, messages: Sequence[Message], *, chunks: Sequence[Chunk] = (), **options: Any
    ) -> AsyncIterator[CompletionDelta]:
        try:
            async for delta in super().astream_chat(messages, chunks=chunks, **options):
                yield delta
        finally:
            self.num_closed += 1


class TokenRecorder(BaseCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[str] = []

    def on_llm_new_token(self, token: str, **_: Any) -> None:
        self.tokens.append(token)


async def invoke(llm: ChatCacheCraft, text: str) -> AIMessage:
    return llm.invoke(text)


async def ainvoke(llm: ChatCacheCraft, text: str) -> AIMessage:
    return await llm.ainvoke(text)


async def stream(llm: ChatCacheCraft, text: str) -> AIMessage:
    return joined(list(llm.stream(text)))


async def astream(llm: ChatCacheCraft, text: str) -> AIMessage:
    return joined([chunk async for chunk in llm.astream(text)])


def joined(chunks: Sequence[AIMessageChunk]) -> AIMessageChunk:
    return functools.reduce(operator.add, chunks)


def report_of(message: AIMessage) -> ReuseReport:
    return ReuseReport.from_dict(message.response_metadata["cachecraft"])


def assert_plain(value: Any) -> None:
    """Only the types that JSON has, exactly."""
    assert type(value) in (dict, list, str, int, float, bool, type(None)), type(value)
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for child in children:
        assert_plain(child)


def sent_options(llm: Any, **call: Any) -> dict[str, Any]:
    """What the engine is asked for by one call."""
    bound = llm.bound if hasattr(llm, "bound") else llm
    llm.invoke("hi", **call)
    return dict(bound.engine.last_call.options)


@pytest.mark.parametrize(
    ("way", "method"),
    [(invoke, "chat"), (ainvoke, "achat"), (stream, "stream_chat"), (astream, "astream_chat")],
)
async def test_each_way_of_calling_uses_its_own_engine_method(way: Callable[..., Any], method: str) -> None:
    """Sync, async and streaming calls go natively to the engine and give the same answer."""
    engine = FakeEngine("in the year 1987")
    message = await way(ChatCacheCraft(engine=engine), "When?")
    assert engine.last_call.method == method
    assert message.content == "in the year 1987"
    assert engine.last_call.messages == ({"role": "user", "content": "When?"},)


@pytest.mark.parametrize("way", [invoke, ainvoke, stream, astream])
async def test_answer_carries_usage_and_report(way: Callable[..., Any]) -> None:
    """Every answer holds token counts, the model's name, why it ended, and its reuse report."""
    engine = FakeEngine("one two three", model_name="tiny")
    llm = ChatCacheCraft(engine=engine, max_tokens=2)
    engine.prefetch([Chunk(PASSAGE, doc_id="a")])
    llm.invoke(PASSAGE)
    message = await way(llm, f"Again: {PASSAGE}")
    report = report_of(message)
    assert message.response_metadata["model_name"] == "tiny"
    assert message.response_metadata["finish_reason"] == "length"
    assert report == llm.last_report
    assert [chunk.decision for chunk in report.chunks] == [ChunkDecision.REUSED]
    assert message.usage_metadata == {
        "input_tokens": report.num_prompt_tokens,
        "output_tokens": 2,
        "total_tokens": report.num_prompt_tokens + 2,
        "input_token_details": {"cache_read": report.num_reused_tokens, "cache_creation": 0},
    }
    assert report.num_reused_tokens > 0


def test_report_in_the_message_is_plain_data() -> None:
    """The metadata holds no enum or tuple, so any checkpointer brings it back as it was."""
    engine = FakeEngine()
    engine.prefetch([Chunk(PASSAGE)])
    message = ChatCacheCraft(engine=engine).invoke(PASSAGE)
    assert message.response_metadata["cachecraft"]["chunks"]
    assert_plain(message.response_metadata)


def test_stream_gives_one_piece_per_delta() -> None:
    """Text arrives in the engine's pieces; only the last message is marked and carries usage."""
    *pieces, last = ChatCacheCraft(engine=FakeEngine("one two three")).stream("count")
    assert [piece.content for piece in pieces] == ["one", " two", " three"]
    assert all(piece.usage_metadata is None and piece.chunk_position is None for piece in pieces)
    assert last.chunk_position == "last"
    assert last.usage_metadata is not None


def test_interleaved_streams_keep_their_own_reports() -> None:
    """Two streams read in turn each end with the report of their own prompt."""
    engine = FakeEngine("a b")
    engine.prefetch([Chunk("first document", doc_id="1"), Chunk("second document", doc_id="2")])
    llm = ChatCacheCraft(engine=engine)
    pairs = zip(llm.stream("read first document"), llm.stream("read second document"), strict=True)
    *_, (first, second) = pairs
    assert [chunk.doc_id for chunk in report_of(first).chunks] == ["1"]
    assert [chunk.doc_id for chunk in report_of(second).chunks] == ["2"]


async def test_a_batch_keeps_documents_apart() -> None:
    """Eight prompts with a document each: every answer and every report is that of its own prompt."""
    engine = FakeEngine(lambda prompt: f"about {prompt.removeprefix('user: read ')}")
    engine.prefetch([Chunk(f"document number {i}.", doc_id=str(i)) for i in range(8)])
    llm = ChatCacheCraft(engine=engine)
    prompts = [f"read document number {i}." for i in range(8)]
    for answers in (llm.batch(prompts), await llm.abatch(prompts)):
        assert [answer.content for answer in answers] == [f"about document number {i}." for i in range(8)]
        doc_ids = [[chunk.doc_id for chunk in report_of(answer).chunks] for answer in answers]
        assert doc_ids == [[str(i)] for i in range(8)]


def test_two_models_on_one_engine_share_chunks_and_keep_their_settings() -> None:
    """What one model's prompt stored, the other's reuses; each sends its own options."""
    engine = FakeEngine()
    short, long = (ChatCacheCraft(engine=engine, max_tokens=count) for count in (1, 9))
    short.invoke(PASSAGE, chunks=[Chunk(PASSAGE)])
    assert engine.last_call.options == {"max_tokens": 1}
    answer = long.invoke(f"Again: {PASSAGE}")
    assert engine.last_call.options == {"max_tokens": 9}
    assert [chunk.decision for chunk in report_of(answer).chunks] == [ChunkDecision.REUSED]


def test_leaving_a_stream_closes_the_engines_stream() -> None:
    """A reader that stops early aborts the request."""
    engine = ClosingEngine("one two three")
    pieces = ChatCacheCraft(engine=engine).stream("count")
    next(pieces)
    assert engine.num_closed == 0
    pieces.close()
    assert engine.num_closed == 1


async def test_leaving_an_async_stream_closes_the_engines_stream() -> None:
    """The same for asynchronous readers, without waiting for the garbage collector."""
    engine = ClosingEngine("one two three")
    llm = ChatCacheCraft(engine=engine)
    pieces = llm._astream([HumanMessage("count")])
    await anext(pieces)
    assert engine.num_closed == 0
    await pieces.aclose()
    assert engine.num_closed == 1


@pytest.mark.parametrize(
    ("way", "streaming"), [(stream, None), (astream, None), (invoke, True), (ainvoke, True)]
)
async def test_callbacks_see_every_token_once(way: Callable[..., Any], streaming: bool | None) -> None:
    """`on_llm_new_token` fires per piece in streams, and in `invoke` with `streaming=True`."""
    recorder = TokenRecorder()
    await way(
        ChatCacheCraft(engine=FakeEngine("one two"), streaming=streaming, callbacks=[recorder]), "count"
    )
    assert [token for token in recorder.tokens if token] == ["one", " two"]


def test_usage_callback_counts_tokens_by_model() -> None:
    """LangChain's own usage counter finds the model's name and the counts."""
    usage = UsageMetadataCallbackHandler()
    llm = ChatCacheCraft(engine=FakeEngine("one two", model_name="tiny"))
    llm.invoke("count", {"callbacks": [usage]})
    assert usage.usage_metadata["tiny"]["output_tokens"] == 2


def test_settings_reach_the_engine_and_unset_ones_do_not() -> None:
    """Constructor settings are sent as options; None leaves an option to the engine."""
    llm = ChatCacheCraft(engine=FakeEngine(), max_tokens=7, reuse="exact", recompute_ratio=0.2, tenant="t")
    assert sent_options(llm) == {"max_tokens": 7, "reuse": "exact", "recompute_ratio": 0.2, "tenant": "t"}


def test_options_of_a_call_win_over_the_constructor() -> None:
    """Per-call and bound options replace the constructor's."""
    llm = ChatCacheCraft(engine=FakeEngine(), max_tokens=7, temperature=0.5)
    assert sent_options(llm, max_tokens=3, top_p=0.9) == {"max_tokens": 3, "temperature": 0.5, "top_p": 0.9}
    assert sent_options(llm.bind(max_tokens=4)) == {"max_tokens": 4, "temperature": 0.5}


def test_chunks_can_be_passed_with_a_call() -> None:
    """`chunks=` goes to the engine as it is."""
    engine = FakeEngine()
    ChatCacheCraft(engine=engine).invoke(PASSAGE, chunks=[Chunk(PASSAGE, doc_id="a")])
    assert engine.last_call.chunks == (Chunk(PASSAGE, doc_id="a"),)


@pytest.mark.parametrize(
    ("constructor", "bound", "call", "expected"),
    [
        (["a"], None, None, ["a"]),
        ("a", None, None, ["a"]),
        (None, ["b"], None, ["b"]),
        (None, None, ["c"], ["c"]),
        (["a"], ["b"], None, ["a", "b"]),
        (["a"], ["b"], ["c"], ["a", "c"]),
        (["a"], None, ["a", "c"], ["a", "c"]),
        (["a"], None, [], ["a"]),
    ],
)
def test_stop_texts_are_merged(constructor: Any, bound: Any, call: Any, expected: list[str]) -> None:
    """The constructor's stop texts always apply; LangChain lets a call replace what is bound."""
    llm = ChatCacheCraft(engine=FakeEngine(), stop=constructor)
    model = llm if bound is None else llm.bind(stop=bound)
    options = sent_options(model) if call is None else sent_options(model, stop=call)
    assert options["stop"] == expected


@pytest.mark.parametrize("stop", [None, []])
def test_no_stop_text_sends_none(stop: list[str] | None) -> None:
    """An empty list is the same as no stop text."""
    assert "stop" not in sent_options(ChatCacheCraft(engine=FakeEngine(), stop=stop))


def test_langchains_stream_switch_is_not_an_engine_option() -> None:
    """`stream=True` makes `invoke` stream inside, and is not sent on."""
    engine = FakeEngine("yes")
    assert ChatCacheCraft(engine=engine).invoke("hi", stream=True).content == "yes"
    assert engine.last_call.method == "stream_chat"


def test_unknown_constructor_argument_is_refused() -> None:
    """A misspelt setting is named, instead of being ignored as LangChain does by default."""
    with pytest.raises(ConfigurationError, match=r"max_token'.*max_tokens"):
        ChatCacheCraft(engine=FakeEngine(), max_token=3)


def test_unknown_option_of_a_call_is_refused() -> None:
    """The engine's own check reaches the caller."""
    with pytest.raises(InvalidRequestError, match="top_q"):
        ChatCacheCraft(engine=FakeEngine()).invoke("hi", top_q=1)


def test_settings_of_remote_models_are_dropped_with_a_warning() -> None:
    """Code that sets them on every model works, and is told that they do nothing."""
    with pytest.warns(UserWarning, match=r"api_key, timeout has no effect"):
        llm = ChatCacheCraft(engine=FakeEngine(), timeout=3, api_key="k", max_retries=None)
    assert sent_options(llm) == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "either model= or engine="),
        ({"model": "m", "engine": FakeEngine()}, "either model= or engine="),
        ({"engine": FakeEngine(), "config": CacheCraftConfig()}, "belong to the engine"),
        ({"engine": FakeEngine(), "engine_args": {"dtype": "float32"}}, "belong to the engine"),
        ({"model": "/no/such/model"}, "/no/such/model does not exist"),
        ({"model": "m", "engine_args": {"kv_transfer_config": {}}}, "kv_transfer_config"),
    ],
)
def test_settings_that_break_a_rule_fail_at_construction(settings: dict[str, Any], message: str) -> None:
    """Errors appear where the model is made, as ours and not wrapped by pydantic."""
    with pytest.raises(ConfigurationError, match=message):
        ChatCacheCraft(**settings)


@pytest.mark.parametrize("settings", [{"temperature": -1}, {"max_tokens": 0}, {"reuse": "yes"}])
def test_options_that_break_a_rule_fail_at_construction(settings: dict[str, Any]) -> None:
    """Sampling and reuse options are checked before the first call."""
    with pytest.raises(InvalidRequestError, match=next(iter(settings))):
        ChatCacheCraft(engine=FakeEngine(), **settings)


def test_models_with_equal_settings_share_an_engine() -> None:
    """Making a second model with the same settings starts nothing new; other settings do."""
    one, two = (ChatCacheCraft(model="some-model", temperature=t) for t in (0.0, 1.0))
    other = ChatCacheCraft(model="some-model", config=CacheCraftConfig(preset="fast"))
    assert one.chat_engine is two.chat_engine
    assert other.chat_engine is not one.chat_engine


def test_making_a_model_starts_no_engine() -> None:
    """The constructor, `repr` and LangChain's parameters leave vLLM alone."""
    llm = ChatCacheCraft(model="some-model")
    assert repr(llm) and llm._identifying_params and llm._get_ls_params()
    assert not llm.chat_engine.is_started


def test_a_deep_copy_uses_the_same_engine() -> None:
    """A copied model is independent in its settings and shares the engine."""
    llm = ChatCacheCraft(engine=FakeEngine(), stop=["a"])
    twin = copy.deepcopy(llm)
    assert twin.chat_engine is llm.chat_engine
    assert twin.stop == llm.stop and twin.stop is not llm.stop


def test_a_pickled_model_finds_its_engine_again() -> None:
    """Settings travel, the engine does not: here the loaded model finds the shared one."""
    llm = ChatCacheCraft(model="some-model", max_tokens=5)
    twin = pickle.loads(pickle.dumps(llm))
    assert twin.max_tokens == 5
    assert twin.chat_engine is llm.chat_engine


def test_a_model_with_an_engine_of_its_own_is_not_pickled() -> None:
    """An engine lives in its process; the error says how to make a model that travels."""
    with pytest.raises(ConfigurationError, match=r"cannot be pickled.*model="):
        pickle.dumps(ChatCacheCraft(engine=FakeEngine()))


def test_configurable_fields_work() -> None:
    """LangChain rebuilds the model with other settings; it keeps its engine and still streams."""
    llm = ChatCacheCraft(engine=FakeEngine(), temperature=0.1)
    configurable = llm.configurable_fields(temperature=ConfigurableField(id="warmth"))
    pieces = list(configurable.stream("hi", {"configurable": {"warmth": 0.7}}))
    assert llm.engine.last_call.options["temperature"] == 0.7
    assert [piece.content for piece in pieces] == ["fake", " answer", ""]


def test_close_ends_the_engine() -> None:
    """The context manager closes the engine, and later calls say so."""
    with ChatCacheCraft(engine=FakeEngine()) as llm:
        llm.invoke("hi")
    with pytest.raises(EngineClosedError):
        llm.invoke("hi")


def test_an_answer_cache_is_keyed_by_what_changes_answers() -> None:
    """The same question with the same settings is answered by the cache, which asks no engine, so counts
    of reuse stay as they were; with other settings the engine answers."""
    cache, engine = InMemoryCache(), FakeEngine(["first", "second"])
    llm = ChatCacheCraft(engine=engine, cache=cache)
    exact = ChatCacheCraft(engine=engine, cache=cache, reuse="exact")
    assert [llm.invoke("hi").content for _ in range(2)] == ["first", "first"]
    assert len(engine.calls) == 1
    assert exact.invoke("hi").content == "second"


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "b"},
        {"config": CacheCraftConfig(preset="fast")},
        {"engine_args": {"dtype": "float32"}},
        {"temperature": 0.4},
        {"max_tokens": 3},
        {"stop": ["x"]},
        {"reuse": "off"},
        {"recompute_ratio": 0.5},
        {"tenant": "t"},
    ],
)
def test_identifying_parameters_tell_settings_apart(changed: dict[str, Any]) -> None:
    """Every setting that changes answers, or whose answers must not be shared, is part of them."""
    plain = ChatCacheCraft(model="a")
    assert plain._identifying_params == ChatCacheCraft(model="a")._identifying_params
    assert plain._identifying_params != ChatCacheCraft(**{"model": "a", **changed})._identifying_params


def test_tracing_parameters() -> None:
    """Tracers see the provider, the model and the sampling settings; a call's values win."""
    llm = ChatCacheCraft(engine=FakeEngine(model_name="tiny"), temperature=0.5, max_tokens=9, stop=["a"])
    expected = {
        "ls_provider": "cachecraft",
        "ls_model_type": "chat",
        "ls_model_name": "tiny",
        "ls_temperature": 0.5,
        "ls_max_tokens": 2,
        "ls_stop": ["a", "b"],
    }
    assert llm._get_ls_params(stop=["b"], max_tokens=2) == expected
