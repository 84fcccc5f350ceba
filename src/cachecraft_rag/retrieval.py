"""Dense retrieval without a framework: texts in, FAISS search, ids out. Both adapters build on it."""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cachecraft_rag.embeddings import default_embedding_model
from cachecraft_rag.errors import InvalidRequestError, MissingDependencyError

if TYPE_CHECKING:
    import numpy.typing as npt

Encoder = Callable[[Sequence[str]], "npt.ArrayLike"]
"""n texts → float array (n, dim); need not be normalised. Called from any thread."""


class SentenceEncoder:
    """The default embedding model as an `Encoder`; it is loaded by the first call.

    Raises:
        MissingDependencyError: on the first call, as `default_embedding_model`.
    """

    def __init__(self) -> None:
        self._model: Any = None
        self._lock = threading.Lock()

    def __call__(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        # One at a time: the tokenizer inside raises "Already borrowed" when threads share it.
        with self._lock:
            if self._model is None:
                self._model = default_embedding_model()
            vectors = self._model.encode(list(texts), convert_to_numpy=True, show_progress_bar=False)
        return np.asarray(vectors, dtype=np.float32)


@functools.cache
def default_encoder() -> SentenceEncoder:
    """One for the whole process, so that the model is in memory once."""
    return SentenceEncoder()


class DenseIndex:
    """Texts searched by cosine similarity, exhaustively, in a FAISS `IndexFlatIP`.

    The index keeps vectors, not texts: ids count up from 0 in the order of adding and are never
    given twice, so the caller keeps its own items under them. All methods may be called from any
    thread.

    Args:
        encoder: embeds texts; None takes the embedded default model.
        query_encoder: embeds queries, for models that treat them differently; None is `encoder`.

    Raises:
        MissingDependencyError: faiss is not installed.

    Example:
        index = DenseIndex.from_texts(["Paris is in France.", "Oslo is in Norway."])
        [(best_id, cosine)] = index.search("Where is Oslo?", k=1)
    """

    def __init__(self, encoder: Encoder | None = None, *, query_encoder: Encoder | None = None) -> None:
        if importlib.util.find_spec("faiss") is None:
            raise MissingDependencyError(
                "dense retrieval needs faiss: run `pip install 'cachecraft-rag[embeddings]'`, "
                "or pass a retriever of your own"
            )
        self._encoder: Encoder = encoder or default_encoder()
        self._query_encoder: Encoder = query_encoder or self._encoder
        self._index: Any = None
        self._next_id = 0
        self._lock = threading.Lock()

    @classmethod
    def from_texts(
        cls, texts: Iterable[str], encoder: Encoder | None = None, *, query_encoder: Encoder | None = None
    ) -> DenseIndex:
        """An index whose id `i` is the i-th text. Raises as the constructor and `add`."""
        index = cls(encoder, query_encoder=query_encoder)
        index.add(list(texts))
        return index

    def __len__(self) -> int:
        with self._lock:
            return 0 if self._index is None else int(self._index.ntotal)

    def add(self, texts: Sequence[str]) -> list[int]:
        """Embed texts and make them searchable; returns their new ids, in order.

        Raises:
            InvalidRequestError: the encoder's result does not have one vector per text, or not the
                length of the vectors added before.
        """
        if not texts:
            return []
        return self.add_vectors(self.encode(texts))

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Embeddings as the index keeps them: float32 (len(texts), dim), of length 1."""
        return _unit_rows(self._encoder(texts), len(texts))

    def add_vectors(self, vectors: npt.NDArray[np.float32]) -> list[int]:
        """`add` for texts that are embedded already: float32 (n, dim), as `encode` makes them."""
        with self._lock:
            if self._index is None:
                self._index = _new_index(vectors.shape[1])
            _check_length(vectors, self._index.d)
            ids = np.arange(self._next_id, self._next_id + len(vectors), dtype=np.int64)
            self._index.add_with_ids(vectors, ids)
            self._next_id += len(vectors)
        return [int(item) for item in ids]

    def remove(self, ids: Iterable[int]) -> int:
        """Forget these ids; unknown ones are ignored. Returns how many were removed."""
        chosen = np.fromiter(ids, dtype=np.int64)
        with self._lock:
            if self._index is None or not chosen.size:
                return 0
            return int(self._index.remove_ids(chosen))

    def search(self, query: str, k: int) -> list[tuple[int, float]]:
        """The k nearest texts (fewer if there are not so many) as (id, cosine similarity), best
        first; equal ones in the order of adding.

        Raises:
            InvalidRequestError: k is not a positive number.
        """
        _check_k(k)
        if not len(self):
            return []
        return self.search_vector(_unit_rows(self._query_encoder([query]), 1)[0], k)

    def search_vector(self, vector: npt.ArrayLike, k: int) -> list[tuple[int, float]]:
        """`search` for a query that is embedded already: float (dim,), of any norm.

        Raises:
            InvalidRequestError: k is not a positive number, or the vector's length is another one
                than that of the texts' vectors.
        """
        (found,) = self.search_vectors(np.asarray(vector, dtype=np.float32)[None], k)
        return found

    def search_vectors(self, vectors: npt.ArrayLike, k: int) -> list[list[tuple[int, float]]]:
        """`search_vector` for several vectors at once: float (n, dim)."""
        _check_k(k)
        queries = _unit_rows(vectors, len(np.asarray(vectors)))
        with self._lock:
            if self._index is None or not self._index.ntotal:
                return [[] for _ in queries]
            _check_length(queries, self._index.d)
            scores, ids = self._index.search(queries, min(k, self._index.ntotal))
        return [
            sorted(zip(row_ids, row_scores, strict=True), key=lambda item: (-item[1], item[0]))
            for row_ids, row_scores in zip(ids.tolist(), scores.tolist(), strict=True)
        ]


def nearest_neighbours(texts: Sequence[str], k: int, encoder: Encoder | None = None) -> list[tuple[int, ...]]:
    """For each text the places of the k others nearest to it, best first; fewer if there are not so many.

    Args:
        encoder: embeds texts; None takes the embedded default model.

    Raises:
        MissingDependencyError: faiss, or the default model, is not installed.
        InvalidRequestError: k is not a positive number, or the encoder's result has a wrong shape.
    """
    _check_k(k)
    index = DenseIndex(encoder)
    vectors = index.encode(texts)
    index.add_vectors(vectors)
    return [
        tuple(other for other, _ in found if other != place)[:k]
        for place, found in enumerate(index.search_vectors(vectors, k + 1))
    ]


def _new_index(num_dimensions: int) -> Any:
    import faiss

    return faiss.IndexIDMap2(faiss.IndexFlatIP(num_dimensions))


def _unit_rows(vectors: npt.ArrayLike, num_rows: int) -> npt.NDArray[np.float32]:
    """Rows scaled to length 1, so that the inner product is the cosine; zero rows stay zero."""
    rows = np.asarray(vectors, dtype=np.float32)
    if rows.ndim != 2 or rows.shape[0] != num_rows or not rows.shape[1]:
        raise InvalidRequestError(
            f"the encoder returned an array of shape {rows.shape} for {num_rows} texts: "
            "it must be (number of texts, dimensions)"
        )
    if not np.isfinite(rows).all():
        raise InvalidRequestError("the encoder returned NaN or infinite numbers: check the embedding model")
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.ascontiguousarray(rows / np.where(norms > 0, norms, 1))


def _check_length(vectors: npt.NDArray[np.float32], num_dimensions: int) -> None:
    if vectors.shape[1] != num_dimensions:
        raise InvalidRequestError(
            f"the vector has {vectors.shape[1]} dimensions and the index {num_dimensions}: "
            "embed texts and queries with the same model"
        )


def _check_k(k: int) -> None:
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise InvalidRequestError(f"k is {k!r}: ask for at least 1 text")
