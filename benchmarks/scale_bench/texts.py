"""Texts in any number, all different, made of the demo's passages; prompts of them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from cachecraft_rag.chunks import Chunk
from cachecraft_rag.segments.prompt import PromptText

PASSAGES = Path(__file__).resolve().parents[2] / "examples" / "data" / "passages.jsonl"
SEED = 6
MIN_CHARS, MAX_CHARS = 1_200, 2_000
"""About 280 to 460 tokens of English."""
SYSTEM_CHARS = 1_500
HEADER = "Source: handbook of the company, all rights reserved, for internal use only. Section: "
"""Longer than what the matcher indexes a text by."""


@lru_cache(1)
def _material() -> str:
    with PASSAGES.open(encoding="utf-8") as lines:
        text = "\n".join(json.loads(line)["text"] for line in lines)
    # Twice, so that a slice may begin anywhere; ASCII, as most English text is held by CPython.
    return text.encode("ascii", "ignore").decode() * 2


def text_of(number: int) -> str:
    """The text with this number: a slice of the passages, its number within the first words."""
    material = _material()
    at = number * 7_919 % (len(material) // 2)
    length = MIN_CHARS + number * 31 % (MAX_CHARS - MIN_CHARS)
    return f"On {material[at : at + 8].strip()} {number}: {material[at + 8 : at + length].strip()}"


def text_behind_header(number: int) -> str:
    """The same text behind a header that all of them share."""
    return HEADER + text_of(number)


def chunk_of(number: int, text: Callable[[int], str] = text_of) -> Chunk:
    return Chunk(text(number), f"doc-{number // 8}", "1")


def prompt_of(chunks: list[Chunk], dice: random.Random) -> PromptText:
    """A prompt as the adapters write it: text that nobody knows, the chunks, a question."""
    material = _material()
    at = dice.randrange(len(material) - SYSTEM_CHARS)
    parts = [material[at : at + SYSTEM_CHARS], *(chunk.text for chunk in chunks), "Which of them is larger?"]
    return PromptText.plain("\n\n".join(parts))


def unknown_prompt(num_chars: int, dice: random.Random) -> PromptText:
    """As long, and nothing of the index in it: its texts lack their beginnings."""
    numbers = dice.sample(range(1_000_000), num_chars // MIN_CHARS + 1)
    return PromptText.plain("\n\n".join(text_of(number)[8:] for number in numbers)[:num_chars])
