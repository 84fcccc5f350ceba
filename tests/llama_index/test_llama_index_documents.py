"""Insert, update, refresh and delete: stored KV follows, and what did not change keeps its own."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from llama_index.core import Document, SummaryIndex, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.indices.base import BaseIndex
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.llms.mock import MockLLM
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore

from cachecraft_rag.chunks import SHARED_TENANT
from cachecraft_rag.errors import InvalidRequestError
from cachecraft_rag.llama_index import CacheCraftLLM, CacheCraftSynthesizer, follow
from cachecraft_rag.testing import FakeEngine

FAUST = "Faust is a tragedy by Goethe."
OSLO = "Oslo is the capital of Norway."
CHANGED = "Faust is a tragedy in two parts."

CHANGING = ("replace", "invalidate", "invalidate_chunk")


def document(doc_id: str, text: str, **metadata: str) -> Document:
    return Document(id_=doc_id, text=text, metadata=metadata)


def reused(llm: CacheCraftLLM, *texts: str) -> list[bool]:
    """Whether KV of each text is stored and used where it stands in a prompt."""
    found = []
    for text in texts:
        llm.complete(f"{text} Who?")
        assert llm.last_report is not None
        found.append(llm.last_report.num_reused_tokens > 0)
    return found


def named(llm: CacheCraftLLM, index: BaseIndex[Any]) -> None:
    """Ask once about all that the index has, so that its chunks are stored under their documents."""
    index.as_query_engine(llm=llm, similarity_top_k=9, response_mode="accumulate").query("Who?")


def changes(engine: FakeEngine) -> list[tuple[str, Any]]:
    return [
        (call.method, call.options.get("doc_id") or call.chunks[0].text)
        for call in engine.calls
        if call.method in CHANGING
    ]


@pytest.fixture(params=["vector", "summary"])
def index(request: pytest.FixtureRequest, llm: CacheCraftLLM, embed_model: BaseEmbedding) -> BaseIndex[Any]:
    documents = [document("faust", FAUST), document("oslo", OSLO)]
    if request.param == "vector":
        made: BaseIndex[Any] = VectorStoreIndex.from_documents(documents, embed_model=embed_model)
    else:
        made = SummaryIndex.from_documents(documents)
    follow(made, llm=llm)
    named(llm, made)
    assert reused(llm, FAUST, OSLO) == [True, True]
    return made


both_ways = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


async def call(target: Any, name: str, is_async: bool, *args: Any, **kwargs: Any) -> Any:
    if is_async:
        return await getattr(target, f"a{name}")(*args, **kwargs)
    return getattr(target, name)(*args, **kwargs)


@both_ways
async def test_update_drops_the_old_text_only(
    index: BaseIndex[Any], llm: CacheCraftLLM, engine: FakeEngine, is_async: bool
) -> None:
    """The changed document is computed anew; the other one is still reused."""
    await call(index, "update_ref_doc", is_async, document("faust", CHANGED))
    assert changes(engine) == [("replace", "faust")]
    assert reused(llm, FAUST, CHANGED, OSLO) == [False, False, True]


@both_ways
async def test_refresh_touches_what_changed_only(
    index: BaseIndex[Any], llm: CacheCraftLLM, engine: FakeEngine, is_async: bool
) -> None:
    """Of three documents one is as it was, one has changed and one is new."""
    documents = [document("faust", FAUST), document("oslo", "Oslo is old."), document("rome", "Rome.")]
    refreshed = await call(index, "refresh_ref_docs", is_async, documents)
    assert refreshed == [False, True, True]
    assert sorted(changes(engine)) == [("replace", "oslo"), ("replace", "rome")]
    assert reused(llm, FAUST) == [True]
    assert reused(llm, OSLO) == [False]


@both_ways
async def test_delete_drops_the_document(
    index: BaseIndex[Any], llm: CacheCraftLLM, engine: FakeEngine, is_async: bool
) -> None:
    """A deleted document's KV is gone; inserted again, it is computed once and then reused."""
    await call(index, "delete_ref_doc", is_async, "faust", delete_from_docstore=True)
    assert changes(engine) == [("invalidate", "faust")]
    assert reused(llm, FAUST) == [False]
    assert reused(llm, OSLO) == [True]
    await call(index, "insert", is_async, document("faust", FAUST))
    named(llm, index)
    assert reused(llm, FAUST) == [True]


@both_ways
async def test_deleted_nodes_are_dropped_alone(
    index: BaseIndex[Any], llm: CacheCraftLLM, engine: FakeEngine, is_async: bool
) -> None:
    """The node that goes loses its KV, the rest of the index keeps it."""
    [node] = [node for node in index.docstore.docs.values() if node.get_content() == FAUST]
    await call(index, "delete_nodes", is_async, [node.node_id])
    assert changes(engine) == [("invalidate_chunk", FAUST)]
    assert reused(llm, FAUST) == [False]
    assert reused(llm, OSLO) == [True]


