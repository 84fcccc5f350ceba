"""Every step of one reused request that is ours and runs on the CPU, outside vLLM and the model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import repeat
from types import SimpleNamespace

import numpy as np
from benchmarks.scale_bench.driver import TENANT
from benchmarks.scale_bench.measuring import time_each
from benchmarks.scale_bench.texts import SEED, chunk_of, prompt_of, text_of
from benchmarks.scale_bench.threads import NAMESPACE, WordlessTokenizer
from benchmarks.store_bench.made import meta_of, profile

from cachecraft_rag.chunks import Chunk, Span
from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.engine.calls import Call
from cachecraft_rag.engine.options import CallOptions
from cachecraft_rag.engine.router import make_spec, route
from cachecraft_rag.planner.build import build_plan
from cachecraft_rag.planner.plan import PlanRequest, ReusePlan
from cachecraft_rag.planner.selection import positions_of
from cachecraft_rag.segments.known import KnownChunks
from cachecraft_rag.segments.layout import build_layout
from cachecraft_rag.store.host import HostChunkStore
from cachecraft_rag.vllm_connector.messages import RequestSpec
from cachecraft_rag.vllm_connector.orders import capture_targets, make_job
from cachecraft_rag.vllm_connector.recompute import take_runs
from cachecraft_rag.vllm_connector.reports import build_report
from cachecraft_rag.vllm_connector.request_state import PendingCapture, RequestState
from cachecraft_rag.vllm_connector.steps import JobFacts, slots_at

NUM_CHUNKS = 20
CHUNK_CHARS = 960
NUM_ABSENT = 5
BLOCK_SIZE = 16
STEP_TOKENS = 2_048
SHARE = 0.15


@dataclass(frozen=True, slots=True)
class StepRow:
    """Times of one step. Where it runs: the driver, the scheduler's thread, or each worker."""

    where: str
    step: str
    p50_us: float
    p99_us: float
    p99_cpu_us: float
    max_us: float


def measure_request_path(num_requests: int) -> list[StepRow]:
    return [
        StepRow(where, name, **asdict(time_each(repeat(call, num_requests)))) for where, name, call in steps()
    ]


def steps() -> Iterator[tuple[str, str, Callable[[], object]]]:
    """Where, what, and the call, in the order of a request."""
    config, options, dice = CacheCraftConfig(), CallOptions(), random.Random(SEED)
    known, tokenizer = KnownChunks(NUM_CHUNKS), WordlessTokenizer()
    chunks = tuple(Chunk(text_of(n)[:CHUNK_CHARS], f"doc-{n}") for n in range(NUM_CHUNKS))
    known.add(TENANT, chunks)
    prompt = prompt_of(list(chunks), dice)
    call, matches = Call(prompt.text, chunks, options), known.find(TENANT, prompt, chunks)
    yield "driver", "find chunks, passed with the call", lambda: known.find(TENANT, prompt, chunks)

    def lay_out() -> object:
        return build_layout(prompt.text, matches, tokenizer, NAMESPACE)  # type: ignore[arg-type]

    yield "driver", "lay out", lay_out
    layout = build_layout(prompt.text, matches, tokenizer, NAMESPACE)  # type: ignore[arg-type]
    more = Call(prompt.text, (*chunks, *map(chunk_of, range(1_000, 1_000 + NUM_ABSENT))), options)
    yield "driver", "route", lambda: route(call, layout, 1, config)
    yield "driver", "route, 5 passed chunks absent", lambda: route(more, layout, 1, config)
    spec = make_spec("request", TENANT, layout, options, replace(config, recompute_ratio=SHARE), None)

    def make_params() -> object:
        return make_spec("request", TENANT, layout, options, config, None).to_params()

    yield "driver", "make and write the spec", make_params
    params = spec.to_params()
    yield "scheduler", "read the spec", lambda: RequestSpec.from_params(params)
    store = _store_of(spec)
    for strategy, granularity in (("focus", 1), ("cachecraft", 1), ("cachecraft", 16)):
        request = _plan_request(spec, layout.num_tokens, strategy, granularity)
        name = f"look up and plan, {strategy}, runs of {granularity}"
        yield "scheduler", name, lambda request=request: _plan(store, request)  # type: ignore[misc]
    yield from _steps_after_plan(spec, store, layout.token_ids)


def _steps_after_plan(
    spec: RequestSpec, store: HostChunkStore, token_ids: tuple[int, ...]
) -> Iterator[tuple[str, str, Callable[[], object]]]:
    plan = _plan(store, _plan_request(spec, len(token_ids), "focus", 1))
    assert plan.live is not None
    live = plan.live
    vllm_request = SimpleNamespace(
        request_id="0", num_prompt_tokens=len(token_ids), prompt_token_ids=list(token_ids)
    )
    state = RequestState(vllm_request, spec, plan, ran_job=True, first_local_tokens=0)
    block_ids = list(range(-(-len(token_ids) // BLOCK_SIZE)))
    yield "scheduler", "make the load job", lambda: make_job(state, block_ids, BLOCK_SIZE)
    yield "scheduler", "capture targets", lambda: _targets(state, spec, block_ids)
    measured = np.random.default_rng(SEED).random(live.num_candidates)
    yield "worker", "choose tokens", lambda: live.choose(measured, live.num_tokens)
    chosen = live.choose(measured, live.num_tokens)
    yield "worker", "cut the pass, its positions and slots", lambda: _cut(chosen, np.array(block_ids))
    state.facts = JobFacts(0.0, 0.0, 0, chosen=chosen)
    yield "scheduler", "resolve and report", lambda: build_report(state).to_dict()


def _store_of(spec: RequestSpec) -> HostChunkStore:
    """Every chunk of the request, stored behind other texts."""
    store = HostChunkStore(NUM_CHUNKS, 1)
    for number, ref in enumerate(spec.chunks):
        meta = replace(
            meta_of(number, record_id=store.next_record_id(TENANT)), key=ref.key, num_tokens=len(ref.span)
        )
        assert store.reserve(meta).accepted
        store.commit(meta.record_id, profile(len(ref.span)))
    return store


def _plan_request(spec: RequestSpec, num_tokens: int, strategy: str, granularity: int) -> PlanRequest:
    return PlanRequest(
        num_tokens=num_tokens,
        chunks=spec.chunks,
        strategy=strategy,
        alpha=spec.alpha,
        recompute_ratio=SHARE,
        granularity=granularity,
    )


def _plan(store: HostChunkStore, request: PlanRequest) -> ReusePlan:
    return build_plan(request, lambda key: store.variants(TENANT, key))


def _targets(state: RequestState, spec: RequestSpec, block_ids: list[int]) -> object:
    state.pending = [PendingCapture(number, ref.span) for number, ref in enumerate(spec.chunks)]
    return capture_targets(state, Span(0, state.num_prompt_tokens), block_ids, BLOCK_SIZE)


def _cut(chosen: tuple[Span, ...], block_ids: np.ndarray) -> None:
    while chosen:
        piece, chosen = take_runs(chosen, STEP_TOKENS, STEP_TOKENS)
        slots_at(block_ids, BLOCK_SIZE, positions_of(piece))
