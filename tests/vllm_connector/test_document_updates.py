"""Real pages through all their versions: what of their KV is kept, and what a lagging retriever gets."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest

from cachecraft_rag.chunks import ChunkKey, DocumentRef, Span, chunk_key, prefix_hashes
from cachecraft_rag.events import ChunkDecision, Reason, RequestDecision, ReuseReport
from cachecraft_rag.vllm_connector.messages import ChunkRef

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
TENANT = "t"
CHARACTERS_PER_TOKEN = 2

Version = tuple[str, list[str]]
"""Name of a version and the texts of its sections."""


def load_rows(name: str) -> list[dict[str, Any]]:
    if not DATA.is_dir():
        pytest.skip(f"no {name}: the evaluation sets are not beside the project")
    spec = importlib.util.spec_from_file_location("shared_load", DATA / "load.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.load(name))


@pytest.fixture(scope="module")
def pages() -> dict[str, list[Version]]:
    """Versions of each FAQ page, oldest first."""
    rows = load_rows("docver_zh_tidb_faq")
    return {
        doc_id: [
            (str(row["version"]), [f"{s['heading']}\n{s['text']}" for s in row["sections"]]) for row in group
        ]
        for doc_id, group in groupby(rows, key=lambda row: row["doc_id"])
    }


@pytest.fixture(scope="module")
def changed_answers() -> dict[str, list[Version]]:
    """Each answer that changed as a document of one section, its texts in the order of their dates."""
    found: dict[str, dict[tuple[str, str], str]] = {}
    for row in load_rows("update_qa_zh_tidb_faq"):
        for side in (row["old"], row["new"]):
            found.setdefault(row["doc_id"], {})[side["date"], side["commit"]] = side["text"]
    return {
        doc_id: [(commit, [text]) for (_, commit), text in sorted(texts.items())]
        for doc_id, texts in found.items()
    }


def token_ids(text: str) -> list[int]:
    """Stands in for a tokenizer: equal text, equal ids."""
    return [
        hash(text[start : start + CHARACTERS_PER_TOKEN]) % 50_000
        for start in range(0, len(text), CHARACTERS_PER_TOKEN)
    ]


def key_of(text: str) -> ChunkKey:
    return chunk_key(TENANT, token_ids(text))


def refs(doc_id: str, version: Version) -> list[ChunkRef]:
    """The page's sections one after the other, as a retriever at this version brings them."""
    name, sections = version
    ids = [token_ids(text) for text in sections]
    ends = [sum(map(len, ids[: index + 1])) for index in range(len(ids))]
    spans = [Span(end - len(part), end) for end, part in zip(ends, ids, strict=True)]
    everything = [token for part in ids for token in part]
    hashes = prefix_hashes(TENANT, everything, [span.start for span in spans])
    return [
        ChunkRef(span, chunk_key(TENANT, part), prefix_hash, DocumentRef(doc_id, name))
        for span, part, prefix_hash in zip(spans, ids, hashes, strict=True)
    ]


def keys_of(version: Version) -> list[ChunkKey]:
    return [key_of(text) for text in version[1]]


def stored(scheduler: Any, keys: Sequence[ChunkKey]) -> set[ChunkKey]:
    return {key for key in keys if scheduler.store.holds(TENANT, key)}


def replaced(scheduler: Any, doc_id: str, version: Version) -> None:
    reply = scheduler.control("replace", doc_id=doc_id, version=version[0], keys=keys_of(version))
    assert "result" in reply


def assert_served_nothing_stale(scheduler: Any, doc_id: str, old: Version, new: Version) -> None:
    """A retriever that still brings the old version gets full compute with the reason, and stores nothing."""
    before = scheduler.store.stats().num_records
    report: ReuseReport = scheduler.answer(refs(doc_id, old))
    assert report.decision is RequestDecision.FULL
    assert {chunk.reason for chunk in report.chunks} == {Reason.SUPERSEDED_VERSION}
    assert {chunk.decision for chunk in report.chunks} == {ChunkDecision.COMPUTED}
    assert scheduler.store.stats().num_records == before
    gone = set(keys_of(old)) - set(keys_of(new))
    assert not stored(scheduler, list(gone))


def play(scheduler: Any, doc_id: str, versions: Sequence[Version]) -> Iterator[tuple[int, int]]:
    """All versions in order, under traffic; (sections that stay, those whose KV stays) of each change."""
    replaced(scheduler, doc_id, versions[0])
    scheduler.answer(refs(doc_id, versions[0]))
    for old, new in pairwise(versions):
        identical = [key for key in dict.fromkeys(keys_of(old)) if key in keys_of(new)]
        had = stored(scheduler, identical)
        replaced(scheduler, doc_id, new)
        assert_served_nothing_stale(scheduler, doc_id, old, new)
        yield len(had), len(stored(scheduler, list(had)))
        report: ReuseReport = scheduler.answer(refs(doc_id, new))
        assert all(chunk.reason is not Reason.SUPERSEDED_VERSION for chunk in report.chunks)
        assert scheduler.store.check() == []


def test_pages_through_all_their_versions(long_scheduler: Any, pages: dict[str, list[Version]]) -> None:
    """At least nine tenths of the KV of sections that did not change is kept."""
    changes = [kept for doc_id, versions in pages.items() for kept in play(long_scheduler, doc_id, versions)]
    assert len(changes) == sum(len(versions) - 1 for versions in pages.values()) > 30
    assert sum(identical for identical, _ in changes) > 400
    assert sum(kept for _, kept in changes) >= 0.9 * sum(identical for identical, _ in changes)


def test_answers_that_changed(long_scheduler: Any, changed_answers: dict[str, list[Version]]) -> None:
    """Small edits and real rewrites alike: nothing of an old text is served, and the newest is there."""
    num_changes = 0
    for doc_id, versions in changed_answers.items():
        num_changes += len(list(play(long_scheduler, doc_id, versions)))
        assert stored(long_scheduler, keys_of(versions[-1])) == set(keys_of(versions[-1]))
        # Some texts stand on several pages, and stay as long as one of them has them.
        long_scheduler.control("purge")
    assert num_changes >= 75
