"""Where do the contents of the messages stand in a rendered chat?"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence

from cachecraft_rag.errors import InvalidRequestError
from cachecraft_rag.segments.prompt import CharSpan

MAX_RENDERS = 64
"""Bounds the work on a template that alters many contents; what is not tried by then has no span."""

_NONCE_DIGITS = 32


def locate_contents(
    render: Callable[[Sequence[str]], str], contents: Sequence[str], text: str
) -> tuple[CharSpan, ...]:
    """Character ranges, in order, of the contents in `text`, which is `render(contents)`.

    The chat is rendered again with a nonce before and after each content. If it is the same text but
    for the nonces, then they show where each content went, whatever the contents spell. Searching
    `text` for the contents was rejected: a content may spell a mark of the template. Replacing the
    contents by nonces was rejected too: templates branch on what a content holds.

    A range covers a content without the white space around it, which no chunk begins or ends with and
    which many templates drop. A content has no range where the template alters it, or reacts to the
    nonces; halving finds such contents, so that the others keep theirs.
    """
    marked: frozenset[int] = frozenset()
    spans: tuple[CharSpan, ...] = ()
    pending = [[i for i, content in enumerate(contents) if content.strip()]]
    for _ in range(MAX_RENDERS):
        if not pending:
            break
        part = pending.pop()
        found = _spans_of(render, contents, text, marked.union(part))
        if found is not None:
            marked, spans = marked.union(part), found
        elif len(part) > 1:
            pending += [part[: len(part) // 2], part[len(part) // 2 :]]
    return spans


def _spans_of(
    render: Callable[[Sequence[str]], str], contents: Sequence[str], text: str, marked: Collection[int]
) -> tuple[CharSpan, ...] | None:
    """Ranges of the contents with indices `marked`; None if nonces around them change the text."""
    opening, closing = _nonce(), _nonce()
    cores = {contents[i].strip() for i in marked}
    try:
        # The first place of the core in its content is behind the leading white space.
        rendered = render(
            [
                content.replace(core := content.strip(), f"{opening}{core}{closing}", 1)
                if i in marked
                else content
                for i, content in enumerate(contents)
            ]
        )
    except InvalidRequestError:
        return None
    pieces = re.split(f"({opening}|{closing})", rendered)
    if "".join(pieces[::2]) != text:
        return None
    return tuple(_enclosed(pieces, opening, closing, cores))


def _enclosed(
    pieces: Sequence[str], opening: str, closing: str, cores: Collection[str]
) -> Iterator[CharSpan]:
    """Ranges of the texts between an opening and a closing nonce; `pieces` alternate text and nonce."""
    position = 0
    for i in range(0, len(pieces), 2):
        piece = pieces[i]
        if i > 0 and pieces[i - 1 : i + 2] == [opening, piece, closing] and piece in cores:
            yield position, position + len(piece)
        position += len(piece)


def _nonce() -> str:
    # Digits stay as they are where a template changes case or escapes.
    return str(secrets.randbelow(10**_NONCE_DIGITS)).zfill(_NONCE_DIGITS)
