from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from cachecraft_rag.chunks import SHARED_TENANT, Chunk
from cachecraft_rag.errors import ConfigurationError
from cachecraft_rag.segments.known import KnownChunks
from cachecraft_rag.segments.prompt import PromptText

PROMPT = "alpha beta gamma delta"


def known(*chunks: Chunk, max_chunks: int = 10, tenant: str = "t") -> KnownChunks:
    memory = KnownChunks(max_chunks)
    memory.add(tenant, chunks)
    return memory


def found(memory: KnownChunks, *extra: Chunk, tenant: str = "t") -> list[tuple[str, str | None]]:
    matches = memory.find(tenant, PromptText.plain(PROMPT), extra)
    return [(PROMPT[match.start : match.end], match.chunk.doc_id) for match in matches]


def test_finds_remembered_chunks() -> None:
    """What was added once is found in a later prompt without being given."""
    memory = known(Chunk("beta", doc_id="b"), Chunk(" alpha\n", doc_id="a"))
    assert found(memory) == [("alpha", "a"), ("beta", "b")]


def test_finds_chunks_inside_the_content_spans_only() -> None:
    """Neither outside of a span nor across its edge; positions are those of the whole prompt."""
    memory = known(Chunk("alpha"), Chunk("beta"), Chunk("gamma"), Chunk("ma delta"))
    matches = memory.find("t", PromptText(PROMPT, ((6, 14), (14, 22))), [Chunk("a g")])
    assert [(match.start, match.end, match.chunk.text) for match in matches] == [
        (6, 10, "beta"),
        (14, 22, "ma delta"),
    ]


def test_a_tenant_sees_only_its_own_chunks() -> None:
    """Another tenant's chunks are not found, nor forgotten on this tenant's word."""
    memory = known(Chunk("alpha", doc_id="a"), tenant="one")
    memory.forget("two", "a")
    memory.forget_tenant("two")
    assert found(memory, tenant="two") == []
    assert found(memory, tenant="one") == [("alpha", "a")]


def test_given_chunks_win_and_are_not_remembered() -> None:
    """A chunk of the call names the match, in this call alone."""
    memory = known(Chunk("alpha", doc_id="old", version="1"))
    given = Chunk("alpha", doc_id="new", version="2")
    assert memory.find("t", PromptText.plain(PROMPT), [given])[0].chunk is given
    assert found(memory, Chunk("delta", doc_id="d"), tenant="unknown") == [("delta", "d")]
    assert found(memory) == [("alpha", "old")]


def test_a_longer_remembered_chunk_wins_over_a_given_one() -> None:
    """Length decides first: the whole of a chunk, not the part that was given."""
    memory = known(Chunk("alpha beta", doc_id="long"))
    assert found(memory, Chunk("alpha", doc_id="short")) == [("alpha beta", "long")]


def test_a_new_version_replaces_the_old_one() -> None:
    """The same text of the same document is one chunk, with the version added last."""
    memory = known(Chunk("alpha", doc_id="a", version="1"), Chunk("alpha", doc_id="a", version="2"))
    assert [match.chunk.version for match in memory.find("t", PromptText.plain(PROMPT))] == ["2"]
    assert len(memory) == 1


def test_the_document_added_last_names_a_shared_text() -> None:
    """Of several documents with one text, the latest is shown, also when it is added again."""
    first, second = Chunk("alpha", doc_id="1"), Chunk("alpha", doc_id="2")
    memory = known(first, second)
    assert found(memory) == [("alpha", "2")]
    memory.add("t", [first])
    assert found(memory) == [("alpha", "1")]
    memory.add("t", [Chunk("alpha", doc_id="3")])
    memory.forget("t", "3")
    assert found(memory) == [("alpha", "1")]


def test_a_shared_text_stays_known_until_its_last_document_goes() -> None:
    """Forgetting one document leaves the text to the other one."""
    memory = known(Chunk("alpha", doc_id="1"), Chunk("alpha", doc_id="2"))
    memory.forget("t", "2")
    assert found(memory) == [("alpha", "1")]
    memory.forget("t", "1")
    assert (found(memory), len(memory)) == ([], 0)


def test_forget_takes_the_whole_document_only() -> None:
    """All chunks of the document go, those of others and of none stay."""
    memory = known(
        Chunk("alpha", doc_id="1"), Chunk("beta", doc_id="1"), Chunk("gamma", doc_id="2"), Chunk("delta")
    )
    memory.forget("t", "1")
    memory.forget("t", "never seen")
    assert found(memory) == [("gamma", "2"), ("delta", None)]


def test_forget_tenant_takes_everything_of_it() -> None:
    """After it the tenant knows nothing and can start again."""
    memory = known(Chunk("alpha"), Chunk("beta", doc_id="b"))
    memory.add("other", [Chunk("gamma")])
    memory.forget_tenant("t")
    assert (found(memory), len(memory)) == ([], 1)
    memory.add("t", [Chunk("delta")])
    assert found(memory) == [("delta", None)]


