"""`CacheCraftRetriever` and `DenseRetriever` with a letter-counting encoder and the fake engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from pydantic import ValidationError

from cachecraft_rag.chunks import Chunk
from cachecraft_rag.errors import ConfigurationError, InvalidRequestError
from cachecraft_rag.langchain import CacheCraftRetriever, ChatCacheCraft, DenseRetriever
from cachecraft_rag.testing import FakeEngine

TEXTS = ["aaaa", "bbbb", "cccc", "aabb"]


def count_letters(texts: Sequence[str]) -> np.ndarray:
    """An encoder without a model: the counts of a, b and c."""
    return np.array([[text.count(letter) for letter in "abc"] for text in texts], dtype=np.float32)


class ListRetriever(BaseRetriever):
    """Returns its documents; records the ways and the arguments it was called with."""

    documents: list[Document]
    calls: list[Any] = []  # noqa: RUF012 -- a pydantic field: each instance has its own

    def _get_relevant_documents(self, query: str, *, run_manager: Any, **kwargs: Any) -> list[Document]:
        self.calls.append(("sync", query, kwargs))
        return self.documents

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: Any, **kwargs: Any
    ) -> list[Document]:
        self.calls.append(("async", query, kwargs))
        return self.documents


class RunRecorder(BaseCallbackHandler):
    def __init__(self) -> None:
        self.parents: dict[UUID, UUID | None] = {}

    def on_retriever_start(
        self, serialized: Any, query: str, *, run_id: UUID, parent_run_id: UUID | None = None, **_: Any
    ) -> None:
        self.parents[run_id] = parent_run_id


def remembered(documents: Sequence[Document], **settings: Any) -> list[Chunk]:
    """The chunks that the engine is told of when these documents are returned."""
    engine, base = FakeEngine(), ListRetriever(documents=list(documents))
    CacheCraftRetriever(base_retriever=base, engine=engine, **settings).invoke("q")
    return list(engine.last_call.chunks)


def test_documents_of_a_public_corpus_are_marked_so() -> None:
    """The engine then looks for the KV that all tenants share."""
    assert remembered([Document("text")], is_shared=True) == [Chunk("text", is_shared=True)]


def test_documents_come_back_as_they_are() -> None:
    """The very documents of the base retriever are returned, in its order, unchanged."""
    documents = [Document(" two ", metadata={"source": "b", "n": 2}, id="2"), Document("one")]
    before = [document.model_copy(deep=True) for document in documents]
    retriever = CacheCraftRetriever(base_retriever=ListRetriever(documents=documents), engine=FakeEngine())
    found = retriever.invoke("q")
    assert found == before
    assert all(a is b for a, b in zip(found, documents, strict=True))


@pytest.mark.parametrize(
    ("document", "chunk"),
    [
        (Document(" text\n"), Chunk("text")),
        (Document("text", id="7"), Chunk("text", doc_id="7")),
        (Document("text", id="7", metadata={"source": "a.md"}), Chunk("text", doc_id="a.md")),
        (Document("text", metadata={"source": "a.md", "version": 3}), Chunk("text", "a.md", "3")),
        (Document("text", metadata={"version": 3}), Chunk("text")),
    ],
)
def test_engine_is_told_text_and_identity(document: Document, chunk: Chunk) -> None:
    """Text is stripped; identity is the source, else the id; a version needs a document."""
    assert remembered([document]) == [chunk]


def test_documents_without_text_are_not_remembered() -> None:
    """Empty documents are returned but are no chunks."""
    assert remembered([Document(""), Document(" \n"), Document("x")]) == [Chunk("x")]


async def test_async_uses_the_base_retrievers_own_async() -> None:
    """`ainvoke` awaits the base retriever, and the engine is told as well."""
    base, engine = ListRetriever(documents=[Document("x")]), FakeEngine()
    await CacheCraftRetriever(base_retriever=base, engine=engine).ainvoke("q", None, k=2)
    assert base.calls == [("async", "q", {"k": 2})]
    assert engine.last_call.chunks == (Chunk("x"),)


@pytest.mark.parametrize(
    ("own", "call", "expected"),
    [(None, {}, {}), (3, {}, {"k": 3}), (3, {"k": 1}, {"k": 1}), (None, {"filter": "f"}, {"filter": "f"})],
)
def test_arguments_reach_the_base_retriever(own: Any, call: dict[str, Any], expected: dict[str, Any]) -> None:
    """A call's arguments are passed on; `k` of the constructor is their default."""
    base = ListRetriever(documents=[])
    CacheCraftRetriever(base_retriever=base, engine=FakeEngine(), k=own).invoke("q", None, **call)
    assert base.calls == [("sync", "q", expected)]


