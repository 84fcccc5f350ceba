"""Tokenising the parts of a prompt on their own, so that their ids can be joined."""

from __future__ import annotations

import copy
import functools
import itertools
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from cachecraft_rag.errors import InvalidRequestError

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerBase

MAX_CACHED_CHUNKS = 4096

_DUMMY_SPACES = ("▁", "Ġ")
"""How SentencePiece-style and byte-level tokenizers write a space at the head of a token."""

_SENTINELS = ("\n", "|", "0", "é")
"""Put before a text to take the dummy space; tried in turn until one does not merge with it."""

MAX_CACHED_BLANKS = 64


class SegmentTokenizer:
    """Tokenises prompt text and chunks so that the ids of the parts can be put side by side.

    *Markers* are the special tokens and those other added tokens that the chat template writes, such
    as role marks. They are parsed in text and never in a chunk: a document cannot open a turn.
    Nothing is put before or after a text: neither BOS nor EOS, nor the dummy space of
    SentencePiece-style tokenizers. So decoding the joined ids gives back the joined text, as far as
    the tokenizer keeps a text at all (some normalise Unicode, or drop white space beside a marker).

    Thread-safe. It works on a copy of `tokenizer`: whether markers are parsed is a setting of the
    tokenizer object, and switching it on a shared one would race with other users.

    Attributes:
        bos_ids: ids that the tokenizer puts before a text by itself; mostly one or none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        markers = _find_markers(self._tokenizer)
        # Re-adding a known token changes no id; it makes `split_special_tokens` apply to it.
        self._tokenizer.add_tokens(list(map(_as_special, markers.values())), special_tokens=True)
        self._marker_ids = {token.content: token_id for token_id, token in markers.items()}
        self._marker_pattern = _marker_pattern(markers.values())
        # The unknown token is a marker too, but a chunk's unknown characters do become it.
        self._forbidden_ids = markers.keys() - {self._tokenizer.unk_token_id}
        self.bos_ids = self._find_bos_ids()
        self._sentinels = self._choose_sentinels()
        self._cached_chunk = functools.lru_cache(MAX_CACHED_CHUNKS)(self._encode_chunk)
        self._cached_blank = functools.lru_cache(MAX_CACHED_BLANKS)(self._encode_plain)

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Ids of template text, history or question; markers in it are parsed.

        Raises:
            InvalidRequestError: `text` is not valid Unicode.
        """
        if text.isspace():  # what stands between chunks, again and again; nobody's content
            return self._cached_blank(text)
        ids: list[int] = []
        position = 0
        for marker in self._marker_pattern.finditer(text):
            ids += self._encode_plain(text[position : marker.start()])
            ids.append(self._marker_ids[marker[marker.lastindex or 0]])
            position = marker.end()
        ids += self._encode_plain(text[position:])
        return tuple(ids)

    def encode_chunk(self, text: str, *, remember: bool = True) -> tuple[int, ...]:
        """Ids of a chunk; markers in it are tokenised like any other text.

        Args:
            remember: keep the ids for the next call, among those of the chunks used last.

        Raises:
            InvalidRequestError: `text` is not valid Unicode.
        """
        return self._cached_chunk(text) if remember else self._encode_chunk(text)

    def forget_chunks(self) -> None:
        """Empty the cache of chunk ids."""
        self._cached_chunk.cache_clear()

    def _encode_chunk(self, text: str) -> tuple[int, ...]:
        ids = self._encode_plain(text)
        if len(text) == 1 or self._forbidden_ids.isdisjoint(ids):
            return ids
        # Some vocabularies hold a marker as an ordinary piece, which no setting forbids. Halving ends
        # inside the marker, also where the tokenizer's normaliser wrote it and `text` does not hold it.
        middle = len(text) // 2
        return self._encode_chunk(text[:middle]) + self._encode_chunk(text[middle:])

    def _encode_plain(self, text: str) -> tuple[int, ...]:
        """Ids of `text` without markers and without a dummy space before it."""
        if not text:
            return ()
        for sentinel, sentinel_ids in self._sentinels:
            ids = self._encode(sentinel + text)
            if ids[: len(sentinel_ids)] == sentinel_ids:
                return ids[len(sentinel_ids) :]
        # Every sentinel merges with this text: better a space too many than no answer.
        return self._encode(text)

    def _encode(self, text: str, *, add_special_tokens: bool = False) -> tuple[int, ...]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the prompt holds {text[error.start]!r}, half of a surrogate pair: it is no valid "
                "Unicode; decode the source with errors='replace'"
            ) from error
        ids = self._tokenizer.encode(
            text, add_special_tokens=add_special_tokens, split_special_tokens=True, verbose=False
        )
        return tuple(ids)

    def _choose_sentinels(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        tokens = "".join(self._tokenizer.convert_ids_to_tokens(list(self._encode("a"))))
        if not tokens.startswith(_DUMMY_SPACES):
            return (("", ()),)
        encoded = ((sentinel, self._encode(sentinel)) for sentinel in _SENTINELS)
        # An unknown token could stand for the sentinel and the text together.
        return tuple((s, ids) for s, ids in encoded if ids and self._tokenizer.unk_token_id not in ids)

    def _find_bos_ids(self) -> tuple[int, ...]:
        alone, wrapped = self._encode("a"), self._encode("a", add_special_tokens=True)
        length = len(alone)
        starts = range(len(wrapped) - length + 1)
        start = next((s for s in starts if wrapped[s : s + length] == alone), 0)
        return wrapped[:start]


def _find_markers(tokenizer: PreTrainedTokenizerBase) -> dict[int, AddedToken]:
    template = str(tokenizer.chat_template or "")
    return {
        token_id: token
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.content.strip() and (token.special or token.content in template)
    }


def _as_special(token: AddedToken) -> AddedToken:
    return type(token)(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=False,
        special=True,
    )


def _marker_pattern(markers: Iterable[AddedToken]) -> re.Pattern[str]:
    """Matches a marker, with the white space that the tokenizer drops beside it; longest first.

    White space before a marker is only tried at its start: otherwise a long run costs its square. Some
    vocabularies have 6,000 markers: they are only tried where the first character is that of one, and
    in one group for all that are treated alike, as `re` skips plain alternatives quickly.
    """
    by_length = sorted(markers, key=lambda token: len(token.content), reverse=True)
    if not by_length:
        return re.compile(r"(?!)")
    first = "".join(re.escape(char) for char in sorted({token.content[0] for token in by_length}))
    blank = r"\s" if any(token.lstrip for token in by_length) else ""
    may_begin = rf"(?=[{first}{blank}])"
    groups = itertools.groupby(by_length, key=lambda token: (token.lstrip, token.rstrip))
    alternatives = [
        (r"(?:(?<!\s)\s+)?" if lstrip else "")
        + f"({'|'.join(re.escape(token.content) for token in alike)})"
        + (r"\s*" if rstrip else "")
        for (lstrip, rstrip), alike in groups
    ]
    return re.compile(f"{may_begin}(?:{'|'.join(alternatives)})")
