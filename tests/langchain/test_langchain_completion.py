"""`CacheCraftCompletion` against the fake engine."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import Generation, LLMResult
from langchain_core.prompts import PromptTemplate

from cachecraft_rag.chunks import Chunk
from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.engine import Completion
from cachecraft_rag.errors import ConfigurationError, EngineClosedError, InvalidRequestError
from cachecraft_rag.events import ChunkDecision, ReuseReport
from cachecraft_rag.langchain import CacheCraftCompletion, ChatCacheCraft
from cachecraft_rag.testing import FakeEngine

PASSAGE = "The bridge was rebuilt in 1987 by the council."


class Recorder(BaseCallbackHandler):
    """Keeps the tokens and the results that callbacks see."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.results: list[LLMResult] = []

    def on_llm_new_token(self, token: str, **_: Any) -> None:
        self.tokens.append(token)

    def on_llm_end(self, response: LLMResult, **_: Any) -> None:
        self.results.append(response)


class MeetingEngine(FakeEngine):
    """Answers only when two calls wait at one time."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: f"to {prompt}")
        self._together = threading.Barrier(2, timeout=30)
        self._num_waiting = 0
        self._all_here = asyncio.Event()

    def complete(self, prompt: str, **options: Any) -> Completion:
        self._together.wait()
        return super().complete(prompt, **options)

    async def acomplete(self, prompt: str, **options: Any) -> Completion:
        self._num_waiting += 1
        if self._num_waiting == 2:
            self._all_here.set()
        await asyncio.wait_for(self._all_here.wait(), 30)
        return await super().acomplete(prompt, **options)


class FailingEngine(FakeEngine):
    """Fails one prompt and would keep the others waiting for ever."""

    num_cancelled = 0

    async def acomplete(self, prompt: str, **options: Any) -> Completion:
        if prompt == "bad":
            raise InvalidRequestError("bad prompt")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        raise AssertionError("nothing wakes this call")


async def invoke(llm: CacheCraftCompletion, text: str) -> str:
    return llm.invoke(text)


async def ainvoke(llm: CacheCraftCompletion, text: str) -> str:
    return await llm.ainvoke(text)


async def stream(llm: CacheCraftCompletion, text: str) -> str:
    return "".join(llm.stream(text))


async def astream(llm: CacheCraftCompletion, text: str) -> str:
    return "".join([piece async for piece in llm.astream(text)])


WAYS = [
    (invoke, "complete"),
    (ainvoke, "acomplete"),
    (stream, "stream_complete"),
    (astream, "astream_complete"),
]


def sent_options(llm: Any, **call: Any) -> dict[str, Any]:
    """What the engine is asked for by one call."""
    bound = llm.bound if hasattr(llm, "bound") else llm
    llm.invoke("hi", **call)
    return dict(bound.engine.last_call.options)


def only_generation(recorder: Recorder) -> Generation:
    [result] = recorder.results
    [[generation]] = result.generations
    return generation


@pytest.mark.parametrize(("way", "method"), WAYS)
async def test_each_way_of_calling_uses_its_own_engine_method(way: Callable[..., Any], method: str) -> None:
    """The prompt goes to the engine as it is, without a chat template."""
    engine = FakeEngine("in the year 1987")
    assert await way(CacheCraftCompletion(engine=engine), "It was built") == "in the year 1987"
    assert engine.last_call.method == method
    assert engine.last_call.prompt == "It was built"
    assert engine.last_call.messages == ()


@pytest.mark.parametrize(("way", "_"), WAYS)
async def test_answer_carries_usage_and_report(way: Callable[..., Any], _: str) -> None:
    """`generation_info` holds token counts, the model's name, why it ended, and the report."""
    recorder = Recorder()
    engine = FakeEngine("one two three", model_name="tiny")
    engine.prefetch([Chunk(PASSAGE, doc_id="a")])
    CacheCraftCompletion(engine=engine).invoke(PASSAGE)
    llm = CacheCraftCompletion(engine=engine, max_tokens=2, callbacks=[recorder])
    assert await way(llm, f"Again: {PASSAGE}") == "one two"
    info = only_generation(recorder).generation_info
    report = ReuseReport.from_dict(info["cachecraft"])
    assert report == llm.last_report
    assert [chunk.decision for chunk in report.chunks] == [ChunkDecision.REUSED]
    assert (info["model_name"], info["finish_reason"]) == ("tiny", "length")
    assert info["usage_metadata"] == {
        "input_tokens": report.num_prompt_tokens,
        "output_tokens": 2,
        "total_tokens": report.num_prompt_tokens + 2,
        "input_token_details": {"cache_read": report.num_reused_tokens, "cache_creation": 0},
    }
    assert report.num_reused_tokens > 0


