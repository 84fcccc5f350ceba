"""Prompts of mixed shapes, and how to ask a backend about them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cachecraft_rag.chunks import Span, chunk_key, prefix_hashes
from cachecraft_rag.engine.api import SamplingOptions
from cachecraft_rag.engine.backend import Backend, BackendRequest
from cachecraft_rag.engine.router import MAX_SEPARATOR_TOKENS
from cachecraft_rag.events import Reason, ReuseReport
from cachecraft_rag.vllm_connector.messages import PARAMS_KEY, ChunkRef, RequestSpec

_ids = itertools.count()


@dataclass(frozen=True)
class Prompt:
    """Token ids and the spans of the chunks among them."""

    token_ids: tuple[int, ...]
    spans: tuple[Span, ...]

    def refs(self, tenant: str) -> tuple[ChunkRef, ...]:
        hashes = prefix_hashes(tenant, self.token_ids, [span.start for span in self.spans])
        return tuple(
            ChunkRef(
                span,
                chunk_key(tenant, self.token_ids[span.start : span.end]),
                prefix_hash,
                separator=self.separator(index),
            )
            for index, (span, prefix_hash) in enumerate(zip(self.spans, hashes, strict=True))
        )

    def separator(self, index: int) -> tuple[int, ...]:
        """The text between a chunk and the next, if it is short enough to travel with the chunk."""
        if index + 1 == len(self.spans):
            return ()
        between = self.token_ids[self.spans[index].end : self.spans[index + 1].start]
        return between if len(between) <= MAX_SEPARATOR_TOKENS else ()

    def extended(self, token_ids: Sequence[int]) -> Prompt:
        return Prompt((*self.token_ids, *token_ids), self.spans)

    def moved(self, token_ids: Sequence[int]) -> Prompt:
        """The same chunks behind other tokens, at other positions."""
        spans = tuple(span.shift(len(token_ids)) for span in self.spans)
        return Prompt((*token_ids, *self.token_ids), spans)


@dataclass(frozen=True)
class Answer:
    token_ids: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]
    report: ReuseReport

    @property
    def num_context_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.report.chunks)


def join(parts: Sequence[tuple[Sequence[int], bool]]) -> Prompt:
    """A prompt from (token ids, is a chunk) parts; empty parts vanish."""
    token_ids: list[int] = []
    spans = []
    for ids, is_chunk in parts:
        if is_chunk and ids:
            spans.append(Span(len(token_ids), len(token_ids) + len(ids)))
        token_ids.extend(ids)
    return Prompt(tuple(token_ids), tuple(spans))


def mixed_prompts(
    count: int, vocab_size: int, max_tokens: int, seed: int, most_tokens: int | None = None
) -> list[Prompt]:
    """Prompts over one pool of chunks: any order, repeats, no lead, no separators, no question.

    With `most_tokens` only every twelfth prompt is longer than that: large models take their time.
    """
    rng = random.Random(seed)

    def words(low: int, high: int) -> list[int]:
        return [rng.randrange(10, vocab_size) for _ in range(rng.randint(low, high))]

    pool = [words(8, 40) for _ in range(8)] + [words(60, 220) for _ in range(12)]
    prompts = []
    while len(prompts) < count:
        lead = words(1, 70) if rng.random() < 0.8 else []
        parts: list[tuple[Sequence[int], bool]] = [(lead, False)]
        for _ in range(rng.randint(1, 7)):
            parts.append((rng.choice(pool), True))
            separator = rng.choice([[], [3, 4], [3], [5, 6, 7, 8], words(5, 9)])
            parts.append((separator, False))
        parts.append((words(1, 60) if rng.random() < 0.9 else [], False))
        prompt = join(parts)
        low, high = 16, max_tokens
        if most_tokens is not None:
            low, high = (16, most_tokens) if len(prompts) % 12 else (600, max_tokens)
        if low <= len(prompt.token_ids) <= high:
            prompts.append(prompt)
    return prompts


async def ask(
    backend: Backend,
    prompt: Prompt,
    *,
    tenant: str = "t",
    salt: str | None = None,
    strategy: str = "cachecraft",
    full: bool = False,
    exact_only: bool = False,
    recompute_ratio: float | None = None,
    store: bool = True,
    max_tokens: int = 6,
    logprobs: int | None = 5,
) -> Answer:
    """One greedy request through the backend; `salt` None reads nothing from vLLM's prefix cache."""
    name = f"q{next(_ids)}"
    spec = RequestSpec(
        request_id=name,
        tenant=tenant,
        chunks=prompt.refs(tenant),
        strategy=strategy,
        alpha=0.3,
        recompute_ratio=recompute_ratio,
        exact_only=exact_only,
        store=store,
        full_reason=Reason.REUSE_OFF if full else None,
    )
    request = BackendRequest(
        request_id=name,
        token_ids=prompt.token_ids,
        sampling=SamplingOptions(max_tokens=max_tokens, logprobs=logprobs, ignore_eos=True),
        cache_salt=salt or f"fresh-{name}",
        params=spec.to_params(),
    )
    token_ids: list[int] = []
    steps: list[Mapping[int, float]] = []
    params: Mapping[str, object] | None = None
    async for output in backend.generate(request):
        token_ids.extend(output.token_ids)
        steps.extend(output.logprobs)
        params = output.kv_transfer_params or params
    report = (params or {}).get(PARAMS_KEY) or await fetch_report(backend, name)
    return Answer(tuple(token_ids), tuple(steps), ReuseReport.from_dict(report))  # type: ignore[arg-type]


async def fetch_report(backend: Backend, name: str) -> Mapping[str, object]:
    for _ in range(200):
        found = (await backend.collective_rpc("cachecraft_take_report", name))[0]
        if found is not None:
            return dict(found)
    raise AssertionError(f"the report of {name} never came")


def logprob_gap(left: Answer, right: Answer) -> float:
    """Largest difference of log-probabilities over the common beginning of two greedy answers.

    Infinite where a step has no candidate in common or a value is not a number: `max` would pass over both.
    """
    gap = 0.0
    pairs = zip(left.token_ids, right.token_ids, left.logprobs, right.logprobs, strict=True)
    for left_token, right_token, left_step, right_step in pairs:
        common = left_step.keys() & right_step.keys()
        differences = [abs(left_step[token] - right_step[token]) for token in common]
        if not differences or any(map(math.isnan, differences)):
            return math.inf
        gap = max(gap, *differences)
        if left_token != right_token:
            break
    return gap


def tie_gap(left: Answer, right: Answer) -> float | None:
    """None where two answers have the same tokens, else how close the two best candidates were
    where they first differ; infinite where a token is not the best of its own candidates."""
    for index, (a, b) in enumerate(zip(left.token_ids, right.token_ids, strict=True)):
        if a != b:
            if not (_is_best(left, index) and _is_best(right, index)):
                return math.inf
            best, second = sorted(left.logprobs[index].values(), reverse=True)[:2]
            return best - second
    return None


def describe_difference(left: Answer, right: Answer) -> str:
    """Where two answers first differ, for the message of a test that fails."""
    for index, (a, b) in enumerate(zip(left.token_ids, right.token_ids, strict=True)):
        if a != b:
            return f"step {index}: {a} of {left.logprobs[index]}, {b} of {right.logprobs[index]}"
    return "the same tokens"


def _is_best(answer: Answer, index: int) -> bool:
    step = answer.logprobs[index]
    return step.get(answer.token_ids[index]) == max(step.values())
