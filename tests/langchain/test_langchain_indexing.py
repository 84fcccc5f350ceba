"""`index` and `aindex`: what leaves the vector store is no longer reused, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import pytest
from langchain_core.document_loaders import BaseLoader
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.indexing import InMemoryRecordManager
from langchain_core.language_models import FakeListChatModel
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from cachecraft_rag.chunks import SHARED_TENANT, Chunk
from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.engine import CacheCraftEngine
from cachecraft_rag.errors import ConfigurationError, EngineError
from cachecraft_rag.events import ChunkDecision
from cachecraft_rag.langchain import ChatCacheCraft, aindex, index
from cachecraft_rag.testing import FakeEngine

INCREMENTAL = {"cleanup": "incremental", "source_id_key": "source"}


def piece(text: str, source: str | None = "a.md", **metadata: Any) -> Document:
    return Document(text, metadata={**({"source": source} if source else {}), **metadata})


class Corpus:
    """A vector store with its record manager and an engine that has answered from its documents."""

    def __init__(self, *documents: Document, is_async: bool = False, **options: Any) -> None:
        self.engine = FakeEngine()
        self.store = InMemoryVectorStore(DeterministicFakeEmbedding(size=4))
        self.records = InMemoryRecordManager("test")
        self.records.create_schema()
        self._is_async = is_async
        self.index(documents, **(options or INCREMENTAL))
        self.engine.warm([chunk_of(document) for document in documents if document.page_content.strip()])

    def index(self, documents: Any, **options: Any) -> dict[str, int]:
        settings = {"engine": self.engine, "key_encoder": "blake2b", **options}
        if self._is_async:
            return dict(asyncio.run(aindex(documents, self.records, self.store, **settings)))
        return dict(index(documents, self.records, self.store, **settings))

    def stored(self) -> set[str]:
        """Texts in the vector store."""
        return {entry["text"] for entry in self.store.store.values()}

    def has_kv(self, *documents: Document) -> list[bool]:
        """Whether KV of each document's text would be used."""
        found = []
        for document in documents:
            chunk = chunk_of(document)
            out = self.engine.chat(
                [{"role": "user", "content": chunk.text}], chunks=[chunk], store=False, reuse="naive"
            )
            found.append(out.report.chunks[0].decision is not ChunkDecision.COMPUTED)
        return found


def chunk_of(document: Document) -> Chunk:
    return Chunk(document.page_content, document.metadata.get("source"))


ONE, TWO, OTHER = piece("One."), piece("Two."), piece("Other.", "b.md")


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def corpus(request: pytest.FixtureRequest) -> Corpus:
    """Two pieces of a.md and one of b.md, all with KV."""
    return Corpus(ONE, TWO, OTHER, is_async=request.param)


def test_a_changed_piece_is_dropped_and_the_others_keep_their_kv(corpus: Corpus) -> None:
    """Of the document that changed, and of those that were not indexed again."""
    new = piece("Two, changed.")
    counts = corpus.index([ONE, new], **INCREMENTAL)
    assert (counts["num_added"], counts["num_deleted"], counts["num_skipped"]) == (1, 1, 1)
    assert corpus.stored() == {"One.", "Two, changed.", "Other."}
    assert corpus.has_kv(ONE, TWO, OTHER, new) == [True, False, True, False]


def test_nothing_is_dropped_where_nothing_changed(corpus: Corpus) -> None:
    """The engine does not even hear of it."""
    num_calls = len(corpus.engine.calls)
    corpus.index([ONE, TWO, OTHER], cleanup="full", source_id_key="source")
    assert len(corpus.engine.calls) == num_calls
    assert corpus.has_kv(ONE, TWO, OTHER) == [True, True, True]


def test_a_document_that_is_gone_is_dropped_whole(corpus: Corpus) -> None:
    """Full clean-up drops what the run did not bring."""
    corpus.index([OTHER], cleanup="full", source_id_key="source")
    assert corpus.stored() == {"Other."}
    assert corpus.has_kv(ONE, TWO, OTHER) == [False, False, True]


