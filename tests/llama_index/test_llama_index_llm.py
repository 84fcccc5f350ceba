"""CacheCraftLLM: eight endpoints, options, accounts, and its life."""

from __future__ import annotations

import asyncio
import copy
import pickle
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llama_index.core
import pytest
from llama_index.core import Document, PromptHelper, PromptTemplate, Settings, SummaryIndex
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    ImageBlock,
    MessageRole,
    TextBlock,
)
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.schema import BaseNode, NodeWithScore, TextNode

from cachecraft_rag import CacheCraftConfig, Chunk
from cachecraft_rag.engine import Completion, CompletionDelta, Message
from cachecraft_rag.errors import ConfigurationError, EngineClosedError, InvalidRequestError
from cachecraft_rag.events import Reason, ReuseReport
from cachecraft_rag.llama_index import CacheCraftLLM
from cachecraft_rag.testing import FakeEngine

QUESTION = [ChatMessage("Who wrote Faust?")]
ANSWER = "Goethe wrote it"
PASSAGE = "Faust is a tragedy by Goethe."


def report_of(response: ChatResponse | CompletionResponse) -> ReuseReport:
    return ReuseReport.from_dict(response.additional_kwargs["cachecraft"])


def assert_whole_chat(response: ChatResponse) -> None:
    assert response.message.role is MessageRole.ASSISTANT
    assert response.message.content == ANSWER
    assert response.raw["finish_reason"] == "stop"


def assert_whole_completion(response: CompletionResponse) -> None:
    assert response.text == ANSWER
    assert response.raw["finish_reason"] == "stop"


def assert_streamed(texts: Sequence[str], deltas: Sequence[str | None]) -> None:
    """The deltas add up to the answer, and each text is the sum of the deltas so far."""
    assert len([delta for delta in deltas if delta]) == len(ANSWER.split())
    assert list(texts) == ["".join(map(str, deltas[: i + 1])) for i in range(len(deltas))]
    assert texts[-1] == ANSWER


def assert_chat_stream(pieces: Sequence[ChatResponse], llm: CacheCraftLLM) -> None:
    assert_streamed([str(piece.message.content or "") for piece in pieces], [p.delta for p in pieces])
    assert_account_comes_last(pieces, llm)


def assert_completion_stream(pieces: Sequence[CompletionResponse], llm: CacheCraftLLM) -> None:
    assert_streamed([piece.text for piece in pieces], [piece.delta for piece in pieces])
    assert_account_comes_last(pieces, llm)


def assert_account_comes_last(
    pieces: Sequence[ChatResponse] | Sequence[CompletionResponse], llm: CacheCraftLLM
) -> None:
    assert all(piece.raw is None for piece in pieces[:-1])
    assert pieces[-1].raw["usage"]["completion_tokens"] == 3
    assert report_of(pieces[-1]) == llm.last_report


def test_chat_answers_through_the_chat_template(llm: CacheCraftLLM, engine: FakeEngine) -> None:
    """Messages reach the engine as messages, never joined as plain text."""
    assert_whole_chat(llm.chat([ChatMessage("Be brief.", role="system"), *QUESTION]))
    assert engine.last_call.method == "chat"
    assert engine.last_call.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who wrote Faust?"},
    )


async def test_achat_awaits_the_engine(llm: CacheCraftLLM, engine: FakeEngine) -> None:
    """The async endpoint uses the engine's own coroutine."""
    assert_whole_chat(await llm.achat(QUESTION))
    assert engine.last_call.method == "achat"


def test_stream_chat_yields_each_piece(llm: CacheCraftLLM) -> None:
    """Streaming gives one response per token, with the account on the last."""
    assert_chat_stream(list(llm.stream_chat(QUESTION)), llm)


async def test_astream_chat_yields_each_piece(llm: CacheCraftLLM) -> None:
    """As stream_chat, asynchronously."""
    assert_chat_stream([piece async for piece in await llm.astream_chat(QUESTION)], llm)