@both_ways
async def test_nodes_without_a_document_are_their_own(
    index: BaseIndex[Any], engine: FakeEngine, is_async: bool
) -> None:
    """A node that comes from no document is invalidated under its own id."""
    await call(index, "insert_nodes", is_async, [TextNode(id_="lone", text="Alone.")])
    await call(index, "delete_nodes", is_async, ["lone"])
    assert changes(engine) == [("replace", "lone"), ("invalidate", "lone")]


def test_chunks_that_stay_keep_their_kv(llm: CacheCraftLLM, engine: FakeEngine, embed_model: Any) -> None:
    """Of an updated document the paragraphs that are still in it are reused."""
    splitter = SentenceSplitter(chunk_size=12, chunk_overlap=0)
    index = VectorStoreIndex.from_documents(
        [document("book", f"{FAUST} {OSLO}")], embed_model=embed_model, transformations=[splitter]
    )
    assert len(index.docstore.docs) == 2
    follow(index, llm=llm)
    named(llm, index)
    index.update_ref_doc(document("book", f"{CHANGED} {OSLO}"))
    assert reused(llm, OSLO) == [True]
    assert reused(llm, FAUST) == [False]


def test_version_is_that_of_what_is_retrieved(index: BaseIndex[Any], engine: FakeEngine) -> None:
    """A chunk that is retrieved later has the version that was registered, or it would count as old."""
    changed = document("faust", CHANGED)
    index.update_ref_doc(changed)
    [replaced] = [call for call in engine.calls if call.method == "replace"]
    assert replaced.options["version"] == changed.hash
    assert {chunk.version for chunk in replaced.chunks} == {changed.hash}


def test_change_of_hidden_metadata_keeps_the_text(index: BaseIndex[Any], llm: CacheCraftLLM) -> None:
    """A new value that the model does not see changes no text, so nothing is computed anew."""
    changed = document("faust", FAUST, date="today")
    changed.excluded_llm_metadata_keys = ["date"]
    index.update_ref_doc(changed)
    assert reused(llm, FAUST) == [True]


def test_change_of_shown_metadata_changes_the_text(index: BaseIndex[Any], llm: CacheCraftLLM) -> None:
    """A value that the model sees is part of the chunk, so the chunk is another one."""
    index.update_ref_doc(document("faust", FAUST, date="today"))
    assert reused(llm, f"date: today\n\n{FAUST}") == [False]


def test_text_of_two_documents_stays_with_the_other(
    index: BaseIndex[Any], llm: CacheCraftLLM, engine: FakeEngine
) -> None:
    """The document that is deleted is named; which texts it shared is the engine's business."""
    index.insert(document("copy", FAUST))
    index.delete_ref_doc("copy", delete_from_docstore=True)
    assert changes(engine) == [("replace", "copy"), ("invalidate", "copy")]