def test_a_metadata_only_change_keeps_the_kv(corpus: Corpus) -> None:
    """LangChain deletes and adds such a piece; its text, which the KV is of, is the same."""
    counts = corpus.index([piece("One.", page=7), TWO], **INCREMENTAL)
    assert (counts["num_added"], counts["num_deleted"]) == (1, 1)
    assert corpus.has_kv(ONE, TWO) == [True, True]


def test_a_document_deleted_and_added_again_is_computed_anew(corpus: Corpus) -> None:
    """The KV of its first life is not taken for its second."""
    corpus.index([OTHER], cleanup="full", source_id_key="source")
    corpus.index([ONE, TWO, OTHER], cleanup="full", source_id_key="source")
    assert corpus.stored() == {"One.", "Two.", "Other."}
    assert corpus.has_kv(ONE, TWO, OTHER) == [False, False, True]


def test_pieces_in_several_batches_keep_their_kv(corpus: Corpus) -> None:
    """With small batches LangChain deletes pieces that come later in the run, and adds them again."""
    corpus.index([piece("Zero."), ONE, TWO], batch_size=1, **INCREMENTAL)
    assert corpus.stored() == {"Zero.", "One.", "Two.", "Other."}
    assert corpus.has_kv(ONE, TWO) == [True, True]


def test_without_cleanup_nothing_is_dropped(corpus: Corpus) -> None:
    """What stays in the store stays in the engine."""
    corpus.index([piece("Three.")])
    assert corpus.has_kv(ONE, TWO, OTHER) == [True, True, True]


def test_pieces_without_a_source_are_told_apart_by_text() -> None:
    """The same text elsewhere in the run keeps its KV; blank pieces are no chunks."""
    loose, kept, blank = piece("Loose.", None), piece("Kept.", None, n=1), piece(" ", None)
    corpus = Corpus(loose, kept, blank, cleanup="full")
    corpus.index([piece("Kept.", None, n=2)], cleanup="full")
    assert corpus.stored() == {"Kept."}
    assert corpus.has_kv(loose, kept) == [False, True]


def test_one_text_in_two_documents_survives_the_end_of_one() -> None:
    """The document that stays can still be answered from, computed anew or not, and the other is gone."""
    here, there = piece("Same.", "a.md"), piece("Same.", "b.md")
    corpus = Corpus(here, there)
    corpus.index([there], cleanup="full", source_id_key="source")
    assert len(corpus.stored()) == 1
    assert [call.options["doc_id"] for call in corpus.engine.calls if call.method == "invalidate"] == ["a.md"]


def test_a_key_of_ones_own_replaces_under_the_same_id(corpus: Corpus) -> None:
    """With `force_update`, text goes without being deleted."""

    def by_page(document: Document) -> str:
        return f"{document.metadata['source']}-{document.metadata['page']}"

    old, new = piece("Old.", "c.md", page=1), piece("New.", "c.md", page=1)
    keyed = {"key_encoder": by_page, "force_update": True}
    corpus.index([old], **keyed)
    corpus.engine.warm([chunk_of(old)])
    corpus.index([new], **keyed)
    assert corpus.stored() == {"One.", "Two.", "Other.", "New."}
    assert corpus.has_kv(old, ONE) == [False, True]


@pytest.mark.parametrize("kind", ["loader", "iterator", "async iterator"])
def test_sources_of_every_kind_are_watched(kind: str) -> None:
    """Loaders, lazy iterators, and asynchronous ones."""
    corpus = Corpus(ONE, TWO, is_async=kind == "async iterator")
    sources: dict[str, Callable[[], Any]] = {
        "loader": lambda: ListLoader([ONE]),
        "iterator": lambda: iter([ONE]),
        "async iterator": lambda: as_async([ONE]),
    }
    corpus.index(sources[kind](), **INCREMENTAL)
    assert corpus.has_kv(ONE, TWO) == [True, False]