@pytest.mark.parametrize(("formatted", "method"), [(False, "chat"), (True, "complete")])
async def test_completion_goes_through_chat_unless_formatted(
    llm: CacheCraftLLM, engine: FakeEngine, formatted: bool, method: str
) -> None:
    """All four completion endpoints treat a plain prompt as one user message, a finished one as is."""
    assert_whole_completion(llm.complete("Who?", formatted=formatted))
    assert_completion_stream(list(llm.stream_complete("Who?", formatted=formatted)), llm)
    assert_whole_completion(await llm.acomplete("Who?", formatted=formatted))
    pieces = [piece async for piece in await llm.astream_complete("Who?", formatted=formatted)]
    assert_completion_stream(pieces, llm)
    used = [call.method for call in engine.calls]
    assert used == [method, f"stream_{method}", f"a{method}", f"astream_{method}"]
    prompt = "Who?" if formatted else "user: Who?"
    assert {call.prompt for call in engine.calls} == {prompt}


@pytest.mark.parametrize(
    ("role", "engine_role"),
    [
        (MessageRole.SYSTEM, "system"),
        (MessageRole.DEVELOPER, "system"),
        (MessageRole.USER, "user"),
        (MessageRole.ASSISTANT, "assistant"),
        (MessageRole.CHATBOT, "assistant"),
        (MessageRole.MODEL, "assistant"),
        (MessageRole.TOOL, "tool"),
        (MessageRole.FUNCTION, "tool"),
    ],
)
def test_roles_are_those_of_chat_templates(
    llm: CacheCraftLLM, engine: FakeEngine, role: MessageRole, engine_role: str
) -> None:
    """Other providers' role names become the ones that templates know."""
    llm.chat([ChatMessage("x", role=role)])
    assert engine.last_call.messages[0]["role"] == engine_role


