"""What crosses from the driver to the scheduler side, and back: plain data only.

vLLM hands `kv_transfer_params` through msgpack between processes, where tuples become lists; so the
records below are written to and rebuilt from dictionaries of lists, numbers and strings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cachecraft_rag.chunks import SHARED_TENANT, ChunkKey, DocumentRef, Span
from cachecraft_rag.events import Reason
from cachecraft_rag.planner.limits import PlanLimits

PARAMS_KEY = "cachecraft"
"""Key of a `RequestSpec` in `kv_transfer_params`, both ways."""
CONTROL_KEY = "cachecraft_control"
"""Key of a `ControlMessage` in the `kv_transfer_params` of a pre-aborted request."""


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """Where one chunk stands in the prompt and which KV would fit it.

    Attributes:
        separator: ids of the text between this chunk and the next, where it is short; empty for the
            last chunk. Its KV travels with the chunk's: a prompt of 30 chunks has 30 lone tokens
            between them, and computing those reads the whole context 30 times.
        refusal: why the driver wants this chunk computed, None if it does not; it is stored anew.
        is_shared: `key` and `prefix_hash` are those of the shared tenant, whose KV everybody may read.
    """

    span: Span
    key: ChunkKey
    prefix_hash: str
    document: DocumentRef | None = None
    separator: tuple[int, ...] = ()
    refusal: Reason | None = None
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """All the scheduler side is told about a request.

    Attributes:
        request_id: ours, not vLLM's; reports are filed under it.
        tenant: salt of keys and index; no KV crosses it, but for shared chunks, which it may read.
        chunks: in prompt order; empty when nothing was matched.
        strategy: name of the planning strategy; ignored when `full_reason` is set.
        alpha: Cache-Craft eq. 12.
        share: share of a reused chunk to recompute, for strategies without a formula.
        recompute_ratio: fixed share of each reused chunk to recompute, overriding `alpha`.
        granularity: length of the runs in which tokens are selected.
        exact_only: reuse only behind an identical prefix.
        store: whether chunks of this request may be stored.
        store_from: index of the first chunk that may; those before it are context only.
        full_reason: why the driver asks for full compute, None if it does not.
        limits: what the plan may leave to compute, None where the caller named the strategy.
    """

    request_id: str
    tenant: str
    chunks: tuple[ChunkRef, ...] = ()
    strategy: str = ""
    alpha: float = 0.0
    share: float = 0.0
    recompute_ratio: float | None = None
    granularity: int = 1
    exact_only: bool = False
    store: bool = True
    store_from: int = 0
    full_reason: Reason | None = None
    full_detail: str = ""
    limits: PlanLimits | None = None

    def tenant_of(self, ref: ChunkRef) -> str:
        """In whose part of the store the KV of a chunk is looked up."""
        return SHARED_TENANT if ref.is_shared else self.tenant

    def may_store(self, ref: ChunkRef) -> bool:
        """Whether the KV that is computed of a chunk may be stored. What this tenant's text stood before
        does not become another's: only requests of the shared tenant itself write to it."""
        return self.store and self.tenant_of(ref) == self.tenant

    def to_params(self) -> dict[str, Any]:
        """Value of `SamplingParams.extra_args["kv_transfer_params"]`."""
        return {
            PARAMS_KEY: {
                "request_id": self.request_id,
                "tenant": self.tenant,
                "chunks": [_chunk_to_list(chunk) for chunk in self.chunks],
                "strategy": self.strategy,
                "alpha": self.alpha,
                "share": self.share,
                "recompute_ratio": self.recompute_ratio,
                "granularity": self.granularity,
                "exact_only": self.exact_only,
                "store": self.store,
                "store_from": self.store_from,
                "full_reason": self.full_reason.value if self.full_reason else None,
                "full_detail": self.full_detail,
                "limits": asdict(self.limits) if self.limits else None,
            }
        }

    @classmethod
    def from_params(cls, params: Mapping[str, Any] | None) -> RequestSpec | None:
        """The spec inside `kv_transfer_params`, None where there is none."""
        data = (params or {}).get(PARAMS_KEY)
        if data is None:
            return None
        fields = dict(data)
        fields["chunks"] = tuple(_chunk_from_list(item) for item in fields["chunks"])
        if fields["full_reason"] is not None:
            fields["full_reason"] = Reason(fields["full_reason"])
        if fields["limits"] is not None:
            fields["limits"] = PlanLimits(**fields["limits"])
        return cls(**fields)


def _chunk_to_list(chunk: ChunkRef) -> list[Any]:
    document = chunk.document
    where = [document.doc_id, document.version] if document else None
    span = chunk.span
    refusal = chunk.refusal.value if chunk.refusal else None
    return [
        span.start,
        span.end,
        chunk.key,
        chunk.prefix_hash,
        where,
        list(chunk.separator),
        refusal,
        chunk.is_shared,
    ]


def _chunk_from_list(item: list[Any]) -> ChunkRef:
    start, end, key, prefix_hash, where, separator, refusal, is_shared = item
    return ChunkRef(
        span=Span(start, end),
        key=ChunkKey(key),
        prefix_hash=prefix_hash,
        document=DocumentRef(*where) if where else None,
        separator=tuple(separator),
        refusal=Reason(refusal) if refusal else None,
        is_shared=is_shared,
    )


@dataclass(frozen=True, slots=True)
class ControlMessage:
    """A command to the scheduler side.

    `action` and its arguments: `invalidate` (doc_id, version, tenant), `replace` (doc_id, version, tenant,
    keys), `invalidate_chunks` (tenant, keys), `purge` (tenant), `drop_chunks` (tenant, keys; in this
    process and the cold tiers only), `prefetch` (tenant, keys), `worth_computing` (tenant, chunks; which of
    them to warm), `flush` (), `stats` (), `check` (repair), `await` (control_id of a command that takes
    longer).
    The answer is a plain dictionary, filed under `control_id` in the workers.
    """

    control_id: str
    action: str
    arguments: Mapping[str, Any]

    def to_params(self) -> dict[str, Any]:
        return {
            CONTROL_KEY: {
                "control_id": self.control_id,
                "action": self.action,
                "arguments": dict(self.arguments),
            }
        }

    @classmethod
    def from_params(cls, params: Mapping[str, Any] | None) -> ControlMessage | None:
        data = (params or {}).get(CONTROL_KEY)
        return cls(**data) if data is not None else None
