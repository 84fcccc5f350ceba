"""Nodes as passages of a prompt: their texts, the chunks in them, and which of them fit."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms.llm import LLM
from llama_index.core.schema import MetadataMode, NodeWithScore

from cachecraft_rag.chunks import Chunk
from cachecraft_rag.errors import PromptTooLongError
from cachecraft_rag.llama_index._convert import to_chunks

# As LlamaIndex's "compact" joins them, so that both modes share prefixes.
SEPARATOR = "\n\n"
# What a chat template adds: role marks, a date line. Too little here only shortens the answer, for the
# engine clips `max_tokens` to what the prompt leaves.
_TEMPLATE_TOKENS = 64
# How CitationQueryEngine numbers its nodes. The number changes with the order, the text behind it not.
_NUMBERED = re.compile(r"Source \d+:\n(?P<body>.*\S)\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Passage:
    """A text for the prompt, and the chunk in it.

    Attributes:
        name: id of its node.
    """

    text: str
    chunk: Chunk
    name: str
    score: float | None = None


def to_passages(nodes: Sequence[NodeWithScore]) -> list[Passage]:
    """The passages of nodes as response synthesizers show them; nodes without text are left out."""
    return [
        Passage(chunk.text, _without_number(chunk, scored), scored.node.node_id, scored.score)
        for scored in nodes
        for chunk in to_chunks([scored])
    ]


def to_shown_chunks(nodes: Sequence[NodeWithScore]) -> list[Chunk]:
    """The chunks that a response synthesizer is about to show. Without those that name no document: they
    are pieces of nodes that do, and invalidating a document must find all of its chunks."""
    return [passage.chunk for passage in to_passages(nodes) if passage.chunk.doc_id is not None]


def to_rendered_chunks(nodes: Sequence[NodeWithScore]) -> list[Chunk]:
    """Both texts in which a retrieved node may be shown: with its metadata and, where it has any, without
    (CitationQueryEngine)."""
    told = [passage.chunk for passage in to_passages(nodes)]
    return told + [replace(chunk, text=text) for scored in nodes for chunk, text in _bare(scored)]


def _bare(scored: NodeWithScore) -> list[tuple[Chunk, str]]:
    text = scored.node.get_content(metadata_mode=MetadataMode.NONE).strip()
    return [(chunk, text) for chunk in to_chunks([scored]) if text and text != chunk.text]


def _without_number(chunk: Chunk, scored: NodeWithScore) -> Chunk:
    numbered = _NUMBERED.fullmatch(scored.node.get_content(metadata_mode=MetadataMode.NONE))
    if numbered is None:
        return chunk
    # The node is made for one question; its random id is no document's.
    version = chunk.version if scored.node.ref_doc_id else None
    return Chunk(numbered["body"], scored.node.ref_doc_id, version, chunk.is_shared)


def fit(
    passages: Sequence[Passage], llm: LLM, head: Sequence[ChatMessage], count: Callable[[str], int]
) -> tuple[list[Passage], list[Passage]]:
    """The passages that fit beside `head` and the answer, and those that do not, both in their order.

    They are taken by score, best first; one that does not fit is passed over, so that a long passage
    does not push out all that come after it.

    Args:
        count: tokens of a text.

    Raises:
        PromptTooLongError: none fits.
    """
    window, num_output = llm.metadata.context_window, llm.metadata.num_output
    num_head = _TEMPLATE_TOKENS + sum(count(message.content or "") for message in head)
    room, num_between, kept = window - num_output - num_head, count(SEPARATOR), set()
    for index in sorted(range(len(passages)), key=lambda index: _rank(passages[index])):
        cost = count(passages[index].text) + num_between
        if cost <= room:
            room -= cost
            kept.add(index)
    if not kept:
        raise PromptTooLongError(
            f"none of {len(passages)} passages fits, and none is ever cut: of {window} tokens {num_output} "
            f"are kept for the answer and {num_head} for the prompt around them; make smaller chunks, "
            "lower max_tokens, or start the engine with a larger max_model_len"
        )
    return (
        [passage for index, passage in enumerate(passages) if index in kept],
        [passage for index, passage in enumerate(passages) if index not in kept],
    )


def _rank(passage: Passage) -> float:
    """Best score first; passages without one last. Sorting keeps the order of equal ones."""
    return float("inf") if passage.score is None else -passage.score