def test_text_blocks_stay_apart(llm: CacheCraftLLM, engine: FakeEngine) -> None:
    """Several text blocks reach the engine as blocks, and an empty message as empty text."""
    llm.chat([ChatMessage(blocks=[TextBlock(text="a"), TextBlock(text="b")]), ChatMessage(blocks=[])])
    first, second = engine.last_call.messages
    assert first["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert second["content"] == ""


def test_other_blocks_are_refused(llm: CacheCraftLLM) -> None:
    """A block the model cannot read is an error, not silently left out."""
    message = ChatMessage(blocks=[TextBlock(text="What is this?"), ImageBlock(image=b"x")])
    with pytest.raises(InvalidRequestError, match=r"messages\[0\] holds a ImageBlock"):
        llm.chat([message])


def test_fields_and_call_options_reach_the_engine(engine: FakeEngine) -> None:
    """A call's own options win over additional_kwargs, which win over the fields."""
    llm = CacheCraftLLM(
        engine=engine,
        temperature=0.5,
        max_tokens=9,
        reuse="exact",
        recompute_ratio=0.25,
        tenant="acme",
        additional_kwargs={"top_p": 0.5, "seed": 1},
    )
    llm.chat(QUESTION, seed=2, max_tokens=2)
    assert engine.last_call.options == {
        "temperature": 0.5,
        "max_tokens": 2,
        "reuse": "exact",
        "recompute_ratio": 0.25,
        "tenant": "acme",
        "top_p": 0.5,
        "seed": 2,
    }


def test_answers_are_cut_at_max_tokens(engine: FakeEngine) -> None:
    """The field max_tokens limits the answer, and the response says so."""
    response = CacheCraftLLM(engine=engine, max_tokens=2).complete("Who?")
    assert (response.text, response.raw["finish_reason"]) == ("Goethe wrote", "length")


@pytest.mark.parametrize("endpoint", ["chat", "stream_chat", "achat", "astream_chat"])
async def test_unknown_call_option_is_an_error(llm: CacheCraftLLM, endpoint: str) -> None:
    """An option the engine does not know is refused at the call, also by streams not yet read."""
    with pytest.raises(InvalidRequestError, match="'best_of'"):
        result = getattr(llm, endpoint)(QUESTION, best_of=2)
        if asyncio.iscoroutine(result):
            await result


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_new_tokens": 5}, ConfigurationError, "'max_new_tokens'.*known are"),
        ({"additional_kwargs": {"best_of": 2}}, InvalidRequestError, "'best_of'"),
        ({"temperature": -1.0}, InvalidRequestError, "temperature is -1.0"),
        ({"reuse": "sometimes"}, InvalidRequestError, "reuse is 'sometimes'"),
        ({"model": "other"}, ConfigurationError, "either model= or engine="),
        ({"engine_args": {"max_model_len": 9}}, ConfigurationError, "give them to that engine"),
        ({"config": CacheCraftConfig()}, ConfigurationError, "give them to that engine"),
    ],
)
def test_wrong_constructor_arguments_are_refused(
    engine: FakeEngine, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    """A wrong argument is named when the model is made, not at its first answer."""
    with pytest.raises(error, match=message):
        CacheCraftLLM(engine=engine, **arguments)


def test_a_model_or_an_engine_is_needed() -> None:
    """Without either, the error says what to pass."""
    with pytest.raises(ConfigurationError, match="default_model"):
        CacheCraftLLM()


def test_metadata_is_the_engines(engine: FakeEngine) -> None:
    """LlamaIndex sees the real window and the length kept free for the answer."""
    metadata = CacheCraftLLM(engine=engine, max_tokens=100).metadata
    assert (metadata.context_window, metadata.num_output) == (4096, 100)
    assert metadata.is_chat_model
    assert metadata.model_name == "fake-model"


def test_given_facts_need_no_engine() -> None:
    """With window and tools given, reading metadata or tracing data starts no engine."""
    explicit = CacheCraftLLM("no-such-model", context_window=1000, is_function_calling_model=True)
    from_args = CacheCraftLLM(
        "no-such-model", engine_args={"max_model_len": 2000}, is_function_calling_model=False
    )
    assert (explicit.metadata.context_window, from_args.metadata.context_window) == (1000, 2000)
    assert (explicit.metadata.is_function_calling_model, from_args.metadata.is_function_calling_model) == (
        True,
        False,
    )
    assert "engine_args" not in from_args.to_payload()


async def answer_by(llm: CacheCraftLLM, endpoint: str, prompt: str) -> Any:
    """The (last) response that one of the eight endpoints gives."""
    given = prompt if "complete" in endpoint else [ChatMessage(prompt)]
    result = getattr(llm, endpoint)(given)
    if endpoint.startswith("a"):
        result = await result
    if isinstance(result, AsyncGenerator):
        return [piece async for piece in result][-1]
    return list(result)[-1] if isinstance(result, Generator) else result


ENDPOINTS = [f"{kind}{name}" for name in ("chat", "complete") for kind in ("", "a", "stream_", "astream_")]
each_endpoint = pytest.mark.parametrize("endpoint", ENDPOINTS)


@each_endpoint
async def test_usage_is_counted_by_llama_index(engine: FakeEngine, endpoint: str) -> None:
    """LlamaIndex's own token counter reads the usage, of streams from their last piece."""
    counter = TokenCountingHandler()
    llm = CacheCraftLLM(engine=engine, callback_manager=CallbackManager([counter]))
    await answer_by(llm, endpoint, "Who wrote Faust?")
    # The fake counts words: "user: Who wrote Faust?" and the answer.
    assert (counter.prompt_llm_token_count, counter.completion_llm_token_count) == (4, 3)


@each_endpoint
async def test_usage_tells_what_the_cache_gave(llm: CacheCraftLLM, engine: FakeEngine, endpoint: str) -> None:
    """Tokens read from the cache are counted as the report has them."""
    engine.warm([Chunk(PASSAGE)])
    response = await answer_by(llm, endpoint, f"{PASSAGE} Who?")
    assert response.raw["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 3,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 6, "cache_creation_tokens": 0},
    }
    assert report_of(response).num_reused_tokens == 6


def test_every_answer_carries_its_report(llm: CacheCraftLLM) -> None:
    """Chunks passed with a call are found, and the report is on the response and on the model."""
    chunk, question = Chunk(PASSAGE, doc_id="faust"), [ChatMessage(f"{PASSAGE}\n\nWho?")]
    first = llm.chat(question, chunks=[chunk])
    second = llm.chat(question)
    assert report_of(first).reason is Reason.NOT_CACHED
    assert report_of(second).reason is Reason.SAME_PREFIX
    assert report_of(second) == llm.last_report
    assert report_of(second).chunks[0].doc_id == "faust"


def test_interleaved_streams_keep_their_own_reports(llm: CacheCraftLLM, engine: FakeEngine) -> None:
    """Two streams read in turn each end with the report of their own prompt."""
    engine.prefetch([Chunk("alpha text", doc_id="a"), Chunk("beta text", doc_id="b")])
    streams = [llm.stream_chat([ChatMessage(f"{name} text")]) for name in ("alpha", "beta")]
    ends = [list(pair)[-1] for pair in zip(*zip(*streams, strict=True), strict=True)]
    assert [report_of(end).chunks[0].doc_id for end in ends] == ["a", "b"]


class _GatedEngine(FakeEngine):
    """Its coroutines answer only once `gate` is open; notes when a stream is given up."""

    def __init__(self) -> None:
        super().__init__(ANSWER)
        self.gate = asyncio.Event()
        self.num_closed_streams = 0

    async def achat(
        self, messages: Sequence[Message], *, chunks: Sequence[Chunk] = (), **options: Any
    ) -> Completion:
        await self.gate.wait()
        return await super().achat(messages, chunks=chunks, **options)

    def stream_chat(
        self, messages: Sequence[Message], *, chunks: Sequence[Chunk] = (), **options: Any
    ) -> Iterator[CompletionDelta]:
        try:
            yield from super().stream_chat(messages, chunks=chunks, **options)
        except GeneratorExit:
            self.num_closed_streams += 1
            raise

    async def astream_chat(
        self, messages: Sequence[Message], *, chunks: Sequence[Chunk] = (), **options: Any
    ) -> AsyncIterator[CompletionDelta]:
        await self.gate.wait()
        try:
            async for delta in super().astream_chat(messages, chunks=chunks, **options):
                yield delta
        except GeneratorExit:
            self.num_closed_streams += 1
            raise


@pytest.mark.parametrize("endpoint", [name for name in ENDPOINTS if name.startswith("a")])
async def test_async_calls_overlap(endpoint: str) -> None:
    """While one answer is awaited, the loop goes on, so a second one can be asked for."""
    engine = _GatedEngine()
    llm = CacheCraftLLM(engine=engine)
    waiting = [asyncio.create_task(answer_by(llm, endpoint, "Who?")) for _ in range(2)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    engine.gate.set()
    for response in await asyncio.gather(*waiting):
        assert response.raw["finish_reason"] == "stop"


class _PiecewiseEngine(FakeEngine):
    """Notes how much of a stream was taken."""

    num_taken = 0

    def stream_chat(
        self, messages: Sequence[Message], *, chunks: Sequence[Chunk] = (), **options: Any
    ) -> Iterator[CompletionDelta]:
        for delta in super().stream_chat(messages, chunks=chunks, **options):
            self.num_taken += 1
            yield delta

    async def astream_chat(
        self, messages: Sequence[Message], *, chunks: Sequence[Chunk] = (), **options: Any
    ) -> AsyncIterator[CompletionDelta]:
        async for delta in super().astream_chat(messages, chunks=chunks, **options):
            self.num_taken += 1
            yield delta


@pytest.mark.parametrize("endpoint", [name for name in ENDPOINTS if "stream" in name])
async def test_streams_hand_on_each_piece_at_once(endpoint: str) -> None:
    """A piece is there as soon as the engine has it, and no other was taken for it."""
    engine = _PiecewiseEngine(ANSWER)
    llm = CacheCraftLLM(engine=engine)
    stream = getattr(llm, endpoint)("Who?" if "complete" in endpoint else QUESTION)
    if endpoint.startswith("a"):
        first = await anext(await stream)
    else:
        first = next(stream)
    assert (first.delta, engine.num_taken) == ("Goethe", 1)


async def test_giving_up_a_stream_gives_up_the_engines() -> None:
    """A reader that stops early closes the engine's stream, which ends the request."""
    engine = _GatedEngine()
    engine.gate.set()
    llm = CacheCraftLLM(engine=engine)
    stream = llm.stream_chat(QUESTION)
    next(stream)
    stream.close()
    assert engine.num_closed_streams == 1
    astream = await llm.astream_chat(QUESTION)
    await anext(astream)
    await astream.aclose()
    del astream
    # Closing an abandoned async generator is a task of the loop.
    for _ in range(10):
        await asyncio.sleep(0)
    assert engine.num_closed_streams == 2


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy, CacheCraftLLM.model_copy])
def test_copies_share_the_engine(llm: CacheCraftLLM, engine: FakeEngine, make_copy: Any) -> None:
    """A copied model answers on the same engine."""
    assert make_copy(llm).engine is engine


