"""Vocabularies with thousands of markers: parsed as the tokenizer itself does, and quickly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cachecraft_rag.segments.tokenize import SegmentTokenizer

NUM_MARKERS = 3000
FLAGS = ((False, False), (True, False), (False, True), (True, True))
ODD_MARKERS = ("]x[", "^a", "-b-", "\\c", "(d|e)", "*x", "é>")
"""Markers whose characters mean something in a pattern."""
FILLERS = ("", "a", " ", " \n ", "word", "<|a", "<|b1", "|>", "é", "x[", "\\", "^", " " * 50)


def numbered(number: int) -> str:
    """`<|a12` is a prefix of `<|a120`, so the longest must be taken; the letter tells its flags."""
    return f"<|{'abcd'[number % 4]}{number // 4}"


MARKERS = (*map(numbered, range(NUM_MARKERS)), *ODD_MARKERS)


class ManyMarkers:
    """A byte-level tokenizer with markers of every way of treating the white space beside them."""

    def __init__(self) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.add_special_tokens(
            [
                AddedToken(content, lstrip=FLAGS[i % 4][0], rstrip=FLAGS[i % 4][1], normalized=False)
                for i, content in enumerate(MARKERS)
            ]
        )
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
        self.segments = SegmentTokenizer(self.tokenizer)
        self.first_marker_id = len(alphabet)


@pytest.fixture(scope="module")
def many() -> ManyMarkers:
    return ManyMarkers()


markers = st.sampled_from(ODD_MARKERS) | st.integers(0, NUM_MARKERS + 500).map(numbered)
texts = st.lists(markers | st.sampled_from(FILLERS), max_size=12).map("".join)


@given(text=texts)
def test_text_is_encoded_as_the_tokenizer_does(many: ManyMarkers, text: str) -> None:
    """The same markers are found, the longest first, and the same white space is dropped beside them."""
    assert list(many.segments.encode_text(text)) == many.tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("marker", [*map(numbered, range(0, NUM_MARKERS, 97)), *ODD_MARKERS])
def test_every_marker_is_known(many: ManyMarkers, marker: str) -> None:
    """Each becomes its own id, not that of a shorter one."""
    assert many.segments.encode_text(marker) == (many.first_marker_id + MARKERS.index(marker),)


@given(text=texts)
def test_chunks_hold_no_marker(many: ManyMarkers, text: str) -> None:
    """However many there are, a document cannot write one, and its text is kept byte for byte."""
    ids = many.segments.encode_chunk(text, remember=False)
    assert max(ids, default=0) < many.first_marker_id
    assert len(ids) == len(text.encode())
