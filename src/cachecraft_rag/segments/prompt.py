"""A finished prompt text, and where in it chunks may stand."""

from __future__ import annotations

from dataclasses import dataclass

CharSpan = tuple[int, int]
"""A half-open range of character positions."""


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt, with the parts of it that came from the caller and not from a chat template.

    Attributes:
        content_spans: character ranges of those parts, disjoint and in order of position. Chunks are
            looked for inside them only: a document may spell the very marks that the template writes.
    """

    text: str
    content_spans: tuple[CharSpan, ...]

    @classmethod
    def plain(cls, text: str) -> PromptText:
        """A prompt that the caller wrote: chunks may stand anywhere in it."""
        return cls(text, ((0, len(text)),))
