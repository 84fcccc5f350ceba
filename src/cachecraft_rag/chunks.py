"""Shared nouns: what a chunk is, where it stands in a prompt, and what is known of its stored KV.

All spans are half-open token ranges. This module loads nothing heavier than `hashlib`.
"""

from __future__ import annotations

import enum
import hashlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, NewType

from cachecraft_rag.errors import InvalidRequestError, PlanError

if TYPE_CHECKING:
    import numpy as np

ChunkKey = NewType("ChunkKey", str)
"""Identity of a chunk's KV: a hash of its token ids within one `namespace`, as 32 hex digits."""

DIGEST_BYTES = 16

_start, _end = attrgetter("start"), attrgetter("end")

SHARED_TENANT = "cachecraft:shared"
"""Tenant of public documents: its chunks are stored once and may be read by every tenant.

Only `warm` writes to it, so that no KV in it was computed behind a tenant's private text.
"""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A half-open range of token positions, `[start, end)`."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise PlanError(f"span [{self.start}, {self.end}) is not a range: need 0 <= start <= end")

    def __len__(self) -> int:
        return self.end - self.start

    def positions(self) -> range:
        return range(self.start, self.end)

    def clip(self, start: int, end: int) -> Span:
        """The part of this span inside `[start, end)`; empty spans collapse onto its edge."""
        low = min(max(self.start, start), end)
        return Span(low, max(low, min(self.end, end)))

    def shift(self, offset: int) -> Span:
        return Span(self.start + offset, self.end + offset)


def parts_within(spans: Sequence[Span], limits: Span) -> tuple[Span, ...]:
    """The non-empty parts of `spans`, which ascend and are disjoint, inside `limits`.

    O(log n) and what is found: a plan of single tokens has a thousand spans, and each chunk asks for its own.
    """
    first = bisect_right(spans, limits.start, key=_end)
    last = bisect_left(spans, limits.end, key=_start)
    parts = (_clipped(span, limits) for span in spans[first:last])
    return tuple(part for part in parts if part.start < part.end)


def _clipped(span: Span, limits: Span) -> Span:
    is_inside = limits.start <= span.start and span.end <= limits.end
    return span if is_inside else span.clip(limits.start, limits.end)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of retrieved text with the identity of the document it came from.

    `doc_id` and `version` never take part in the KV key: they drive invalidation, reports and
    display. Text that changed is another key by construction.

    Attributes:
        is_shared: public: its KV is looked up in `SHARED_TENANT`, whoever asks. False keeps it the
            tenant's own, also where a public document has the same text.

    Raises:
        InvalidRequestError: `text` is not a non-empty string.
    """

    text: str
    doc_id: str | None = None
    version: str | None = None
    is_shared: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text:
            raise InvalidRequestError(
                f"Chunk.text is {self.text!r} (doc_id={self.doc_id!r}): a chunk needs a non-empty "
                "string; drop empty chunks before passing them on"
            )
        if self.version is not None and self.doc_id is None:
            raise InvalidRequestError(
                f"Chunk.version is {self.version!r} without doc_id: a version belongs to a document"
            )


class SegmentKind(enum.StrEnum):
    TEXT = "text"
    """Template text, system prompt, history, question: everything that is not a known chunk."""
    CHUNK = "chunk"


@dataclass(frozen=True, slots=True)
class Segment:
    """One piece of a prompt, tokenised on its own.

    `prefix_hash` fingerprints all tokens before the segment (`chain_hash`): two segments with equal
    keys and equal prefix hashes have exactly the same KV.
    """

    span: Span
    kind: SegmentKind
    text: str
    chunk: Chunk | None = None
    key: ChunkKey | None = None
    prefix_hash: str = ""


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """A prompt as token ids plus the segments that tile them, in order and without gaps.

    Raises:
        PlanError: the segments do not tile the token ids.
    """

    token_ids: tuple[int, ...]
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        position = 0
        for segment in self.segments:
            if segment.span.start != position:
                raise PlanError(f"segment {segment.span} does not start at {position}")
            position = segment.span.end
        if position != len(self.token_ids):
            raise PlanError(f"segments cover {position} of {len(self.token_ids)} tokens")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)

    @property
    def chunks(self) -> tuple[Segment, ...]:
        return tuple(s for s in self.segments if s.kind is SegmentKind.CHUNK)


def token_bytes(token_ids: Iterable[int]) -> bytes:
    """Token ids as little-endian int32 bytes, the form in which they are hashed."""
    return array("i", token_ids).tobytes()


def chunk_key(namespace: str, token_ids: Sequence[int]) -> ChunkKey:
    """Key of a chunk's KV: `namespace` names model, tokenizer, dtype, rope and tenant."""
    digest = hashlib.blake2b(namespace.encode(), digest_size=DIGEST_BYTES)
    digest.update(token_bytes(token_ids))
    return ChunkKey(digest.hexdigest())


def prefix_hashes(namespace: str, token_ids: Sequence[int], ends: Sequence[int]) -> Iterator[str]:
    """Hash of `token_ids[:end]` for each of the ascending `ends`, in one pass over the tokens."""
    digest = hashlib.blake2b(namespace.encode(), digest_size=DIGEST_BYTES)
    position = 0
    for end in ends:
        digest.update(token_bytes(token_ids[position:end]))
        position = end
        yield digest.copy().hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class AttentionProfile:
    """What a chunk's tokens attended to when its KV was computed.

    Sums of softmax attention weights, averaged over heads and over the profiled layers. The system
    prompt and all other text that is no chunk take part in the softmax but not in the sums.

    Attributes:
        inter_mean: Cache-Craft eq. 9-10, a: sum_j inter(C_i, C_j) / (|C_i| |C_j|).
        intra_mean: Cache-Craft eq. 9-10, b: intra(C_i) / |C_i|^2.
        inter_by_prefix: inter(C_i, C_j) of eq. 3 for each chunk of the record's `prefix_chunks`.
        token_scores: float32 (num_tokens,), sum_j inter(t_k, C_j), the summand of eq. 14.
    """

    inter_mean: float
    intra_mean: float
    inter_by_prefix: tuple[float, ...]
    token_scores: np.ndarray


@dataclass(frozen=True, slots=True)
class DocumentRef:
    """A document (and version) that contains a chunk, within one tenant."""

    doc_id: str
    version: str | None = None


@dataclass(frozen=True, slots=True)
class RecordMeta:
    """What the scheduler side knows of one stored chunk variant; the KV itself is in the workers.

    Attributes:
        record_id: unique within one engine.
        start: position of the chunk's first token when its KV was computed.
        size_bytes: bytes held by all ranks together, the profile and the record's books included.
        prefix_hash: `prefix_hashes` of all tokens before the chunk when it was computed.
        prefix_chunks: keys of the chunks before it, in prompt order (the paper's S_old).
        prefix_is_exact: every token before it had exact KV, so this KV is exact behind that prefix.
        separator: ids of the short text that followed, whose KV is stored behind the chunk's own; see
            `vllm_connector.messages.ChunkRef`.
        document: where the text came from when it was computed.
        generation: the document's generation at planning time; a later one refuses the insert.
    """

    record_id: int
    key: ChunkKey
    tenant: str
    num_tokens: int
    start: int
    size_bytes: int
    prefix_hash: str
    prefix_chunks: tuple[ChunkKey, ...] = ()
    prefix_is_exact: bool = True
    separator: tuple[int, ...] = ()
    document: DocumentRef | None = None
    generation: int = 0
    profile: AttentionProfile | None = None
