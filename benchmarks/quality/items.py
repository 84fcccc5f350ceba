"""Questions with their passages, in a fixed order that is not the set's own."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from cachecraft_rag.chunks import Chunk

T = TypeVar("T")

SEED = 20250215
PIECE_SIZE = 10
HALVES = ("all", "even", "odd")


@dataclass(frozen=True, slots=True)
class EvalSet:
    """One evaluation set.

    Attributes:
        num_items: how many questions the published table uses.
        shares_chunks: whether passages belong to many questions.
        source: name of the set in the data folder, where it is another.
        max_chunks: passages kept of each item, the evidence among them; None keeps all.
    """

    name: str
    num_items: int
    shares_chunks: bool = False
    language: str = "en"
    source: str = ""
    max_chunks: int | None = None


SETS = {
    item.name: item
    for item in (
        EvalSet("xquad_en", 150, shares_chunks=True),
        # The number of passages that the first prototype was measured with.
        EvalSet("xquad_en_4", 150, shares_chunks=True, source="xquad_en", max_chunks=4),
        EvalSet("hotpotqa_distractor100", 100),
        EvalSet("musique_train100", 60),
        EvalSet("xquad_zh", 60, shares_chunks=True, language="zh"),
        EvalSet("cmrc2018_dev", 40, shares_chunks=True, language="zh"),
        EvalSet("tidb_faq_zh", 60, shares_chunks=True, language="zh"),
    )
}


@dataclass(frozen=True, slots=True)
class Item:
    """A question, its acceptable answers and its passages in prompt order.

    Attributes:
        position: place in the fixed order; its parity is the item's half.
        evidence: places in `chunks` of those that hold the answer; empty where the set does not say.
    """

    item_id: str
    position: int
    question: str
    answers: tuple[str, ...]
    chunks: tuple[Chunk, ...]
    evidence: tuple[int, ...] = ()


def load_items(eval_set: EvalSet, folder: Path) -> list[Item]:
    """All items of a set, shuffled by a fixed seed, and the passages of each item as well.

    The sets' own orders would mislead: neighbouring questions are about the same article, and where
    distractors were added the evidence stands first.
    """
    name = eval_set.source or eval_set.name
    rows = list(_loader(folder).load(name))
    random.Random(f"{SEED} {name}").shuffle(rows)
    return [_item(row, position, eval_set.max_chunks) for position, row in enumerate(rows)]


def of_half(items: Sequence[Item], half: str) -> list[Item]:
    """Items of one half, the even positions before the odd ones if all are asked for.

    Halves are kept apart, so that the pieces of one half are the same whatever else runs.
    """
    halves = {"even": items[::2], "odd": items[1::2], "all": [*items[::2], *items[1::2]]}
    return list(halves[half])


def pieces(items: Iterable[Item], size: int = PIECE_SIZE) -> Iterator[list[Item]]:
    """Items in pieces of `size`; no piece mixes the two halves."""
    for parity in (0, 1):
        rest = iter([item for item in items if item.position % 2 == parity])
        while piece := list(islice(rest, size)):
            yield piece


def distinct_chunks(items: Iterable[Item]) -> list[Chunk]:
    return list({chunk.text: chunk for item in items for chunk in item.chunks}.values())


def shuffled(things: Sequence[T], *seed: object) -> list[T]:
    """The same in another order, fixed by `seed`."""
    rng = random.Random(" ".join(map(str, (SEED, *seed))))
    return rng.sample(things, len(things))


def _item(row: dict[str, Any], position: int, max_chunks: int | None) -> Item:
    evidence = row.get("supporting", ())
    # Sorting is stable: the rest stays in the order of the set, which is that of the retriever.
    order = sorted(range(len(row["chunks"])), key=lambda index: index not in evidence)
    kept = shuffled(sorted(order[:max_chunks]), row["id"])
    return Item(
        item_id=str(row["id"]),
        position=position,
        question=row["question"].strip(),
        answers=tuple(row["answers"]),
        chunks=tuple(_chunk(row["chunks"][index]) for index in kept),
        evidence=tuple(place for place, index in enumerate(kept) if index in evidence),
    )


def _chunk(row: dict[str, Any]) -> Chunk:
    """Title and text as one string: a chunk is what the retriever returns."""
    return Chunk(f"{row['title']}\n{row['text']}".strip(), doc_id=str(row["doc_id"]))


def _loader(folder: Path) -> Any:
    """The module `load.py` that lies with the data."""
    spec = importlib.util.spec_from_file_location("quality_data_load", folder / "load.py")
    if spec is None or spec.loader is None or not (folder / "load.py").is_file():
        raise SystemExit(f"{folder} holds no load.py: name the folder of the evaluation sets with --data")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
