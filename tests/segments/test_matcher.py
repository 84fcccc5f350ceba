from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.chunks import Chunk
from cachecraft_rag.segments.matcher import ChunkMatcher, find_matches

LONG = "The river rises in the hills and flows through three towns before it meets the sea. " * 2
LONGER = LONG + "Then it ends."


def matcher(*texts: str) -> ChunkMatcher:
    return ChunkMatcher(Chunk(text) for text in texts)


def found(text: str, *texts: str) -> list[str]:
    """The matched pieces of `text`, in order; each must be the text of its chunk."""
    matches = matcher(*texts).find(text)
    for match in matches:
        assert text[match.start : match.end] == match.chunk.text.strip()
    return [text[match.start : match.end] for match in matches]


def brute_force(text: str, texts: list[str]) -> list[tuple[int, int]]:
    spans, position = [], 0
    while position < len(text):
        fits = [t.strip() for t in texts if t.strip() and text.startswith(t.strip(), position)]
        if fits:
            end = position + max(map(len, fits))
            spans.append((position, end))
            position = end
        else:
            position += 1
    return spans


def test_finds_chunks_in_any_order() -> None:
    """The order in which chunks were added does not matter."""
    assert found("x beta y alpha z", "alpha", "beta") == ["beta", "alpha"]


def test_finds_repeats_and_neighbours() -> None:
    """A chunk may stand several times, with nothing between two chunks."""
    assert found("alphaalphabeta", "alpha", "beta") == ["alpha", "alpha", "beta"]


@pytest.mark.parametrize("texts", [("alpha", "alpha beta"), (LONG, LONGER)], ids=["short", "long"])
def test_longest_match_wins(texts: tuple[str, str]) -> None:
    """Of a chunk and its own beginning, the whole one is found where it stands."""
    short, long = (text.strip() for text in texts)
    assert found(f"{long}|{short}|{long}", short, long) == [long, short, long]


def test_longest_match_wins_between_index_sizes() -> None:
    """The longer chunk wins also when it is indexed under more characters than the shorter one."""
    assert found(LONG, "The", "The river", LONG) == [LONG.strip()]


def test_matches_do_not_overlap() -> None:
    """The match that starts first hides one that begins inside it."""
    assert found("abcdef", "bcd", "cdef", "ef") == ["bcd", "ef"]


def test_a_cut_chunk_is_not_found() -> None:
    """Text that only begins like a chunk is no match."""
    assert found(LONG[:-3], LONG) == []


def test_finds_chunks_between_braces_and_quotes() -> None:
    """No character of a chunk has a meaning for the matcher."""
    texts = ('{"a": [1, {}]} {x!r}', 'it\'s "said" \\d+ (.*)', "line\r\nline", "🌊 naïve 河")
    assert found("<<" + ">><<".join(texts) + ">>", *texts) == list(texts)


@pytest.mark.parametrize("blank", [" ", "\n\t ", "\r\n"])
def test_blank_chunks_are_never_found(blank: str) -> None:
    """A chunk of white space does not match the spaces of a prompt."""
    assert found(f"a{blank * 3}b", blank) == []


def test_white_space_around_a_chunk_is_ignored() -> None:
    """A chunk is found by its stripped text and the match covers just that."""
    assert found("[alpha]", "  alpha\n") == ["alpha"]


def test_the_chunk_added_last_names_the_match() -> None:
    """Of two chunks with one text, the later one is reported."""
    index = ChunkMatcher([Chunk("alpha", doc_id="old"), Chunk("alpha ", doc_id="new")])
    assert [match.chunk.doc_id for match in index.find("alpha")] == ["new"]
    assert len(index) == 1


def test_a_removed_chunk_is_not_found() -> None:
    """Removing one chunk leaves those that share its beginning and length."""
    texts = [f"{LONG}{n}" for n in range(5)]
    index = matcher(*texts)
    index.remove(texts[2])
    index.remove("never added")
    assert [match.chunk.text for match in index.find("|".join(texts))] == texts[:2] + texts[3:]


def test_an_emptied_matcher_finds_nothing() -> None:
    """Adding and removing leaves no trace."""
    index = matcher("alpha", LONG)
    for text in ("alpha", LONG):
        index.remove(text)
    assert (len(index), index.find(f"alpha {LONG}")) == (0, [])


def test_the_first_of_two_matchers_wins_a_tie() -> None:
    """Equally long matches are taken from the first matcher, a longer one from any."""
    first = ChunkMatcher([Chunk("alpha", doc_id="first"), Chunk("beta", doc_id="first")])
    second = ChunkMatcher([Chunk("alpha", doc_id="second"), Chunk("beta!", doc_id="second")])
    matches = find_matches("alpha beta!", (first, second))
    assert [match.chunk.doc_id for match in matches] == ["first", "second"]


def test_many_chunks_behind_one_header() -> None:
    """Thousands of chunks with the same first characters are told apart."""
    texts = [f"{LONG * 2}{n}." for n in range(5000)]
    assert found(f"{texts[4321]} {texts[7]}", *texts) == [texts[4321], texts[7]]


@given(
    st.lists(st.text("ab ", min_size=1, max_size=30), max_size=8),
    st.text("ab ", max_size=80),
    st.text("ab ", max_size=40),
)
def test_agrees_with_brute_force(texts: list[str], prompt: str, middle: str) -> None:
    """The index finds what trying every chunk at every position finds."""
    prompt = middle.join([prompt, *texts])
    spans = [(match.start, match.end) for match in matcher(*texts).find(prompt)]
    assert spans == brute_force(prompt, texts)


@given(
    st.lists(st.tuples(st.text("ab", min_size=1, max_size=5), st.integers(1, 600)), max_size=6),
    st.text("ab ", max_size=20),
)
def test_agrees_with_brute_force_on_long_texts(made_of: list[tuple[str, int]], middle: str) -> None:
    """Texts of up to 3,000 characters, many of which begin alike, are found where they stand."""
    texts = [f"{piece * times}!" for piece, times in made_of]
    prompt = middle.join(["", *texts, ""])
    spans = [(match.start, match.end) for match in matcher(*texts).find(prompt)]
    assert spans == brute_force(prompt, texts)


def test_finds_what_is_left_after_many_came_and_went() -> None:
    """An index that grew, and from which most was removed, finds the rest and nothing else."""
    texts = [f"number {n} {LONG}" for n in range(3000)]
    index = matcher(*texts)
    for text in texts[10:2990]:
        index.remove(text)
    left = texts[:10] + texts[2990:]
    prompt = "|".join(texts[n] for n in (5, 100, 2500, 2995, 2000))
    assert [match.chunk.text for match in index.find(prompt)] == [texts[5], texts[2995]]
    assert [match.chunk.text for match in index.find("|".join(left))] == left


def test_a_prompt_with_half_a_surrogate_pair_is_searched() -> None:
    """Whoever encodes it reports the fault; chunks around it are found."""
    assert found(f"\ud83c{LONG}|alpha", LONG, "alpha") == [LONG.strip(), "alpha"]
