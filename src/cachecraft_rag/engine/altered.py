"""Did a template alter the chunks that were passed with a call?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set

from cachecraft_rag.chunks import Chunk, PromptLayout, SegmentKind

_PIECE_CHARS = 16
_MIN_SHARE_FOUND = 0.5
_NO_LETTER_NOR_DIGIT = re.compile(r"[\W_]+")


def altered_share(passed: Sequence[Chunk], layout: PromptLayout) -> float:
    """Share of the altered among the `passed` chunks that reached the prompt, in [0, 1]; 0 if none did.

    A chunk is altered if its text is no chunk of the prompt, yet half of it or more stands in the rest
    of the prompt once letter case, white space and punctuation are left out: templates wrap, escape,
    quote, number and cut. A chunk of which nothing is there was not used; to count it was rejected, as
    callers pass all they retrieved and put some of it into each prompt.
    """
    found = {segment.text for segment in layout.chunks}
    texts = {chunk.text.strip() for chunk in passed} - {""}
    absent = texts - found
    if not absent:
        return 0.0
    rest = [_squeeze(segment.text) for segment in layout.segments if segment.kind is SegmentKind.TEXT]
    windows = {text[i : i + _PIECE_CHARS] for text in rest for i in range(len(text) - _PIECE_CHARS + 1)}
    num_altered = sum(_stands_in(text, windows) for text in absent)
    num_verbatim = len(texts) - len(absent)
    return num_altered / (num_altered + num_verbatim) if num_altered else 0.0


def _squeeze(text: str) -> str:
    return _NO_LETTER_NOR_DIGIT.sub("", text.casefold())


def _stands_in(text: str, windows: Set[str]) -> bool:
    pieces = list(_pieces(_squeeze(text)))
    num_found = sum(piece in windows for piece in pieces)
    return num_found > 0 and num_found >= _MIN_SHARE_FOUND * len(pieces)


def _pieces(squeezed: str) -> Iterator[str]:
    """Back to back; the rest behind the last whole piece is too short to prove anything."""
    for start in range(0, len(squeezed) - _PIECE_CHARS + 1, _PIECE_CHARS):
        yield squeezed[start : start + _PIECE_CHARS]
