"""Prompts over the demo's passages, as long as is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.engine_replay_parts.texts import DATA, corpus_texts

from cachecraft_rag import CacheCraftEngine, Chunk

PASSAGES = Path(__file__).parents[2] / "examples" / "data" / "passages.jsonl"
QUESTION = "Which of these passages speaks of a victory, and who won it?"
SYSTEM = "Answer from the passages in a few words."


def demo_texts() -> list[str]:
    return [json.loads(line)["text"] for line in PASSAGES.read_text(encoding="utf-8").splitlines()]


def all_texts(data: Path = DATA) -> Iterator[str]:
    """The demo's passages and, once these are used up, those of the corpora in `data`."""
    demo = demo_texts()
    yield from demo
    seen = set(demo)
    yield from (text for text in corpus_texts(data) if text not in seen)


def passages_for(context: int, count_tokens: Callable[[str], int], texts: Iterable[str]) -> list[Chunk]:
    """As many passages as fit `context` tokens, a token behind each for what stands between them.

    Raises:
        SystemExit: `texts` end before.
    """
    chunks: list[Chunk] = []
    for index, text in enumerate(texts):
        context -= count_tokens(text) + 1
        if context < 0:
            return chunks
        chunks.append(Chunk(text, doc_id=f"passage-{index}"))
    raise SystemExit(f"the passages hold {context} tokens too few")


def messages(chunks: Sequence[Chunk]) -> list[dict[str, str]]:
    context = "\n\n".join(chunk.text for chunk in chunks)
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"{context}\n\n{QUESTION}"},
    ]


def fill_store(engine: CacheCraftEngine, chunks: list[Chunk]) -> None:
    """Compute the chunks in two orders, as traffic would, so that each is stored in context."""
    for order in (chunks, chunks[::-1]):
        engine.chat(messages(order), chunks=order, max_tokens=1, read_prefix_cache=False, reuse="off")
