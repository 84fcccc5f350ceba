"""What happened to a request: decisions, reasons and the report that every answer carries."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from cachecraft_rag.chunks import ChunkKey

if TYPE_CHECKING:
    from rich.console import RenderableType


class ChunkDecision(enum.StrEnum):
    """What was done with one chunk of a prompt."""

    EXACT = "exact"
    """KV reused behind the very tokens it was computed behind: nothing is approximated."""
    REUSED = "reused"
    """KV reused at another place, no token recomputed."""
    REPAIRED = "repaired"
    """KV reused at another place, some tokens recomputed."""
    COMPUTED = "computed"
    """KV computed in full."""


class RequestDecision(enum.StrEnum):
    REUSE = "reuse"
    FULL = "full"


class Reason(enum.StrEnum):
    """Why a chunk or a request was treated as it was. `sentence` explains it to a person."""

    SAME_PREFIX = "same_prefix"
    PREFIX_CACHE = "prefix_cache"
    OTHER_PREFIX = "other_prefix"
    RECOMPUTE_ALL = "recompute_all"
    NOT_CACHED = "not_cached"
    OVER_QUOTA = "over_quota"
    NOT_WARMED = "not_warmed"
    NO_EXACT_VARIANT = "no_exact_variant"
    REPEATED_IN_PROMPT = "repeated_in_prompt"
    NOT_IN_PROMPT = "not_in_prompt"
    TOO_SHORT = "too_short"
    SUPERSEDED_VERSION = "superseded_version"
    STORE_NOT_CURRENT = "store_not_current"
    QUARANTINED = "quarantined"
    NO_CHUNKS = "no_chunks_matched"
    REUSE_OFF = "reuse_off"
    PRECISION_CRITICAL = "precision_critical"
    ALTERED_CHUNKS = "altered_chunks"
    LONG_OUTPUT = "long_output"
    COMPLEX_QUESTION = "complex_question"
    TOO_MANY_MISSING = "too_many_missing"
    OVERHEAD_TOO_HIGH = "overhead_too_high"
    QUALITY_BREAKER = "quality_breaker"
    UNSUPPORTED_MODEL = "unsupported_model"
    UNSUPPORTED_REQUEST = "unsupported_request"
    SELF_TEST_FAILED = "self_test_failed"
    PLAN_FAILED = "plan_failed"
    LOAD_FAILED = "load_failed"
    ENGINE_FAULT = "engine_fault"
    REPORT_LOST = "report_lost"

    @property
    def sentence(self) -> str:
        return _SENTENCES[self]


_SENTENCES: Mapping[Reason, str] = {
    Reason.SAME_PREFIX: "The same tokens stood before it when it was cached, so its KV is exact.",
    Reason.PREFIX_CACHE: "vLLM's own prefix cache held it behind the same tokens.",
    Reason.OTHER_PREFIX: "It was cached behind other text, so its KV was moved and repaired.",
    Reason.RECOMPUTE_ALL: "The strategy or budget asked for every token to be recomputed.",
    Reason.NOT_CACHED: "It was not in the store; it was computed and offered to the store.",
    Reason.OVER_QUOTA: "It was not in the store, and its tenant's quota has no room to keep it.",
    Reason.NOT_WARMED: "It is marked as shared and was not in the store; only `warm` puts such chunks there.",
    Reason.NO_EXACT_VARIANT: "Only exact reuse was allowed and no variant had the same prefix.",
    Reason.REPEATED_IN_PROMPT: "It stands twice in this prompt and was not cached before.",
    Reason.NOT_IN_PROMPT: "Its text does not occur in the rendered prompt.",
    Reason.TOO_SHORT: "It has fewer tokens than min_chunk_tokens.",
    Reason.SUPERSEDED_VERSION: "A newer version of its document is registered.",
    Reason.STORE_NOT_CURRENT: "Other processes may have changed documents, and the journal cannot be read.",
    Reason.QUARANTINED: "Answers with its KV went wrong, so it is computed and stored anew; see feedback.",
    Reason.NO_CHUNKS: "No known chunk occurs in the prompt.",
    Reason.REUSE_OFF: "The request asked for full compute.",
    Reason.PRECISION_CRITICAL: "Marked precision-critical, so nothing may be approximated.",
    Reason.ALTERED_CHUNKS: "The template altered most of the chunks, so that few match word for word.",
    Reason.LONG_OUTPUT: "A long answer may be generated, over which small errors add up.",
    Reason.COMPLEX_QUESTION: "The wording of the question makes another answer with reused KV likely.",
    Reason.TOO_MANY_MISSING: "Too few of its chunks were in the store; the others were offered to it.",
    Reason.OVERHEAD_TOO_HIGH: "Repairing the reused KV would have cost nearly as much as full compute.",
    Reason.QUALITY_BREAKER: "Sampled answers with reuse differed too much from full compute; see feedback.",
    Reason.UNSUPPORTED_MODEL: "This model's KV cannot be moved; see the detail.",
    Reason.UNSUPPORTED_REQUEST: "This request uses a feature that rules out reuse; see the detail.",
    Reason.SELF_TEST_FAILED: "The start-up self-test failed on this model, so reuse is off.",
    Reason.PLAN_FAILED: "Planning failed; the prompt was computed in full.",
    Reason.LOAD_FAILED: "Some KV could not be loaded; those tokens were computed instead.",
    Reason.ENGINE_FAULT: "The request failed with reuse on and was answered again without.",
    Reason.REPORT_LOST: "The engine's account of this request could not be fetched.",
}


@dataclass(frozen=True, slots=True)
class ChunkReport:
    """One chunk of a prompt, in prompt order. The four token counts obey
    `num_reused_tokens + num_recomputed_tokens + num_computed_tokens == num_tokens`.

    Attributes:
        start: position of its first token in the prompt.
        tier: where the KV came from: "host", "disk", "redis", "prefix_cache", or "" when it was computed.
        cached_start: position of its first token when its KV was computed, -1 if not reused.
        num_reused_tokens: tokens whose KV was taken over as it was (moved if need be).
        num_recomputed_tokens: cached tokens whose KV was computed again.
        num_computed_tokens: tokens that had no cached KV.
        num_separator_tokens: tokens right behind the chunk whose KV came with it; in none of its other
            counts, but in the request's.
        same_predecessors: the chunks before it were the same, in the same order, as at capture.
    """

    chunk_key: ChunkKey
    doc_id: str | None
    version: str | None
    decision: ChunkDecision
    reason: Reason
    start: int
    num_tokens: int
    num_reused_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_computed_tokens: int = 0
    num_separator_tokens: int = 0
    tier: str = ""
    cached_start: int = -1
    same_predecessors: bool = False
    variant: int | None = None


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """A stretch of a prompt that was tokenised on its own: a chunk, or the text around chunks.

    Attributes:
        start: position of its first token in the prompt. A chunk's is that of its `ChunkReport`.
    """

    text: str
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ReuseReport:
    """What reuse did for one request. All counts are ours, taken where the work is done; vLLM's
    `num_cached_tokens` also counts what was promised and then recomputed.

    `num_reused_tokens + num_recomputed_tokens + num_computed_tokens == num_prompt_tokens`.

    Attributes:
        detail: free text that goes with `reason`.
        num_prefix_tokens: of the reused tokens, those that vLLM's own prefix cache held; the prompt begins
            with them.
        ttft_s: seconds from the call to the first token, -1 if no token came.
        num_probe_tokens: tokens of the question that were computed once more, to choose by what it
            attends to; they are part of the budget but of none of the other counts.
        load_s / select_s / recompute_s: seconds the worker spent loading KV, choosing tokens and in the
            recompute pass.
        pieces: the prompt's text, in order, to be shown; empty where only the counts are known. It is
            neither compared nor in `repr` and `to_dict`: what is logged or stored holds no prompt.
    """

    request_id: str
    decision: RequestDecision
    reason: Reason
    detail: str = ""
    strategy: str = ""
    num_prompt_tokens: int = 0
    num_reused_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_computed_tokens: int = 0
    num_stored_tokens: int = 0
    num_prefix_tokens: int = 0
    num_probe_tokens: int = 0
    ttft_s: float = -1.0
    load_s: float = 0.0
    select_s: float = 0.0
    recompute_s: float = 0.0
    loaded_bytes: int = 0
    chunks: tuple[ChunkReport, ...] = field(default=())
    pieces: tuple[PromptPiece, ...] = field(default=(), compare=False, repr=False)

    @property
    def why(self) -> str:
        """One sentence for a person, also when nothing was reused."""
        return f"{self.reason.sentence} {self.detail}".rstrip()

    @property
    def reuse_ratio(self) -> float:
        """Share of prompt tokens whose KV was taken over, in [0, 1]."""
        return self.num_reused_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    def decisions(self) -> Counter[str]:
        return Counter(chunk.decision.value for chunk in self.chunks)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready data without the prompt's text; `from_dict` reverses it."""
        data = {**_fields_of(self), "chunks": tuple(map(_fields_of, self.chunks))}
        del data["pieces"]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ReuseReport:
        values = dict(data)
        values["decision"] = RequestDecision(values["decision"])
        values["reason"] = Reason(values["reason"])
        values["chunks"] = tuple(
            ChunkReport(
                **{
                    **chunk,
                    "decision": ChunkDecision(chunk["decision"]),
                    "reason": Reason(chunk["reason"]),
                }
            )
            for chunk in values.get("chunks", ())
        )
        return cls(**values)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from cachecraft_rag.report_html import report_html

        return report_html(self)

    def __rich__(self) -> RenderableType:
        """What `rich.print` shows."""
        from cachecraft_rag.report_text import report_text

        return report_text(self)


def _fields_of(record: ChunkReport | ReuseReport) -> dict[str, Any]:
    # `asdict` copies every value of every chunk, which is most of the time that a report takes.
    return {each.name: getattr(record, each.name) for each in fields(record)}