class ListLoader(BaseLoader):
    """Loads what it was given."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self._documents = documents

    def lazy_load(self) -> Iterator[Document]:
        yield from self._documents


async def as_async(documents: Sequence[Document]) -> AsyncIterator[Document]:
    for document in documents:
        yield document


def test_a_run_that_fails_drops_what_it_removed(corpus: Corpus) -> None:
    """The loader's error is raised, and what left the store before it is not used any more."""

    def failing() -> Iterator[Document]:
        yield piece("New.")
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        corpus.index(failing(), batch_size=1, **INCREMENTAL)
    assert corpus.stored() == {"New.", "Other."}
    assert corpus.has_kv(ONE, TWO, OTHER) == [False, False, True]


def test_tenants_are_told_apart() -> None:
    """The model's tenant is told, or the one that is named."""
    for settings, expected in (({}, "a"), ({"tenant": SHARED_TENANT}, SHARED_TENANT)):
        corpus = Corpus(ONE, TWO)
        llm = ChatCacheCraft(engine=corpus.engine, tenant="a")
        corpus.index([ONE], engine=None, llm=llm, **INCREMENTAL, **settings)
        assert corpus.engine.last_call.options["tenant"] == expected
        assert corpus.has_kv(TWO) == [True]  # that of the default tenant


@pytest.mark.parametrize("cleanup", ["incremental", "full"])
def test_an_engine_that_has_not_started_stays_so(cleanup: str) -> None:
    """It has no KV to drop."""
    corpus = Corpus(ONE, TWO)
    engine = CacheCraftEngine("no-such-model")
    engine.prefetch([chunk_of(TWO)])
    corpus.index([ONE], engine=engine, cleanup=cleanup, source_id_key="source")
    assert not engine.is_started
    assert engine.stats()["engine"]["num_known_chunks"] == 0


class RestartedEngine(FakeEngine):
    """Not started, with KV of the last run on disk."""

    config = CacheCraftConfig(disk_store_bytes=1 << 30)

    @property
    def is_started(self) -> bool:
        return False


def test_an_engine_with_kv_on_disk_is_told() -> None:
    """KV outlived the last engine, so what changed must be dropped and what did not must be kept."""
    corpus, engine = Corpus(ONE, TWO), RestartedEngine()
    corpus.index([ONE], engine=engine, **INCREMENTAL)
    assert (engine.last_call.method, engine.last_call.chunks) == ("replace", (chunk_of(ONE),))


def test_a_closed_engine_is_named_in_the_error(corpus: Corpus) -> None:
    """The store is changed by then; the error says what is left to do."""
    corpus.engine.close()
    with pytest.raises(EngineError, match=r"a\.md"):
        corpus.index([ONE], **INCREMENTAL)
    assert corpus.stored() == {"One.", "Other."}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "either llm= or engine="),
        ({"engine": FakeEngine(), "llm": FakeListChatModel(responses=[])}, "either llm= or engine="),
        ({"llm": FakeListChatModel(responses=[])}, "FakeListChatModel"),
    ],
)
def test_needs_one_engine(settings: dict[str, Any], message: str) -> None:
    """Both, neither, or a model without KV is an error before any work."""
    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=4))
    with pytest.raises(ConfigurationError, match=message):
        index([ONE], InMemoryRecordManager("x"), store, **settings)
    assert store.store == {}


class AddOnlyStore(InMemoryVectorStore):
    """A store that cannot say what it holds."""

    get_by_ids = VectorStore.get_by_ids
    aget_by_ids = VectorStore.aget_by_ids


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("store", "message"),
    [(AddOnlyStore(DeterministicFakeEmbedding(size=4)), "no get_by_ids"), ({}, "a dict")],
)
def test_a_store_that_cannot_be_watched_is_refused(store: Any, message: str, is_async: bool) -> None:
    """The error names what is missing, before any work."""
    call: Any = (lambda *a, **k: asyncio.run(aindex(*a, **k))) if is_async else index
    with pytest.raises(ConfigurationError, match=message):
        call([ONE], InMemoryRecordManager("x"), store, engine=FakeEngine())