def test_failed_update_drops_what_was_deleted(
    index: BaseIndex[Any], llm: CacheCraftLLM, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update that dies between deletion and insertion leaves no KV of the deleted text."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(type(index).__mro__[2], "_insert", fail)
    with pytest.raises(OSError, match="disk full"):
        index.update_ref_doc(document("faust", CHANGED))
    assert changes(engine) == [("invalidate", "faust")]


def test_following_twice_is_following_once(
    index: BaseIndex[Any], llm: CacheCraftLLM, engine: FakeEngine
) -> None:
    """One model is told once, two models once each."""
    second = CacheCraftLLM(engine=FakeEngine(), tenant="second")
    follow(index, llm=llm)
    follow(index, llm=second)
    index.delete_ref_doc("oslo")
    assert changes(engine) == [("invalidate", "oslo")]
    assert changes(second.engine) == [("invalidate", "oslo")]  # type: ignore[arg-type]
    assert second.engine.last_call.options["tenant"] == "second"  # type: ignore[attr-defined]


def test_public_documents(llm: CacheCraftLLM, engine: FakeEngine) -> None:
    """Documents of everybody are followed under the shared tenant."""
    index = SummaryIndex.from_documents([document("faust", FAUST)])
    follow(index, llm=llm, tenant=SHARED_TENANT)
    index.delete_nodes([next(iter(index.docstore.docs))])
    assert engine.last_call.options["tenant"] == SHARED_TENANT
    assert engine.last_call.chunks[0].is_shared


def test_closed_engine_fails_no_ingestion(
    index: BaseIndex[Any], llm: CacheCraftLLM, caplog: pytest.LogCaptureFixture
) -> None:
    """The index is changed, and the log says what was not done."""
    llm.engine.close()
    with caplog.at_level(logging.WARNING, logger="cachecraft_rag"):
        index.update_ref_doc(document("faust", CHANGED))
    assert CHANGED in {node.get_content() for node in index.docstore.docs.values()}
    assert any("could not follow" in record.getMessage() for record in caplog.records)


class Unstarted(FakeEngine):
    """An engine that holds nothing yet, and that `replace` would start."""

    @property
    def is_started(self) -> bool:
        return False


def test_engine_is_not_started_by_ingestion() -> None:
    """Of an engine that holds nothing, only the name of the document is forgotten."""
    engine = Unstarted()
    index = SummaryIndex.from_documents([document("faust", FAUST)])
    follow(index, llm=CacheCraftLLM(engine=engine))
    index.update_ref_doc(document("faust", CHANGED))
    assert changes(engine) == [("invalidate", "faust")]


def test_index_stays_what_it_was(index: BaseIndex[Any]) -> None:
    """An index that is followed is still of its class, under its name."""
    assert isinstance(index, (VectorStoreIndex, SummaryIndex))
    assert type(index).__name__ in ("VectorStoreIndex", "SummaryIndex")


def test_plain_model_swapped_in() -> None:
    """With a model of another make an index is changed as ever."""
    index = SummaryIndex.from_documents([document("faust", FAUST)])
    follow(index, llm=MockLLM())
    index.update_ref_doc(document("faust", CHANGED))
    assert [node.get_content() for node in index.docstore.docs.values()] == [CHANGED]


def test_other_objects_are_refused(llm: CacheCraftLLM) -> None:
    """What is neither index nor pipeline is named in the error."""
    with pytest.raises(InvalidRequestError, match="SimpleDocumentStore"):
        follow(SimpleDocumentStore(), llm=llm)  # type: ignore[arg-type]


def pipeline(embed_model: BaseEmbedding, strategy: DocstoreStrategy) -> IngestionPipeline:
    return IngestionPipeline(
        transformations=[SentenceSplitter(chunk_size=64, chunk_overlap=0), embed_model],
        docstore=SimpleDocumentStore(),
        vector_store=SimpleVectorStore(),
        docstore_strategy=strategy,
    )


@both_ways
@pytest.mark.parametrize("strategy", list(DocstoreStrategy))
async def test_pipeline_touches_what_changed_only(
    llm: CacheCraftLLM, engine: FakeEngine, embed_model: BaseEmbedding, strategy: Any, is_async: bool
) -> None:
    """A second run with one changed document, one as it was, and one left out."""
    ingest = pipeline(embed_model, strategy)
    follow(ingest, llm=llm)
    first = [document("faust", FAUST), document("oslo", OSLO), document("rome", "Rome is old.")]
    nodes = await call(ingest, "run", is_async, documents=first)
    CacheCraftSynthesizer(llm).synthesize("Who?", [NodeWithScore(node=node) for node in nodes])
    engine.calls.clear()
    await call(ingest, "run", is_async, documents=[document("faust", CHANGED), document("oslo", OSLO)])
    expected = [("replace", "faust")]
    if strategy is DocstoreStrategy.UPSERTS_AND_DELETE:
        expected.append(("invalidate", "rome"))
    assert changes(engine) == expected
    assert reused(llm, FAUST) == [False]
    assert reused(llm, OSLO) == [True]


def test_pipeline_drops_a_document_that_became_empty(
    llm: CacheCraftLLM, engine: FakeEngine, embed_model: BaseEmbedding
) -> None:
    """A document whose new text gives no nodes has no KV left."""
    ingest = pipeline(embed_model, DocstoreStrategy.UPSERTS)
    follow(ingest, llm=llm)
    ingest.run(documents=[document("faust", FAUST)])
    engine.calls.clear()
    ingest.run(documents=[document("faust", "")])
    assert changes(engine) == [("invalidate", "faust")]


def test_pipeline_spares_documents_with_equal_text(
    llm: CacheCraftLLM, engine: FakeEngine, embed_model: BaseEmbedding
) -> None:
    """LlamaIndex lists one document for each text; the other one is not taken for deleted."""
    ingest = pipeline(embed_model, DocstoreStrategy.UPSERTS)
    follow(ingest, llm=llm)
    ingest.run(documents=[document("one", FAUST), document("two", OSLO)])
    engine.calls.clear()
    ingest.run(documents=[document("one", OSLO)])
    assert changes(engine) == [("replace", "one")]


def test_copy_of_a_pipeline_is_followed_for_itself(
    llm: CacheCraftLLM, engine: FakeEngine, embed_model: BaseEmbedding
) -> None:
    """A copy with a store of its own runs on that store."""
    ingest = pipeline(embed_model, DocstoreStrategy.UPSERTS)
    follow(ingest, llm=llm)
    copy = ingest.model_copy(update={"docstore": SimpleDocumentStore(), "vector_store": SimpleVectorStore()})
    copy.run(documents=[document("faust", FAUST)])
    assert ingest.docstore is not None
    assert ingest.docstore.get_document_hash("faust") is None
    assert changes(engine) == [("replace", "faust")]
