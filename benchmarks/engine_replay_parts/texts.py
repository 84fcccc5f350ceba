"""Texts from real corpora, cut to given numbers of tokens."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
FILL_SETS = ("xquad_en", "nq_open", "hotpotqa_distractor100", "musique_train100", "mtrag_un")
"""English: the default model spends 1.7 tokens on a Chinese character."""

CountTokens = Callable[[str], int]


def reader(folder: Path) -> Any:
    """The module `load.py` that lies with the data."""
    path = folder / "load.py"
    spec = importlib.util.spec_from_file_location("engine_replay_load", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SystemExit(f"{folder} holds no load.py: name the folder of the sets with --data")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def corpus_texts(folder: Path) -> Iterator[str]:
    """Every distinct passage of `FILL_SETS`, always in the same order."""
    load, seen = reader(folder), set()
    for name in FILL_SETS:
        for row in load.load(name):
            for chunk in row["chunks"]:
                if chunk["text"] not in seen:
                    seen.add(chunk["text"])
                    yield chunk["text"]


def token_counter(model: str | Path) -> CountTokens:
    """Counts as the engine does: each text by itself, without special tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


class TextFiller:
    """Hands out stretches of a stream of words; no word of it is used twice.

    Args:
        texts: laid end to end, their words are the stream.
        count_tokens: of a text by itself.
    """

    def __init__(self, texts: Iterable[str], count_tokens: CountTokens) -> None:
        self._words: Sequence[str] = [word for text in texts for word in text.split()]
        self._count = count_tokens
        self._next = 0

    def take(self, num_tokens: int) -> str:
        """As many words as fit `num_tokens` (at least one word): shorter by less than the next word.

        Raises:
            SystemExit: the stream is at its end.
        """
        # A word has a token at least. Counts grow with the words, so the end is found by bisection.
        low, high = 1, max(1, num_tokens)
        while low < high:
            middle = (low + high + 1) // 2
            if self._count(self._text(middle)) <= num_tokens:
                low = middle
            else:
                high = middle - 1
        if self._next + low > len(self._words):
            raise SystemExit(
                f"the corpora hold {len(self._words)} words, too few for the texts of this workload: "
                "lower --scale or --requests"
            )
        text = self._text(low)
        self._next += low
        return text

    def _text(self, num_words: int) -> str:
        return " ".join(self._words[self._next : self._next + num_words])
