"""One sampled request asked again in other ways, to see what reuse did to its answer.

All runs are greedy, leave nothing in the store, and keep apart from vLLM's prefix cache.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cachecraft_rag.chunks import ChunkKey, Span
from cachecraft_rag.engine.answer_reader import AsWritten
from cachecraft_rag.engine.api import Completion, SamplingOptions
from cachecraft_rag.engine.calls import Prepared
from cachecraft_rag.engine.namespace import tenant_cache_salt
from cachecraft_rag.engine.quality import first_token_kl
from cachecraft_rag.events import ChunkDecision, Reason
from cachecraft_rag.vllm_connector.messages import ChunkRef, RequestSpec

MAX_SHADOW_TOKENS = 64
"""Longest answer compared: bounds the work of a sample."""
NUM_LOGPROBS = 20
"""vLLM's own default limit."""

Ask = Callable[[Prepared], Awaitable[Completion]]
Control = Callable[..., Awaitable[Any]]


@dataclass(slots=True)
class Sample:
    """A request to be asked again, and the runs of it that are done: one that is interrupted by
    traffic goes on where it was."""

    prepared: Prepared
    runs: dict[str, Completion] = field(default_factory=dict)


class Shadow:
    """Asks the runs of samples; `ask` answers a prepared call without counting it as traffic."""

    def __init__(self, ask: Ask, control: Control) -> None:
        self._ask = ask
        self._control = control

    async def full(self, sample: Sample) -> Completion:
        """Computed in full."""
        spec = replace(_bare(sample.prepared.spec), full_reason=Reason.REUSE_OFF)
        return await self._run(sample, "full", spec)

    async def reuse(self, sample: Sample) -> Completion:
        """With the budget of the request itself, even where it was answered in full."""
        return await self._run(sample, "reuse", _bare(sample.prepared.spec))

    async def kl_without(self, sample: Sample, index: int) -> float:
        """First-token KL from full compute with the chunk at `index` computed, the others reused."""
        spec = _bare(sample.prepared.spec)
        refs = (*spec.chunks[:index], _refused(spec.chunks[index]), *spec.chunks[index + 1 :])
        done = await self._run(sample, f"without {index}", replace(spec, chunks=refs), max_tokens=1)
        return completion_kl(await self.full(sample), done)

    async def kl_of_fresh_copies(self, sample: Sample) -> float:
        """First-token KL from full compute with every chunk reused from a copy made now, in a tenant
        of its own: each chunk cached alone behind the text that stands before the first one."""
        tenant = f"feedback-{sample.prepared.spec.request_id}"
        spec = _bare(sample.prepared.spec)
        distinct = {ref.key: ref for ref in spec.chunks if ref.refusal is None}
        for ref in distinct.values():
            await self._copy(sample, tenant, ref)
        refs = tuple(replace(ref, document=None, is_shared=False) for ref in spec.chunks)
        done = await self._run(sample, "fresh", replace(spec, tenant=tenant, chunks=refs), max_tokens=1)
        await self.drop(tenant, list(distinct))
        return completion_kl(await self.full(sample), done)

    async def drop(self, tenant: str, keys: list[ChunkKey]) -> None:
        """Drop the stored records of chunks."""
        await self._control("drop_chunks", tenant=tenant, keys=keys)

    async def _copy(self, sample: Sample, tenant: str, ref: ChunkRef) -> None:
        prepared = sample.prepared
        first, ids = prepared.spec.chunks[0], prepared.layout.token_ids
        head = ids[: first.span.start]
        span = Span(len(head), len(head) + len(ref.span))
        alone = ChunkRef(span, ref.key, first.prefix_hash)
        spec = replace(_bare(prepared.spec), tenant=tenant, chunks=(alone,), exact_only=True, store=True)
        text = (*head, *ids[ref.span.start : ref.span.end])
        await self._run(sample, f"copy {ref.key}", spec, token_ids=text, max_tokens=1)

    async def _run(
        self,
        sample: Sample,
        name: str,
        spec: RequestSpec,
        *,
        max_tokens: int = MAX_SHADOW_TOKENS,
        token_ids: tuple[int, ...] | None = None,
    ) -> Completion:
        if name not in sample.runs:
            prepared = sample.prepared
            spec = replace(spec, request_id=uuid.uuid4().hex)
            ids = prepared.layout.token_ids if token_ids is None else token_ids
            sampling = _greedy(prepared.request.sampling, max_tokens)
            sample.runs[name] = await self._ask(_prepared(prepared, spec, ids, sampling))
        return sample.runs[name]


def reused_chunks(completion: Completion) -> Mapping[int, ChunkKey]:
    """Index among the chunks of the prompt → key, of those whose stored KV was used."""
    in_prompt = [chunk for chunk in completion.report.chunks if chunk.reason is not Reason.NOT_IN_PROMPT]
    return {
        index: chunk.chunk_key
        for index, chunk in enumerate(in_prompt)
        if chunk.decision is not ChunkDecision.COMPUTED and chunk.reason is not Reason.PREFIX_CACHE
    }


def completion_kl(full: Completion, other: Completion) -> float:
    """First-token KL(full || other) of two runs of one sample, in nats."""
    if not full.logprobs or not other.logprobs:  # stopped before the first token
        return 0.0
    return first_token_kl(full.logprobs[0], other.logprobs[0])


def _bare(spec: RequestSpec) -> RequestSpec:
    """The same prompt and budget, without what the router said of it."""
    return replace(spec, store=False, full_reason=None, full_detail="", limits=None)


def _refused(ref: ChunkRef) -> ChunkRef:
    return replace(ref, refusal=Reason.QUARANTINED)


def _greedy(sampling: SamplingOptions, max_tokens: int) -> SamplingOptions:
    max_tokens = min(max_tokens, sampling.max_tokens)
    return replace(
        sampling,
        max_tokens=max_tokens,
        min_tokens=min(sampling.min_tokens, max_tokens),
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        logprobs=NUM_LOGPROBS,
    )


def _prepared(
    prepared: Prepared, spec: RequestSpec, token_ids: tuple[int, ...], sampling: SamplingOptions
) -> Prepared:
    changed = prepared.with_spec(spec)
    salt = tenant_cache_salt(spec.tenant, spec.request_id)
    request = replace(changed.request, token_ids=token_ids, sampling=sampling, cache_salt=salt)
    # As written, calls of tools too: what is compared is all that the model said.
    return replace(changed, request=request, absent=(), reader=AsWritten())
