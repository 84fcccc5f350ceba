"""`python -m benchmarks.quality segments`: are chunks found, named and counted rightly, in any language?

No engine runs. Every item of a set is asked for twice, its passages in two orders, and of each prompt it is
checked that

- every passage is found as a chunk, once, in prompt order, with its own text;
- decoding the token ids of all segments gives back the rendered prompt, and of each chunk its text;
- a passage has the same tokens and the same key wherever and in whichever prompt it stands, and no two
  passages share a key;
- the token counts of the segments add up to the prompt's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.quality.items import SETS, Item, load_items, shuffled
from benchmarks.quality.models import QaModel
from tqdm import tqdm

from cachecraft_rag.chunks import Chunk, PromptLayout, Segment
from cachecraft_rag.segments.known import KnownChunks
from cachecraft_rag.segments.layout import build_layout
from cachecraft_rag.segments.prompt import PromptText
from cachecraft_rag.segments.render import render_chat
from cachecraft_rag.segments.tokenize import SegmentTokenizer

CHINESE_SETS = ("xquad_zh", "cmrc2018_dev", "tidb_faq_zh")
_TENANT = "segments"


@dataclass(slots=True)
class Findings:
    """What the prompts of one set showed.

    Attributes:
        num_tokens: of all prompts.
        num_plain_tokens: the same prompts tokenised as a whole; what cutting at chunks costs.
        problems: one line each.
    """

    set_name: str
    num_prompts: int = 0
    num_chunks: int = 0
    num_tokens: int = 0
    num_plain_tokens: int = 0
    keys: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        ratio = self.num_tokens / max(1, self.num_plain_tokens)
        return (
            f"{self.set_name}: {self.num_prompts} prompts, {self.num_chunks} chunks "
            f"({len(self.keys)} distinct), {self.num_tokens} tokens, "
            f"{ratio:.4f} of the prompts tokenised whole, {len(self.problems)} problems"
        )


class SegmentCheck:
    """Checks prompts as `model` would see them, with its tokenizer only."""

    def __init__(self, model: QaModel, tokenizer: Any) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._segments = SegmentTokenizer(tokenizer)
        self._known = KnownChunks(100_000)

    def check_set(self, name: str, folder: Path, num_items: int | None = None) -> Findings:
        findings = Findings(name)
        for item in tqdm(load_items(SETS[name], folder)[:num_items], desc=name, disable=None):
            for chunks in (item.chunks, shuffled(item.chunks, "segments", item.item_id)):
                self._check(item, chunks, findings)
        return findings

    def _check(self, item: Item, chunks: Sequence[Chunk], findings: Findings) -> None:
        prompt = self._prompt(item, chunks)
        layout = build_layout(prompt.text, self._known.find(_TENANT, prompt, chunks), self._segments, "n")
        findings.num_prompts += 1
        findings.num_chunks += len(layout.chunks)
        findings.num_tokens += layout.num_tokens
        findings.num_plain_tokens += len(self._tokenizer.encode(prompt.text, add_special_tokens=False))
        for problem in self._problems(prompt, chunks, layout, findings.keys):
            findings.problems.append(f"{item.item_id}: {problem}")

    def _problems(
        self, prompt: PromptText, chunks: Sequence[Chunk], layout: PromptLayout, keys: dict[str, str]
    ) -> Iterator[str]:
        wanted, found = [chunk.text for chunk in chunks], [segment.text for segment in layout.chunks]
        if wanted != found:
            yield f"{len(found)} chunks found for {len(wanted)} passages, or in another order"
        if self._decode(layout.token_ids).removeprefix(self._decode(self._segments.bos_ids)) != prompt.text:
            yield "the token ids do not decode to the prompt"
        if sum(len(segment.span) for segment in layout.segments) != layout.num_tokens:
            yield "the segments' token counts do not add up"
        for segment in layout.chunks:
            yield from self._chunk_problems(segment, layout, keys)

    def _chunk_problems(self, segment: Segment, layout: PromptLayout, keys: dict[str, str]) -> Iterator[str]:
        ids = layout.token_ids[segment.span.start : segment.span.end]
        if self._decode(ids) != segment.text:
            yield f"the chunk at {segment.span.start} does not decode to its text"
        if keys.setdefault(str(segment.key), segment.text) != segment.text:
            yield f"the chunk at {segment.span.start} has the key of another text"
        if self._segments.encode_chunk(segment.text) != ids:
            yield f"the chunk at {segment.span.start} has other tokens than alone"

    def _prompt(self, item: Item, chunks: Sequence[Chunk]) -> PromptText:
        prompt = self._model.prompt(chunks, item.question)
        return PromptText.plain(prompt) if isinstance(prompt, str) else render_chat(self._tokenizer, prompt)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def check_segments(models: Sequence[QaModel], sets: Sequence[str], folder: Path) -> bool:
    """Print the findings of every model and set; whether all is right."""
    from transformers import AutoTokenizer

    all_right = True
    for model in models:
        check = SegmentCheck(model, AutoTokenizer.from_pretrained(model.folder(), local_files_only=True))
        for name in sets:
            findings = check.check_set(name, folder)
            print(f"{model.label}, {findings}")
            for problem in findings.problems[:10]:
                print(f"  {problem}")
            all_right &= not findings.problems
    return all_right