def test_forget_text_takes_one_text_out_of_all_its_documents() -> None:
    """Other texts of those documents stay, and so does the text with another tenant."""
    chunks = [Chunk("alpha", doc_id="1"), Chunk(" alpha ", doc_id="2"), Chunk("beta", doc_id="1")]
    memory = known(*chunks)
    memory.add("other", chunks)
    memory.forget_text("t", "alpha\n")
    memory.forget_text("t", "never seen")
    memory.forget_text("nobody", "alpha")
    assert found(memory) == [("beta", "1")]
    assert len(found(memory, tenant="other")) == 2


def test_shared_chunks_are_found_by_every_tenant() -> None:
    """What is known of the shared tenant stands in anybody's prompts."""
    memory = known(Chunk("beta", doc_id="public", is_shared=True), tenant=SHARED_TENANT)
    memory.add("t", [Chunk("alpha", doc_id="mine")])
    assert found(memory) == [("alpha", "mine"), ("beta", "public")]
    assert found(memory, tenant="stranger") == found(memory, tenant=SHARED_TENANT) == [("beta", "public")]


def test_own_chunk_is_not_taken_for_the_public_one_of_the_same_text() -> None:
    """Whether it was passed with the call or remembered from an earlier one."""
    memory = known(Chunk("alpha", doc_id="public", is_shared=True), tenant=SHARED_TENANT)
    assert found(memory, Chunk("alpha", doc_id="mine")) == [("alpha", "mine")]
    memory.add("t", [Chunk("alpha", doc_id="mine")])
    assert found(memory) == [("alpha", "mine")]


def test_forgetting_is_of_one_tenant_shared_or_not() -> None:
    """Neither does a tenant's word touch what is shared, nor the other way round."""
    memory = known(Chunk("alpha", doc_id="d"))
    memory.add(SHARED_TENANT, [Chunk("beta", doc_id="d", is_shared=True)])
    memory.forget_tenant("t")
    assert found(memory) == [("beta", "d")]
    memory.add("t", [Chunk("alpha", doc_id="d")])
    memory.forget(SHARED_TENANT, "d")
    assert found(memory) == [("alpha", "d")]


@pytest.mark.parametrize("is_shared", [True, False])
def test_use_of_a_shared_chunk_by_anybody_keeps_it_known(is_shared: bool) -> None:
    """But a tenant's own chunk of the same text and document keeps only itself."""
    memory = known(Chunk("alpha", doc_id="d", is_shared=True), max_chunks=2, tenant=SHARED_TENANT)
    memory.add("t", [Chunk("unused")])
    found(memory, Chunk("alpha", doc_id="d", is_shared=is_shared))
    memory.add("t", [Chunk("beta")])
    assert (("alpha", "d") in found(memory, tenant="stranger")) is is_shared


def test_the_least_recently_used_chunk_goes_first() -> None:
    """A match counts as use, so what prompts contain stays."""
    memory = known(Chunk("alpha"), Chunk("unused one"), Chunk("unused two"), max_chunks=3)
    assert found(memory) == [("alpha", None)]
    memory.add("t", [Chunk("beta"), Chunk("gamma")])
    assert found(memory) == [("alpha", None), ("beta", None), ("gamma", None)]


def test_a_match_by_a_given_chunk_counts_as_use() -> None:
    """Recency belongs to the chunk, not to the object that was passed."""
    memory = known(Chunk("alpha", doc_id="a"), Chunk("beta", doc_id="b"), max_chunks=2)
    found(memory, Chunk("alpha", doc_id="a"), Chunk("beta", doc_id="other"))
    memory.add("t", [Chunk("gamma")])
    assert found(memory) == [("alpha", "a"), ("gamma", None)]


def test_the_bound_holds_over_all_tenants() -> None:
    """Many tenants cannot make the memory grow."""
    memory = KnownChunks(3)
    for n in range(20):
        memory.add(f"tenant {n}", [Chunk("alpha"), Chunk("beta")])
    assert len(memory) == 3
    assert found(memory, tenant="tenant 19") == [("alpha", None), ("beta", None)]
    assert found(memory, tenant="tenant 0") == []


def test_blank_chunks_are_ignored() -> None:
    """White space is neither remembered nor found."""
    memory = known(Chunk(" \n"))
    assert (found(memory, Chunk(" ")), len(memory)) == ([], 0)


def test_refuses_a_bound_below_one() -> None:
    """A memory for no chunk is a setting error."""
    with pytest.raises(ConfigurationError, match="max_known_chunks is 0"):
        KnownChunks(0)


def test_threads_may_add_find_and_forget_at_once() -> None:
    """Concurrent use keeps the books in order."""
    memory = KnownChunks(8)

    def work(n: int) -> None:
        memory.add("t", [Chunk(f"alpha{n % 5}", doc_id=str(n % 3)), Chunk("beta", doc_id=str(n % 4))])
        memory.find("t", PromptText.plain(f"{PROMPT} alpha{n % 7}"))
        memory.forget("t", str(n % 2))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(400)))
    assert len(memory) <= 8
    for doc_id in "0123":
        memory.forget("t", doc_id)
    assert (found(memory), len(memory)) == ([], 0)