def test_pickling_keeps_the_settings(caplog: pytest.LogCaptureFixture) -> None:
    """A model made by name is made anew from its settings, without the engine and without warnings."""
    llm = CacheCraftLLM(
        "no-such-model",
        config=CacheCraftConfig(preset="fast"),
        max_tokens=7,
        engine_args={"max_model_len": 2000},
    )
    copied = pickle.loads(pickle.dumps(llm))
    assert copied.to_dict() == llm.to_dict()
    assert CacheCraftLLM.from_dict(llm.to_dict()).config.preset == "fast"
    assert not caplog.records


def test_a_given_engine_is_not_pickled(llm: CacheCraftLLM) -> None:
    """An engine of this process cannot travel, and the error says what to do."""
    with pytest.raises(ConfigurationError, match="make it with model="):
        pickle.dumps(llm)


def test_close_lets_go_of_the_engine(engine: FakeEngine) -> None:
    """After close the model refuses calls, while the caller's engine lives on."""
    with CacheCraftLLM(engine=engine) as llm:
        assert_whole_chat(llm.chat(QUESTION))
    with pytest.raises(EngineClosedError, match="make a new one"):
        llm.chat(QUESTION)
    assert not engine.is_closed


def test_a_calls_stop_takes_the_place_of_the_constructors(engine: FakeEngine) -> None:
    """As every option: the call's own, else the constructor's; an empty list is none."""
    llm = CacheCraftLLM(engine=engine, additional_kwargs={"stop": ["\n"]})
    for given in ({}, {"stop": ["."]}, {"stop": []}):
        llm.chat(QUESTION, **given)
    assert [call.options["stop"] for call in engine.calls] == [["\n"], ["."], []]


