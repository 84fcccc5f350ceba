"""An index of texts by their beginnings, asked for every position of a prompt at once.

A position is a candidate if the hash of the window that begins there is that of a known beginning.
All windows of one size are hashed in log2(size) array operations, and looked up in one more: a look at
each position in Python took 2 ms for a prompt of 4,000 tokens, with the interpreter's lock held.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

import numpy as np

ANCHOR_CHARS = (1024, 256, 64, 16, 4, 1)
"""A text is indexed by its first characters, as many as the largest of these that it has. Large ones tell
texts behind a common header apart; each in use costs some 0.1 ms for a long prompt. Powers of two, as
windows are doubled."""

_SLOTS_PER_ANCHOR = 16
"""One of so many positions without a match is looked up in the dictionary for nothing."""
_MIN_BITS = 10
_HASH_BITS = 32
"""At a million anchors some four windows of a long prompt collide with one, which is cheaper than to hash
all of them to 64 bits."""
# Not the same in every process: nobody can write texts that collide. Odd, so that no bits are lost.
_FACTORS = [np.uint32(secrets.randbits(_HASH_BITS) | 1) for _ in range(max(ANCHOR_CHARS).bit_length())]


class Windows:
    """A text, and the hashes of its windows."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._levels = [_codes(text) * _FACTORS[0]]

    def hashes(self, size: int) -> np.ndarray:
        """uint32 (max(0, len(text) - size + 1),), of each window of `size` characters, a power of two."""
        while len(self._levels) < size.bit_length():
            half = 1 << (len(self._levels) - 1)
            last = self._levels[-1]
            self._levels.append(_joined(last[:-half], last[half:], len(self._levels)))
        return self._levels[size.bit_length() - 1]


def anchor_hashes(texts: Sequence[str], size: int) -> list[int]:
    """Hash of the first `size` characters of each text, as `Windows` has it; all are that long."""
    hashes = _codes("".join(text[:size] for text in texts)).reshape(len(texts), size) * _FACTORS[0]
    for level in range(1, size.bit_length()):
        hashes = _joined(hashes[:, ::2], hashes[:, 1::2], level)
    found: list[int] = hashes[:, 0].tolist()
    return found


class AnchorIndex:
    """Lengths of texts of at least `size` characters, by the hash of their first `size` characters.

    Behind one anchor texts are told apart by length, so thousands of chunks behind one header cost
    a look-up per distinct length, not a comparison per chunk. What is found is a place where a text
    may stand: the caller compares.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._lengths: dict[int, dict[int, int]] = {}
        self._num_removed = 0
        self._make_table()

    def add(self, texts: Sequence[str]) -> None:
        for anchor, text in zip(anchor_hashes(texts, self._size), texts, strict=True):
            lengths = self._lengths.setdefault(anchor, {})
            lengths[len(text)] = lengths.get(len(text), 0) + 1
            self._table[anchor >> self._shift] = True
        if len(self._lengths) * _SLOTS_PER_ANCHOR > len(self._table):
            self._make_table()

    def remove(self, text: str) -> None:
        (anchor,) = anchor_hashes([text], self._size)
        lengths = self._lengths[anchor]
        lengths[len(text)] -= 1
        if not lengths[len(text)]:
            del lengths[len(text)]
        if not lengths:
            del self._lengths[anchor]
            self._num_removed += 1
        # A slot may belong to several anchors, so it is only taken back when all are set anew.
        if self._num_removed * _SLOTS_PER_ANCHOR > len(self._table):
            self._make_table()

    def candidates(self, windows: Windows) -> Iterable[int]:
        """Positions where a text of this index may start."""
        if not self._lengths or len(windows.text) < self._size:
            return ()
        hashes = windows.hashes(self._size)
        places = np.flatnonzero(self._table[hashes >> np.uint32(self._shift)])
        known = self._lengths
        pairs = zip(places.tolist(), hashes[places].tolist(), strict=True)
        return [place for place, anchor in pairs if anchor in known]

    def ends_at(self, windows: Windows, start: int) -> list[int]:
        """Where a text of this index that starts at `start` could end, farthest first."""
        room = len(windows.text) - start
        if room < self._size or not self._lengths:
            return []
        lengths = self._lengths.get(int(windows.hashes(self._size)[start]), ())
        return sorted((start + length for length in lengths if length <= room), reverse=True)

    def _make_table(self) -> None:
        """Twice as large as needed: it is made anew when it is full, once in as many additions."""
        num_slots = 2 * _SLOTS_PER_ANCHOR * len(self._lengths)
        bits = min(max(_MIN_BITS, num_slots.bit_length()), _HASH_BITS)
        self._shift = _HASH_BITS - bits
        self._table = np.zeros(1 << bits, np.bool_)
        anchors = np.fromiter(self._lengths, np.uint32, len(self._lengths))
        self._table[anchors >> np.uint32(self._shift)] = True
        self._num_removed = 0


def _codes(text: str) -> np.ndarray:
    # A lone surrogate is somebody else's error to report.
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def _joined(left: np.ndarray, right: np.ndarray, level: int) -> np.ndarray:
    """Hashes of windows made of two halves; multiplication wraps around."""
    joined: np.ndarray = left * _FACTORS[level]
    joined += right
    return joined
