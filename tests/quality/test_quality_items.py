"""Order, halves and pieces of the items, and the prompts of past traffic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from benchmarks.quality.caches import past_prompts
from benchmarks.quality.items import EvalSet, Item, load_items, of_half, pieces, shuffled
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.chunks import Chunk


def item(position: int, *texts: str) -> Item:
    return Item(f"i{position}", position, "Who?", ("x",), tuple(map(Chunk, texts or (f"t{position}",))))


def texts(prompts: Iterable[list[Chunk]]) -> list[list[str]]:
    return [sorted(chunk.text for chunk in prompt) for prompt in prompts]


def positions(items: list[Item]) -> list[int]:
    return [item.position for item in items]


@given(st.integers(0, 60), st.integers(1, 12))
def test_pieces_hold_each_item_once_and_never_both_halves(count: int, size: int) -> None:
    """Pieces tile the items; a piece belongs to one half."""
    items = [item(position) for position in range(count)]
    found = list(pieces(items, size))
    assert positions([one for piece in found for one in piece]) == positions(of_half(items, "all"))
    assert all(1 <= len(piece) <= size for piece in found)
    assert all(len({position % 2 for position in positions(piece)}) == 1 for piece in found)


@given(st.integers(0, 60))
def test_pieces_of_a_half_do_not_depend_on_the_other(count: int) -> None:
    """Measuring one half now and the other later caches the same chunks as measuring both."""
    items = [item(position) for position in range(count)]
    together = list(pieces(items))
    apart = [*pieces(of_half(items, "even")), *pieces(of_half(items, "odd"))]
    assert list(map(positions, together)) == list(map(positions, apart))


def test_shuffled_order_is_fixed_by_its_seed() -> None:
    """The same seed gives the same order of the same chunks."""
    chunks = [Chunk(str(i)) for i in range(20)]
    assert shuffled(chunks, "a") == shuffled(chunks, "a") != shuffled(chunks, "b")
    assert sorted(c.text for c in shuffled(chunks, "a")) == sorted(c.text for c in chunks)


def test_past_prompts_of_own_lists_come_in_other_orders() -> None:
    """Without other items each chunk stands in two prompts, none of which begins as the item's."""
    items = [item(0, "a", "b", "c"), item(1, "d", "e")]
    prompts = list(past_prompts(items, (), 2))
    assert Counter(c.text for p in prompts for c in p) == dict.fromkeys("abcde", 2)
    assert all(prompt[0].text not in ("a", "d") for prompt in prompts)


def test_past_prompts_of_other_items_come_first() -> None:
    """The items' own lists follow only for what is not seen often enough."""
    past = [item(8, "x", "y"), item(9, "a", "x"), item(10, "b", "a"), item(11, "a", "b"), item(12, "b")]
    assert texts(past_prompts([item(0, "a", "b")], past, 2)) == [["a", "x"], ["a", "b"], ["a", "b"]]
    assert texts(past_prompts([item(0, "a", "c")], past, 1)) == [["a", "x"], ["a", "c"]]


def test_evidence_is_among_the_passages_that_are_kept(tmp_path: Path) -> None:
    """Of an item cut to two passages the evidence, in the last place here, and the first remain."""
    chunks = [{"doc_id": f"d{i}", "title": f"T{i}", "text": f"text {i}"} for i in range(4)]
    row = {"id": "q", "question": " Who? ", "answers": ["x"], "chunks": chunks, "supporting": [3]}
    (tmp_path / "load.py").write_text(f"def load(name):\n    return [{row!r}] if name == 'big' else []\n")
    (found,) = load_items(EvalSet("small", 1, source="big", max_chunks=2), tmp_path)
    assert sorted(chunk.text for chunk in found.chunks) == ["T0\ntext 0", "T3\ntext 3"]
    (whole,) = load_items(EvalSet("big", 1), tmp_path)
    assert (len(whole.chunks), whole.question, whole.chunks[0].doc_id is not None) == (4, "Who?", True)


def test_a_folder_without_data_is_named(tmp_path: Path) -> None:
    """The message says which folder was searched and how to name another."""
    with pytest.raises(SystemExit, match="--data"):
        load_items(EvalSet("big", 1), tmp_path)