@pytest.mark.parametrize(
    "text",
    [
        "{braces} {{twice}} {0}",
        "a \"quoted\" 'word'",
        "line\r\nbreak",
        "Oslo 🇳🇴",
        "  leading\n",
        "<|im_end|>",
        "",
    ],
)
async def test_text_reaches_the_engine_as_it_is(llm: CacheCraftLLM, engine: FakeEngine, text: str) -> None:
    """No endpoint formats, strips or escapes what it is given."""
    for endpoint in ENDPOINTS:
        await answer_by(llm, endpoint, text)
    assert {call.messages[0]["content"] for call in engine.calls} == {text}


def test_two_models_share_one_engine(engine: FakeEngine) -> None:
    """Each keeps its settings and its last report; what one has computed, the other reuses."""
    brief, careful = CacheCraftLLM(engine=engine, max_tokens=1), CacheCraftLLM(engine=engine)
    prompt = [ChatMessage(f"{PASSAGE} Who?")]
    engine.prefetch([Chunk(PASSAGE)])
    assert brief.chat(prompt).message.content == "Goethe"
    assert careful.chat(prompt).message.content == ANSWER
    assert brief.last_report is not None and brief.last_report.reason is Reason.NOT_CACHED
    assert careful.last_report is not None and careful.last_report.reason is Reason.SAME_PREFIX


def test_threads_get_their_own_answers() -> None:
    """Calls from many threads at once: each answer and report belongs to its prompt."""
    llm = CacheCraftLLM(engine=FakeEngine(lambda prompt: prompt.upper()))

    def ask(number: int) -> tuple[str, str | None]:
        passage = f"passage {number}"
        response = llm.chat([ChatMessage(passage)], chunks=[Chunk(passage, doc_id=str(number))])
        return str(response.message.content), report_of(response).chunks[0].doc_id

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert answers == [(f"USER: PASSAGE {number}", str(number)) for number in range(8)]


def test_async_calls_run_in_a_loop_of_any_thread(llm: CacheCraftLLM) -> None:
    """Where no loop runs, `asyncio.run` makes one; two in turn and one in a thread work on one engine."""
    calls = [lambda: asyncio.run(answer_by(llm, "achat", "Who?"))] * 2
    for call in calls:
        assert_whole_chat(call())
    with ThreadPoolExecutor(1) as pool:
        assert_whole_chat(pool.submit(calls[0]).result())


async def test_sync_calls_work_in_a_running_loop(llm: CacheCraftLLM) -> None:
    """As in a notebook cell."""
    assert_whole_chat(llm.chat(QUESTION))
    assert_chat_stream(list(llm.stream_chat(QUESTION)), llm)


def faust_index(nodes: Sequence[BaseNode]) -> SummaryIndex:
    return SummaryIndex(list(nodes))


