"""Agents: documents that their tools found are chunks of the conversation."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.documents import Document
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.prompts import PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.tools import create_retriever_tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from cachecraft_rag.events import ReuseReport
from cachecraft_rag.langchain import CacheCraftMiddleware, ChatCacheCraft, resume_capture, stop_capture
from cachecraft_rag.testing import FakeAnswer, FakeEngine

DOCUMENTS = [
    Document("The bridge is from 1987.", metadata={"source": "bridge.md"}, id="1"),
    Document("It has {three} arches.", id="2"),
]
SEARCH = FakeAnswer("", (("search", {"query": "bridge"}),))


class ListRetriever(BaseRetriever):
    """Returns its documents."""

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return DOCUMENTS


@pytest.fixture(autouse=True)
def without_capture() -> Iterator[None]:
    """What is told is told by the middleware, but where a test resumes capture."""
    gc.collect()
    resume_capture()
    stop_capture()
    yield
    resume_capture()


def searching_engine() -> FakeEngine:
    """An engine whose model searches before it answers."""
    return FakeEngine(lambda prompt: "in 1987" if "from 1987" in prompt else SEARCH)


def make_agent(
    llm: Any, *middleware: Any, response_format: Any = "content_and_artifact", **settings: Any
) -> Any:
    tool = create_retriever_tool(
        ListRetriever(),
        "search",
        "Finds passages.",
        response_format=response_format,
        document_prompt=PromptTemplate.from_template("Passage: {page_content}"),
    )
    return create_agent(llm, [tool], middleware=middleware, **settings)


def ask(text: str = "From when is the bridge?") -> dict[str, Any]:
    return {"messages": [HumanMessage(text)]}


def chunk_ids(message: AIMessage) -> list[str | None]:
    report = ReuseReport.from_dict(message.response_metadata["cachecraft"])
    return [chunk.doc_id for chunk in report.chunks]


async def test_a_tools_documents_are_chunks_of_the_next_prompt() -> None:
    """The agent searches, and the engine finds what was found, sync and async."""
    agent = make_agent(ChatCacheCraft(engine=searching_engine()), CacheCraftMiddleware())
    for result in (agent.invoke(ask()), await agent.ainvoke(ask())):
        *_, answer = result["messages"]
        assert (answer.content, chunk_ids(answer)) == ("in 1987", ["bridge.md", "2"])


def test_messages_of_the_conversation_stay_as_they_are() -> None:
    """The tool's message is kept as the tool wrote it."""
    agent = make_agent(ChatCacheCraft(engine=searching_engine()), CacheCraftMiddleware())
    [tool_message] = [m for m in agent.invoke(ask())["messages"] if isinstance(m, ToolMessage)]
    assert tool_message.artifact == DOCUMENTS
    assert tool_message.content == "\n\n".join(f"Passage: {each.page_content}" for each in DOCUMENTS)


def test_documents_are_told_for_the_models_tenant() -> None:
    """Of two tenants on one engine only that of the agent's model hears of them."""
    engine = searching_engine()
    llm, other = (ChatCacheCraft(engine=engine, tenant=tenant) for tenant in "ab")
    make_agent(llm, CacheCraftMiddleware()).invoke(ask())
    told = [call for call in engine.calls if call.method == "prefetch"]
    assert {call.options["tenant"] for call in told} == {"a"}
    assert other.last_report is None


@pytest.mark.parametrize("is_plain_data", [False, True])
def test_a_conversation_is_known_again_after_a_restart(is_plain_data: bool) -> None:
    """A checkpointer brings artifacts back, as documents or as plain mappings, to an engine that never
    saw them."""
    saver = InMemorySaver(serde=JsonPlusSerializer(pickle_fallback=False))
    thread = {"configurable": {"thread_id": "1"}}
    before = make_agent(ChatCacheCraft(engine=searching_engine()), CacheCraftMiddleware(), checkpointer=saver)
    messages = before.invoke(ask(), thread)["messages"]
    if is_plain_data:
        messages = [plain_artifact(message) for message in messages]
        after = make_agent(ChatCacheCraft(engine=FakeEngine("yes")), CacheCraftMiddleware())
        result = after.invoke({"messages": [*messages, HumanMessage("Sure?")]})
    else:
        llm = ChatCacheCraft(engine=FakeEngine("yes"))
        after = make_agent(llm, CacheCraftMiddleware(), checkpointer=saver)
        result = after.invoke(ask("Sure?"), thread)
    *_, answer = result["messages"]
    assert (answer.content, chunk_ids(answer)) == ("yes", ["bridge.md", "2"])


def plain_artifact(message: Any) -> Any:
    if isinstance(message, ToolMessage):
        plain = [document.model_dump() for document in message.artifact]
        return message.model_copy(update={"artifact": plain})
    return message


def test_other_artifacts_are_no_documents() -> None:
    """Tools put what they like beside their text."""
    llm = ChatCacheCraft(engine=FakeEngine("ok"))
    agent = make_agent(llm, CacheCraftMiddleware())
    call = {"name": "search", "args": {"query": "q"}, "id": "7"}
    for artifact in (None, "text", {"page_content": "x"}, [{"page_content": 3}, "x", 5], [Document(" ")]):
        result = ToolMessage("found", tool_call_id="7", artifact=artifact)
        agent.invoke({"messages": [HumanMessage("q"), AIMessage("", tool_calls=[call]), result]})
    assert {call.method for call in llm.engine.calls} == {"chat"}


def test_another_model_is_left_alone() -> None:
    """The middleware stays in the list when the model is swapped."""
    bystander = ChatCacheCraft(engine=FakeEngine())
    call = {"name": "search", "args": {"query": "q"}, "id": "7"}
    replies = iter([AIMessage("", tool_calls=[call]), AIMessage("plain")])
    agent = make_agent(ToolModel(messages=replies), CacheCraftMiddleware())
    assert agent.invoke(ask())["messages"][-1].content == "plain"
    assert bystander.engine.calls == []


class ToolModel(GenericFakeChatModel):
    """A fake model that may be given tools."""

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self


@pytest.mark.parametrize("response_format", ["content", "content_and_artifact"])
def test_capture_does_without_the_middleware(response_format: str) -> None:
    """With one engine and tenant an agent needs nothing, whatever form its tool answers in."""
    resume_capture()
    agent = make_agent(ChatCacheCraft(engine=searching_engine()), response_format=response_format)
    assert chunk_ids(agent.invoke(ask())["messages"][-1]) == ["bridge.md", "2"]


def test_missing_langchain_names_the_package() -> None:
    """The adapter itself works without LangChain's agents; the error says how to install them."""
    script = (
        "import sys; sys.modules['langchain'] = None\n"
        "import cachecraft_rag.langchain as adapter\n"
        "from cachecraft_rag.langchain import *\n"
        "try: adapter.CacheCraftMiddleware\n"
        "except adapter.MissingDependencyError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "pip install 'cachecraft-rag[langchain]' langchain`" in done.stdout, done.stderr


def test_unknown_names_are_attribute_errors() -> None:
    """Names that load late do not hide that others do not exist."""
    import cachecraft_rag.langchain as adapter

    with pytest.raises(AttributeError, match="no_such_name"):
        _ = adapter.no_such_name
