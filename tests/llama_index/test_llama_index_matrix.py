"""Every way of asking × every response mode × every place in LlamaIndex from which a model is asked.

Retrieval is LlamaIndex's own, so the chunks are found by watching alone, but for our synthesizer. Each cell
is asked twice: answers with reuse are those of full compute, and the report names the documents found.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from itertools import product
from typing import Any, Literal

import pytest
from llama_index.core import Document, VectorStoreIndex, get_response_synthesizer
from llama_index.core.agent.workflow import FunctionAgent, ReActAgent
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, LLMMetadata
from llama_index.core.bridge.pydantic import BaseModel, Field
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from llama_index.core.node_parser import SentenceSplitter, SentenceWindowNodeParser
from llama_index.core.postprocessor import LongContextReorder, MetadataReplacementPostProcessor
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import CitationQueryEngine, RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.tools import FunctionTool, RetrieverTool
from llama_index.core.workflow import Event, StartEvent, StopEvent, Workflow, step
from llama_index_instrumentation import root_dispatcher

from cachecraft_rag import CacheCraftConfig, CacheCraftEngine, default_model
from cachecraft_rag.engine import ChatEngine
from cachecraft_rag.events import Reason
from cachecraft_rag.llama_index import CacheCraftLLM, CacheCraftSynthesizer
from cachecraft_rag.testing import FakeEngine

QUESTION = "Who wrote the tragedy of Faust?"

WAYS = ("sync", "stream", "async", "astream")
MODES = (
    "compact",
    "refine",
    "tree_summarize",
    "accumulate",
    "compact_accumulate",
    "simple_summarize",
    "ours",
)
FRAMES = (
    "query",
    "context_chat",
    "condense_plus_context",
    "citation",
    "sentence_window",
    "reranked",
    "workflow",
    "function_agent",
    "react_agent",
)

DOCUMENTS = [
    # Of several lines, its title among them.
    Document(
        id_="faust",
        text="Faust is a tragedy in two parts by Johann Wolfgang von Goethe, nearly all of it in verse.\n"
        "It is considered by many to be the greatest work of German literature.",
        metadata={"title": "Faust"},
    ),
    Document(
        id_="oslo",
        text="Oslo is the capital and the most populous city of Norway and lies at the head of a fjord. "
        "The city was founded by a king and was burnt down in a great fire.",
    ),
    Document(
        id_="rome",
        text="Rome is the capital of Italy and has been settled for almost three thousand years. "
        "It is called the eternal city and encloses the smallest state of the world.",
    ),
]
ALL = {"faust", "oslo", "rome"}
RERANKED = {"oslo", "rome"}

# Cells that do not exist: (frame, mode, way) → reason; None stands for all of them.
ABSENT: dict[tuple[str | None, str | None, str | None], str] = {
    (None, "accumulate", "stream"): "LlamaIndex cannot stream several answers",
    (None, "accumulate", "astream"): "LlamaIndex cannot stream several answers",
    (None, "compact_accumulate", "stream"): "LlamaIndex cannot stream several answers",
    (None, "compact_accumulate", "astream"): "LlamaIndex cannot stream several answers",
    ("workflow", None, "sync"): "workflows are awaited",
    ("workflow", None, "stream"): "workflows are awaited",
    **{
        (frame, None, way): "agents are awaited"
        for frame in ("function_agent", "react_agent")
        for way in ("sync", "stream")
    },
    **{
        (frame, mode, None): "this frame makes its own compact synthesizer"
        for frame in ("context_chat", "condense_plus_context")
        for mode in MODES
        if mode != "compact"
    },
    **{
        (frame, mode, None): "no synthesizer takes part: the tool's text is the message"
        for frame in ("function_agent", "react_agent")
        for mode in MODES
        if mode != "compact"
    },
    **{
        (frame, mode, None): "as in the query engine, with other nodes"
        for frame in ("citation", "sentence_window", "reranked", "workflow")
        for mode in MODES
        if mode not in ("compact", "ours")
    },
}


def absence(frame: str, mode: str, way: str) -> str | None:
    """Why there is no such cell."""
    for (of_frame, of_mode, of_way), reason in ABSENT.items():
        if of_frame in (None, frame) and of_mode in (None, mode) and of_way in (None, way):
            return reason
    return None


CELLS = [cell for cell in product(FRAMES, MODES, WAYS) if absence(*cell) is None]


def expected_documents(frame: str, mode: str) -> set[str]:
    """The documents of which a chunk is found."""
    if mode == "simple_summarize":
        # 0.14.25 writes `['...']` into the prompt, the repr of a list, in which a line break becomes a
        # backslash and an n: texts of several lines are not found.
        return ALL - {"faust"}
    return RERANKED if frame == "reranked" else ALL


def test_number_of_cells() -> None:
    """The matrix is as large as it says: nothing is left out without a reason above."""
    assert len(CELLS) == 64


class Reports(BaseEventHandler):
    """What each answered request reported."""

    found: set[str] = Field(default_factory=set)
    num_requests: int = 0

    def handle(self, event: Any, **_: Any) -> None:
        if isinstance(event, LLMChatEndEvent) and event.response is not None:
            report = event.response.additional_kwargs["cachecraft"]
            self.num_requests += 1
            self.found |= {
                chunk["doc_id"] for chunk in report["chunks"] if chunk["reason"] != Reason.NOT_IN_PROMPT
            }


@pytest.fixture
def reports() -> Iterator[Reports]:
    handler = Reports()
    root_dispatcher.add_event_handler(handler)
    yield handler
    root_dispatcher.event_handlers = [each for each in root_dispatcher.event_handlers if each is not handler]


@pytest.fixture(scope="module", params=["fake", pytest.param("real", marks=pytest.mark.engine)])
def any_engine(request: pytest.FixtureRequest) -> Iterator[ChatEngine]:
    if request.param == "fake":
        yield FakeEngine(lambda prompt: f"answer to {len(prompt)} characters")
        return
    with CacheCraftEngine(
        default_model(), config=CacheCraftConfig(self_test=False), dtype="float32", max_model_len=2048
    ) as engine:
        # Not by the first cell: the workflows among them have a deadline.
        engine.start()
        yield engine


@pytest.mark.parametrize(("frame", "mode", "way"), CELLS)
async def test_cell(
    any_engine: ChatEngine, embed_model: BaseEmbedding, reports: Reports, frame: str, mode: str, way: str
) -> None:
    """Reuse with every token recomputed answers as full compute does, and finds the chunks."""
    answers = []
    for reuse in ("off", "recompute_all"):
        reports.found, reports.num_requests = set(), 0
        llm = ToolFirst(engine=any_engine, max_tokens=8, reuse=reuse, context_window=2048)
        answers.append(await RUN[frame](llm, embed_model, mode, way))
        assert reports.num_requests > 0
    assert answers[0]
    assert answers[1] == answers[0]
    assert reports.found == expected_documents(frame, mode)


class ToolFirst(CacheCraftLLM):
    """A model that calls a tool once: scripted for a ReAct agent, as it is too small to do so by itself."""

    @property
    def metadata(self) -> LLMMetadata:
        # A forced call is bound to its form and needs no parser, which a FunctionAgent cannot know.
        known: LLMMetadata = super().metadata
        return known.model_copy(update={"is_function_calling_model": True})

    async def achat(self, messages: Any, **kwargs: Any) -> ChatResponse:
        if (scripted := _scripted(messages)) is not None:
            return scripted
        return _as_step(await super().achat(messages, **kwargs), messages)

    async def astream_chat(self, messages: Any, **kwargs: Any) -> Any:
        async def pieces() -> Any:
            if (scripted := _scripted(messages)) is not None:
                yield scripted
                return
            async for piece in await CacheCraftLLM.astream_chat(self, messages, **kwargs):
                yield _as_step(piece, messages)

        return pieces()


def _is_react(messages: Any) -> bool:
    return "Action Input" in (messages[0].content or "")


def _scripted(messages: Any) -> ChatResponse | None:
    if not _is_react(messages) or any("Observation:" in (m.content or "") for m in messages[1:]):
        return None
    text = 'Thought: I look it up.\nAction: books\nAction Input: {"input": "Faust"}'
    return ChatResponse(message=ChatMessage(role="assistant", content=text), delta=text)


def _as_step(response: ChatResponse, messages: Any) -> ChatResponse:
    if _is_react(messages):
        response.message.content = f"Thought: I know.\nAnswer: {response.message.content}"
    return response


def retriever_of(embed_model: BaseEmbedding, parser: Any = None, top_k: int = 3) -> BaseRetriever:
    index = VectorStoreIndex.from_documents(
        DOCUMENTS, embed_model=embed_model, transformations=[parser or SentenceSplitter(chunk_size=256)]
    )
    return index.as_retriever(similarity_top_k=top_k)


def synthesizer_of(llm: CacheCraftLLM, mode: str, way: str) -> Any:
    streaming = way in ("stream", "astream")
    if mode == "ours":
        return CacheCraftSynthesizer(llm, streaming=streaming)
    return get_response_synthesizer(llm=llm, response_mode=mode, streaming=streaming)  # type: ignore[arg-type]


async def read(response: Any, way: str) -> str:
    if way == "stream":
        return "".join(response.response_gen)
    if way == "astream":
        return "".join([piece async for piece in response.async_response_gen()])
    return str(response)


async def ask(query_engine: Any, way: str) -> str:
    if way in ("sync", "stream"):
        return await read(query_engine.query(QUESTION), way)
    return await read(await query_engine.aquery(QUESTION), way)


async def query(
    llm: CacheCraftLLM,
    embed_model: BaseEmbedding,
    mode: str,
    way: str,
    *,
    retriever: BaseRetriever | None = None,
    postprocessors: list[BaseNodePostprocessor] | None = None,
) -> str:
    query_engine = RetrieverQueryEngine.from_args(
        retriever or retriever_of(embed_model),
        llm=llm,
        response_synthesizer=synthesizer_of(llm, mode, way),
        node_postprocessors=postprocessors,
    )
    return await ask(query_engine, way)


async def citation(llm: CacheCraftLLM, embed_model: BaseEmbedding, mode: str, way: str) -> str:
    query_engine = CitationQueryEngine(
        retriever_of(embed_model), llm=llm, response_synthesizer=synthesizer_of(llm, mode, way)
    )
    return await ask(query_engine, way)


async def sentence_window(llm: CacheCraftLLM, embed_model: BaseEmbedding, mode: str, way: str) -> str:
    # Each window is a whole document, and stands in the prompt once for each of its sentences.
    parser = SentenceWindowNodeParser.from_defaults(window_size=3)
    replacement = MetadataReplacementPostProcessor(target_metadata_key="window")
    found = retriever_of(embed_model, parser, top_k=6)
    return await query(llm, embed_model, mode, way, retriever=found, postprocessors=[replacement])


class DropFaust(BaseNodePostprocessor):
    """A reranker that leaves one document out and turns the others round."""

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        return [scored for scored in reversed(nodes) if scored.node.ref_doc_id != "faust"]


async def reranked(llm: CacheCraftLLM, embed_model: BaseEmbedding, mode: str, way: str) -> str:
    return await query(llm, embed_model, mode, way, postprocessors=[DropFaust(), LongContextReorder()])


async def chat(chat_engine: Any, way: str) -> str:
    history = [ChatMessage(role="user", content="Hello."), ChatMessage(role="assistant", content="Hello!")]
    ask_by = {
        "sync": chat_engine.chat,
        "stream": chat_engine.stream_chat,
        "async": chat_engine.achat,
        "astream": chat_engine.astream_chat,
    }[way]
    response = ask_by(QUESTION, chat_history=history)
    return await read(await response if way in ("async", "astream") else response, way)


async def context_chat(llm: CacheCraftLLM, embed_model: BaseEmbedding, mode: str, way: str) -> str:
    return await chat(ContextChatEngine.from_defaults(retriever=retriever_of(embed_model), llm=llm), way)


async def condense_plus_context(llm: CacheCraftLLM, embed_model: BaseEmbedding, mode: str, way: str) -> str:
    found = retriever_of(embed_model)
    return await chat(CondensePlusContextChatEngine.from_defaults(retriever=found, llm=llm), way)


class Retrieved(Event):
    nodes: list[NodeWithScore]


class RetrieveThenAnswer(Workflow):
    """Retrieval and synthesis in two steps, which share no context variable."""

    def __init__(self, retriever: BaseRetriever, synthesizer: Any) -> None:
        super().__init__(timeout=120)
        self._retriever, self._synthesizer = retriever, synthesizer

    @step
    async def retrieve(self, event: StartEvent) -> Retrieved:
        return Retrieved(nodes=await self._retriever.aretrieve(QUESTION))

    @step
    async def answer(self, event: Retrieved) -> StopEvent:
        return StopEvent(result=await self._synthesizer.asynthesize(QUESTION, event.nodes))


async def workflow(llm: CacheCraftLLM, embed_model: BaseEmbedding, mode: str, way: str) -> str:
    steps = RetrieveThenAnswer(retriever_of(embed_model), synthesizer_of(llm, mode, way))
    return await read(await steps.run(), way)


class Topic(BaseModel):
    # Of the passages without Faust, one must be nearer: the order of equals would change from call to call.
    topic: Literal["Faust in Oslo"]


async def function_agent(llm: CacheCraftLLM, embed_model: BaseEmbedding, mode: str, way: str) -> str:
    """The tool call is forced, and bound to its schema, which has one value only."""
    found = retriever_of(embed_model)

    async def books(topic: str) -> str:
        """Finds books about a topic."""
        return "\n\n".join([each.get_content() for each in await found.aretrieve(topic)])

    llm = llm.model_copy(update={"max_tokens": 48})
    tools = [FunctionTool.from_defaults(async_fn=books, fn_schema=Topic)]
    asking = FunctionAgent(
        tools=tools, llm=llm, initial_tool_choice="books", streaming=way == "astream", timeout=120
    )
    return str(await asking.run(QUESTION, max_iterations=3))


async def react_agent(llm: CacheCraftLLM, embed_model: BaseEmbedding, mode: str, way: str) -> str:
    tool = RetrieverTool.from_defaults(retriever_of(embed_model), name="books", description="Finds books.")
    return str(await ReActAgent(tools=[tool], llm=llm, streaming=way == "astream").run(QUESTION))


RUN: dict[str, Callable[[CacheCraftLLM, BaseEmbedding, str, str], Awaitable[str]]] = {
    "query": query,
    "context_chat": context_chat,
    "condense_plus_context": condense_plus_context,
    "citation": citation,
    "sentence_window": sentence_window,
    "reranked": reranked,
    "workflow": workflow,
    "function_agent": function_agent,
    "react_agent": react_agent,
}