@pytest.mark.parametrize(
    "given", [list, faust_index, lambda nodes: [NodeWithScore(node=node, score=0.5) for node in nodes]]
)
def test_warm_computes_nodes_as_the_model_sees_them(
    engine: FakeEngine, nodes: list[TextNode], given: Any
) -> None:
    """Nodes, scored nodes or an index: texts with metadata and sources, behind the system prompt."""
    llm = CacheCraftLLM(engine=engine, tenant="acme")
    assert llm.warm(given(nodes), system="Be brief.", show_progress=True, neighbours=True) == 3
    call = engine.last_call
    assert (call.method, call.options["system"], call.options["tenant"]) == ("warm", "Be brief.", "acme")
    assert (call.options["show_progress"], call.options["neighbours"]) == (True, True)
    assert [chunk.doc_id for chunk in call.chunks] == ["doc-faust", "doc-faust", "oslo"]
    assert call.chunks[0].text == "title: Faust\n\n  Faust is a tragedy by Goethe."
    assert not any(chunk.is_shared for chunk in call.chunks)


def test_what_was_warmed_is_reused(llm: CacheCraftLLM) -> None:
    """A document and an answer's prompt that holds it meet in the store; public ones if so marked."""
    document = Document(text=PASSAGE, doc_id="faust")
    assert llm.warm([document]) == 1
    assert report_of(llm.chat([ChatMessage(f"{PASSAGE} Who?")])).num_reused_tokens > 0
    llm.warm([document], is_shared=True)
    assert isinstance(llm.engine, FakeEngine)
    assert llm.engine.last_call.chunks == (Chunk(PASSAGE, "faust", document.hash, True),)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (iter([]), "nodes is a list_iterator: pass a sequence of nodes, or an index"),
        ("Faust", r"nodes\[0\] is a str"),
        (SummaryIndex([]), "document store holds no nodes.*pass the nodes"),
    ],
)
def test_warm_refuses_what_is_no_node(llm: CacheCraftLLM, given: Any, message: str) -> None:
    """The error says what to pass, also for an index whose vector store keeps the texts."""
    with pytest.raises(InvalidRequestError, match=message):
        llm.warm(given)


@pytest.fixture
def clean_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """LlamaIndex's global state as a new process has it, put back afterwards."""
    for name in ("_llm", "_prompt_helper", "_chat_prompt_helper", "_callback_manager"):
        monkeypatch.setattr(Settings, name, None)
    monkeypatch.setattr(llama_index.core, "global_tokenizer", None)


def test_configured_settings_count_with_the_models_tokenizer(
    clean_settings: None, llm: CacheCraftLLM
) -> None:
    """What LlamaIndex packs is measured in the model's tokens, against the model's window."""
    assert Settings.tokenizer("one two three") != llm.engine.encode("one two three")
    Settings.prompt_helper = PromptHelper(context_window=99)
    assert llm.configure_settings() is llm
    assert Settings.llm is llm
    assert Settings.tokenizer("one two three") == llm.engine.encode("one two three")
    assert (Settings.context_window, Settings.num_output) == (4096, 256)
    assert (Settings.chat_context_window, Settings.chat_num_output) == (4096, 256)
    # 3000 words are as many tokens of the fake, but more than the window in LlamaIndex's own.
    passage = " ".join(["Donaudampfschiff"] * 3000)
    assert Settings.prompt_helper.repack(PromptTemplate("{context_str}"), [passage]) == [passage]


def test_an_index_without_a_model_uses_the_configured_one(
    clean_settings: None, llm: CacheCraftLLM, engine: FakeEngine, nodes: list[TextNode]
) -> None:
    """`as_query_engine()` needs no `llm=` then."""
    llm.configure_settings()
    assert str(faust_index(nodes).as_query_engine().query("Who wrote Faust?")) == ANSWER
    assert "Faust is a tragedy" in engine.last_call.prompt


def test_missing_extra_is_named() -> None:
    """Without llama-index-core, the import error holds the command that installs it."""
    program = "import sys; sys.modules['llama_index'] = None; import cachecraft_rag.llama_index"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "MissingDependencyError" in result.stderr
    assert "pip install 'cachecraft-rag[llama-index]'" in result.stderr


def test_import_is_light() -> None:
    """Importing the adapter loads neither vLLM nor torch nor the embedding libraries."""
    heavy = "('vllm', 'torch', 'transformers', 'sentence_transformers', 'faiss')"
    program = f"import sys, cachecraft_rag.llama_index; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