@pytest.mark.parametrize(("way", "_"), WAYS[2:])
async def test_callbacks_see_every_token_once(way: Callable[..., Any], _: str) -> None:
    """`on_llm_new_token` fires per piece in streams."""
    recorder = Recorder()
    await way(CacheCraftCompletion(engine=FakeEngine("one two"), callbacks=[recorder]), "count")
    assert [token for token in recorder.tokens if token] == ["one", " two"]


async def test_the_prompts_of_a_batch_run_at_once() -> None:
    """In order of the prompts, each with its own answer; the engine gets all of them to batch."""
    expected = ["to a", "to b"]
    assert CacheCraftCompletion(engine=MeetingEngine()).batch(["a", "b"]) == expected
    assert await CacheCraftCompletion(engine=MeetingEngine()).abatch(["a", "b"]) == expected


async def test_an_empty_batch_is_answered() -> None:
    """As by LangChain's other models."""
    llm = CacheCraftCompletion(engine=FakeEngine())
    assert llm.generate([]).generations == (await llm.agenerate([])).generations == []


def test_a_batch_counts_all_its_tokens() -> None:
    """`llm_output` sums up; each generation has its own counts."""
    result = CacheCraftCompletion(engine=FakeEngine("one two")).generate(["a b c", "d"])
    assert result.llm_output is not None
    assert result.llm_output["token_usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 4,
        "total_tokens": 8,
    }
    counts = [one.generation_info["usage_metadata"]["input_tokens"] for [one] in result.generations]
    assert counts == [3, 1]


async def test_a_failed_prompt_cancels_the_others() -> None:
    """The error comes at once, and nothing goes on in the background."""
    engine = FailingEngine()
    with pytest.raises(InvalidRequestError, match="bad prompt"):
        await CacheCraftCompletion(engine=engine).abatch(["good", "bad", "fine"])
    await asyncio.sleep(0)
    assert engine.num_cancelled == 2


def test_settings_and_stop_texts_work_as_in_the_chat_model() -> None:
    """Options of a call win; stop texts are merged; None leaves an option to the engine."""
    llm = CacheCraftCompletion(engine=FakeEngine(), max_tokens=7, reuse="exact", stop=["a"])
    expected = {"max_tokens": 3, "reuse": "exact", "top_p": 0.9, "stop": ["a", "c"]}
    assert sent_options(llm.bind(max_tokens=3), top_p=0.9, stop=["c"]) == expected


def test_it_fills_a_template_in_a_chain() -> None:
    """A prompt template's text reaches the engine."""
    engine = FakeEngine("Paris")
    chain = PromptTemplate.from_template("The capital of {country} is") | CacheCraftCompletion(engine=engine)
    assert chain.invoke({"country": "France"}) == "Paris"
    assert engine.last_call.prompt == "The capital of France is"


def test_unknown_names_are_refused() -> None:
    """In the constructor, where the class is named, and in a call."""
    with pytest.raises(ConfigurationError, match="CacheCraftCompletion has no setting 'streeming'"):
        CacheCraftCompletion(engine=FakeEngine(), streeming=True)
    with pytest.raises(InvalidRequestError, match="top_q"):
        CacheCraftCompletion(engine=FakeEngine()).invoke("hi", top_q=1)


def test_it_shares_its_engine_with_chat_models() -> None:
    """Equal settings make one engine; copies and loaded pickles use it too."""
    llm = CacheCraftCompletion(model="some-model", config=CacheCraftConfig(preset="fast"))
    chat = ChatCacheCraft(model="some-model", config=CacheCraftConfig(preset="fast"))
    assert llm.chat_engine is chat.chat_engine
    assert copy.deepcopy(llm).chat_engine is llm.chat_engine
    assert pickle.loads(pickle.dumps(llm)).chat_engine is llm.chat_engine
    assert not llm.chat_engine.is_started


def test_an_answer_cache_is_keyed_by_what_changes_answers() -> None:
    """A hit asks no engine; other settings do."""
    cache, engine = InMemoryCache(), FakeEngine(["first", "second"])
    llm = CacheCraftCompletion(engine=engine, cache=cache)
    assert [llm.invoke("hi") for _ in range(2)] == ["first", "first"]
    assert len(engine.calls) == 1
    assert CacheCraftCompletion(engine=engine, cache=cache, reuse="exact").invoke("hi") == "second"


def test_tracing_parameters() -> None:
    """Tracers see the provider, the model and the sampling settings."""
    llm = CacheCraftCompletion(engine=FakeEngine(model_name="tiny"), temperature=0.5, stop=["a"])
    assert llm._get_ls_params(stop=["b"]) == {
        "ls_provider": "cachecraft",
        "ls_model_type": "llm",
        "ls_model_name": "tiny",
        "ls_temperature": 0.5,
        "ls_stop": ["a", "b"],
    }


def test_close_ends_the_engine() -> None:
    """The context manager closes the engine, and later calls say so."""
    with CacheCraftCompletion(engine=FakeEngine()) as llm:
        llm.invoke("hi")
    with pytest.raises(EngineClosedError):
        llm.invoke("hi")
