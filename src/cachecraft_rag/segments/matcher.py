"""Exact text matching: where do known chunks stand in a prompt?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cachecraft_rag.chunks import Chunk
from cachecraft_rag.segments.anchors import ANCHOR_CHARS, AnchorIndex, Windows


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
        self._indexes: dict[int, AnchorIndex] = {}
        self.add(*chunks)

    def __len__(self) -> int:
        return len(self._chunks)

    def add(self, *chunks: Chunk) -> None:
        """Index `chunks`; each replaces a chunk with the same text."""
        by_text = {text: chunk for chunk in chunks if (text := chunk.text.strip())}
        new: dict[int, list[str]] = {}
        for text in by_text:
            if text not in self._chunks:
                new.setdefault(_anchor_size(text), []).append(text)
        for size, texts in new.items():
            if size not in self._indexes:
                self._indexes[size] = AnchorIndex(size)
            self._indexes[size].add(texts)
        self._chunks.update(by_text)

    def remove(self, text: str) -> None:
        """Forget the chunk with this text; unknown texts are ignored."""
        text = text.strip()
        if self._chunks.pop(text, None) is not None:
            self._indexes[_anchor_size(text)].remove(text)

    def find(self, text: str) -> list[Match]:
        """Matches in `text`, left to right and disjoint; at each position the longest wins."""
        return find_matches(text, (self,))

    def candidates(self, windows: Windows) -> Iterator[int]:
        """Character positions of a text where a chunk may start."""
        for index in self._indexes.values():
            yield from index.candidates(windows)

    def longest_at(self, windows: Windows, start: int) -> Match | None:
        """The longest chunk that stands in a text at `start`."""
        for size in ANCHOR_CHARS:
            index = self._indexes.get(size)
            for end in index.ends_at(windows, start) if index is not None else ():
                chunk = self._chunks.get(windows.text[start:end])
                if chunk is not None:
                    return Match(start, end, chunk)
        return None


def _anchor_size(text: str) -> int:
    return next(size for size in ANCHOR_CHARS if size <= len(text))


def find_matches(text: str, matchers: Sequence[ChunkMatcher]) -> list[Match]:
    """Disjoint matches of several matchers in `text`, left to right.

    At each position the longest match wins; of equally long ones that of the first matcher.
    """
    windows = Windows(text)
    starts = sorted({start for matcher in matchers for start in matcher.candidates(windows)})
    matches: list[Match] = []
    free_from = 0
    for start in starts:
        if start < free_from:
            continue
        found = [match for matcher in matchers if (match := matcher.longest_at(windows, start))]
        if found:
            best = max(found, key=lambda match: match.end)
            matches.append(best)
            free_from = best.end
    return matches