def test_any_runnable_to_documents_is_a_base_retriever() -> None:
    """What LangChain calls retriever-like works too."""
    base = RunnableLambda(lambda query: [Document(f"about {query}")])
    retriever = CacheCraftRetriever(base_retriever=base, engine=FakeEngine())
    assert retriever.invoke("rivers") == [Document("about rivers")]


def test_the_base_retriever_runs_as_a_child() -> None:
    """Tracers see the base retriever's run inside ours."""
    recorder = RunRecorder()
    base = ListRetriever(documents=[])
    CacheCraftRetriever(base_retriever=base, engine=FakeEngine()).invoke("q", {"callbacks": [recorder]})
    outer, inner = recorder.parents
    assert recorder.parents == {outer: None, inner: outer}


@pytest.mark.parametrize(("own", "expected"), [(None, "of-llm"), ("own", "own")])
def test_tenant_is_the_chat_models_unless_named(own: str | None, expected: str) -> None:
    """What a tenant retrieves is remembered for that tenant only."""
    llm = ChatCacheCraft(engine=FakeEngine(), tenant="of-llm")
    base = ListRetriever(documents=[Document("x")])
    CacheCraftRetriever(base_retriever=base, llm=llm, tenant=own).invoke("q")
    assert llm.engine.last_call.options == {"tenant": expected}


@pytest.mark.parametrize("is_both", [True, False])
def test_needs_one_engine(is_both: bool) -> None:
    """Both or neither of `llm` and `engine` is an error."""
    engine = FakeEngine()
    given = {"llm": ChatCacheCraft(engine=engine), "engine": engine} if is_both else {}
    with pytest.raises(ConfigurationError, match="either llm= or engine="):
        CacheCraftRetriever(base_retriever=ListRetriever(documents=[]), **given)


@pytest.mark.parametrize("wrong", [{"base_retriever": "x"}, {"top_k": 3}, {"k": 0}])
def test_wrong_arguments_are_refused(wrong: dict[str, Any]) -> None:
    """Misspelt names and values of another type do not pass in silence."""
    settings = {"base_retriever": ListRetriever(documents=[]), "engine": FakeEngine(), **wrong}
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        CacheCraftRetriever(**settings)


def test_from_texts_finds_the_nearest() -> None:
    """The built-in index returns the nearest documents, best first, and the engine is told."""
    engine = FakeEngine()
    metadatas = [{"source": str(i)} for i in range(len(TEXTS))]
    retriever = CacheCraftRetriever.from_texts(TEXTS, metadatas, engine=engine, k=2, encoder=count_letters)
    assert [document.page_content for document in retriever.invoke("aaa")] == ["aaaa", "aabb"]
    assert engine.last_call.chunks == (Chunk("aaaa", "0"), Chunk("aabb", "3"))


def test_from_texts_refuses_another_number_of_metadatas() -> None:
    """Metadata is never paired with the wrong text."""
    with pytest.raises(InvalidRequestError, match="1 entries for 4 texts"):
        CacheCraftRetriever.from_texts(TEXTS, [{}], engine=FakeEngine(), encoder=count_letters)


async def test_dense_retriever_is_the_same_in_async() -> None:
    """`ainvoke` gives what `invoke` gives, also with another `k`."""
    documents = [Document(text) for text in TEXTS]
    retriever = DenseRetriever.from_documents(documents, encoder=count_letters)
    assert await retriever.ainvoke("cc", None, k=1) == retriever.invoke("cc", None, k=1) == [documents[2]]
    assert len(retriever.invoke("cc", None, k=99)) == len(documents)


def test_dense_retriever_without_documents_finds_nothing() -> None:
    """An empty collection is allowed."""
    assert DenseRetriever.from_documents([], encoder=count_letters).invoke("a") == []
