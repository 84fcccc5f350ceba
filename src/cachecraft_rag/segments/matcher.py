"""Exact text matching: where do known chunks stand in a prompt?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cachecraft_rag.chunks import Chunk

_ANCHOR_CHARS = (64, 24, 6, 1)
"""A text is indexed by its first characters, as many as the largest of these that it has. Each size
in use costs one scan of the prompt, so a size per text length was rejected."""


@dataclass(frozen=True, slots=True)
class Match:
    """A chunk at the half-open character range `[start, end)` of a prompt."""

    start: int
    end: int
    chunk: Chunk

    def shift(self, offset: int) -> Match:
        return Match(self.start + offset, self.end + offset, self.chunk)


class ChunkMatcher:
    """Chunks indexed by their stripped text; blank texts are never matched.

    Not thread-safe: `KnownChunks` guards it.
    """

    def __init__(self, chunks: Iterable[Chunk] = ()) -> None:
        self._chunks: dict[str, Chunk] = {}
        self._indexes = {size: _AnchorIndex(size) for size in _ANCHOR_CHARS}
        for chunk in chunks:
            self.add(chunk)

    def __len__(self) -> int:
        return len(self._chunks)

    def add(self, chunk: Chunk) -> None:
        """Index `chunk`; it replaces a chunk with the same text."""
        text = chunk.text.strip()
        if text and text not in self._chunks:
            self._index_of(text).add(text)
        if text:
            self._chunks[text] = chunk

    def remove(self, text: str) -> None:
        """Forget the chunk with this text; unknown texts are ignored."""
        text = text.strip()
        if self._chunks.pop(text, None) is not None:
            self._index_of(text).remove(text)

    def find(self, text: str) -> list[Match]:
        """Matches in `text`, left to right and disjoint; at each position the longest wins."""
        return find_matches(text, (self,))

    def candidates(self, text: str) -> Iterator[int]:
        """Character positions of `text` where a chunk may start."""
        for index in self._indexes.values():
            yield from index.candidates(text)

    def longest_at(self, text: str, start: int) -> Match | None:
        """The longest chunk that stands in `text` at `start`."""
        for index in self._indexes.values():
            for end in index.ends_at(text, start):
                chunk = self._chunks.get(text[start:end])
                if chunk is not None:
                    return Match(start, end, chunk)
        return None

    def _index_of(self, text: str) -> _AnchorIndex:
        return self._indexes[next(size for size in _ANCHOR_CHARS if size <= len(text))]


def find_matches(text: str, matchers: Sequence[ChunkMatcher]) -> list[Match]:
    """Disjoint matches of several matchers in `text`, left to right.

    At each position the longest match wins; of equally long ones that of the first matcher.
    """
    starts = sorted({start for matcher in matchers for start in matcher.candidates(text)})
    matches: list[Match] = []
    free_from = 0
    for start in starts:
        if start < free_from:
            continue
        found = [match for matcher in matchers if (match := matcher.longest_at(text, start))]
        if found:
            best = max(found, key=lambda match: match.end)
            matches.append(best)
            free_from = best.end
    return matches


class _AnchorIndex:
    """Texts of at least `size` characters, by their first `size` characters.

    Behind one anchor texts are told apart by length, so thousands of chunks behind one header cost
    a look-up per distinct length, not a comparison per chunk.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._lengths: dict[str, Counter[int]] = {}

    def add(self, text: str) -> None:
        self._lengths.setdefault(text[: self._size], Counter())[len(text)] += 1

    def remove(self, text: str) -> None:
        anchor = text[: self._size]
        lengths = self._lengths[anchor]
        lengths[len(text)] -= 1
        if not lengths[len(text)]:
            del lengths[len(text)]
        if not lengths:
            del self._lengths[anchor]

    def candidates(self, text: str) -> list[int]:
        if not self._lengths:
            return []
        size, lengths = self._size, self._lengths
        return [at for at in range(len(text) - size + 1) if text[at : at + size] in lengths]

    def ends_at(self, text: str, start: int) -> list[int]:
        """Where a text of this index that starts at `start` could end, farthest first."""
        lengths = self._lengths.get(text[start : start + self._size], ())
        room = len(text) - start
        return sorted((start + length for length in lengths if length <= room), reverse=True)
