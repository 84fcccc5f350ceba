"""Prompt text and the chunks found in it → token ids and the segments that tile them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from cachecraft_rag.chunks import (
    Chunk,
    PromptLayout,
    Segment,
    SegmentKind,
    Span,
    chunk_key,
    prefix_hashes,
)
from cachecraft_rag.segments.matcher import Match
from cachecraft_rag.segments.tokenize import SegmentTokenizer


@dataclass(frozen=True, slots=True)
class _Piece:
    """A segment before its place among the tokens is known; a chunk's KV needs `chunk`."""

    text: str
    token_ids: tuple[int, ...]
    chunk: Chunk | None = None


def build_layout(
    text: str,
    matches: Sequence[Match],
    tokenizer: SegmentTokenizer,
    namespace: str,
    *,
    shared_namespace: str | None = None,
    remember: bool = True,
) -> PromptLayout:
    """Tokenise a prompt segment by segment.

    Every match and every text between matches is tokenised on its own, so that a chunk has the same
    ids wherever it stands. The ids begin with the tokenizer's BOS exactly once: where `text` does
    not bring it, it is put before the first text segment, or into a segment of its own, with empty
    text, if the prompt begins with a chunk. A segment without tokens is left out.

    A match is plain text whatever it spells, so that a document cannot open a turn. A match over a
    mark that the template wrote would undo that mark too: `KnownChunks.find` gives none.

    Args:
        matches: disjoint, in order of position, as `KnownChunks.find` gives them.
        namespace: of `chunk_key`: names model, tokenizer, dtype, rope and tenant.
        shared_namespace: the same of the shared tenant, for shared chunks; None takes `namespace`.
        remember: keep the chunks' token ids in the tokenizer's cache.

    Raises:
        InvalidRequestError: `text` is not valid Unicode.
    """
    pieces = _with_bos(list(_pieces(text, matches, tokenizer, remember)), tokenizer.bos_ids)
    token_ids = tuple(chain.from_iterable(piece.token_ids for piece in pieces))
    shared_namespace = namespace if shared_namespace is None else shared_namespace
    segments = tuple(_segments(pieces, namespace, shared_namespace))
    return PromptLayout(token_ids, tuple(_with_prefixes(segments, token_ids, namespace, shared_namespace)))


def _pieces(
    text: str, matches: Sequence[Match], tokenizer: SegmentTokenizer, remember: bool
) -> Iterator[_Piece]:
    position = 0
    for match in matches:
        before, inside = text[position : match.start], text[match.start : match.end]
        yield _Piece(before, tokenizer.encode_text(before))
        yield _Piece(inside, tokenizer.encode_chunk(inside, remember=remember), match.chunk)
        position = match.end
    yield _Piece(text[position:], tokenizer.encode_text(text[position:]))


def _with_bos(pieces: list[_Piece], bos_ids: tuple[int, ...]) -> list[_Piece]:
    pieces = [piece for piece in pieces if piece.token_ids]
    first = pieces[0] if pieces else _Piece("", ())
    if first.token_ids[: len(bos_ids)] == bos_ids:
        return pieces
    if first.chunk is None:
        return [replace(first, token_ids=bos_ids + first.token_ids), *pieces[1:]]
    return [_Piece("", bos_ids), *pieces]


def _segments(pieces: Sequence[_Piece], namespace: str, shared_namespace: str) -> Iterator[Segment]:
    start = 0
    for piece in pieces:
        span = Span(start, start + len(piece.token_ids))
        if piece.chunk is None:
            yield Segment(span, SegmentKind.TEXT, piece.text)
        else:
            key = chunk_key(shared_namespace if piece.chunk.is_shared else namespace, piece.token_ids)
            yield Segment(span, SegmentKind.CHUNK, piece.text, piece.chunk, key)
        start = span.end


def _with_prefixes(
    segments: Sequence[Segment], token_ids: Sequence[int], namespace: str, shared_namespace: str
) -> Iterator[Segment]:
    """The segments, chunks with the hash of what stands before them, each in its own namespace: two equal
    hashes of shared chunks mean equal tokens, whoever asked."""
    starts = [segment.span.start for segment in segments]
    any_shared = any(segment.chunk and segment.chunk.is_shared for segment in segments)
    own = [*prefix_hashes(namespace, token_ids, starts)]
    shared = [*prefix_hashes(shared_namespace, token_ids, starts)] if any_shared else own
    for segment, *hashes in zip(segments, own, shared, strict=True):
        chunk = segment.chunk
        yield segment if chunk is None else replace(segment, prefix_hash=hashes[chunk.is_shared])
