"""Feedback on a scripted engine: which requests are sampled, when the work runs, what it leads to."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from cachecraft_rag.chunks import SHARED_TENANT, Chunk, ChunkKey, PromptLayout, Segment, SegmentKind, Span
from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.engine.api import Completion, SamplingOptions
from cachecraft_rag.engine.backend import BackendRequest
from cachecraft_rag.engine.calls import Call, Prepared
from cachecraft_rag.engine.feedback import MAX_WAITING_SAMPLES, Feedback
from cachecraft_rag.engine.idle import IdleWork
from cachecraft_rag.engine.options import CallOptions
from cachecraft_rag.events import ChunkDecision, ChunkReport, Reason, RequestDecision, ReuseReport
from cachecraft_rag.vllm_connector.messages import ChunkRef, RequestSpec

HEAD, SIZE, TENANT = 4, 10, "t"
GOOD, BAD = {1: math.log(0.9), 2: math.log(0.05)}, {1: math.log(0.05), 2: math.log(0.9)}
KEYS = tuple(ChunkKey(name) for name in "abcd")
SHARED_KEY = ChunkKey("shared")


def prepared_for(keys: tuple[ChunkKey, ...] = KEYS[:3], **options: Any) -> Prepared:
    spans = [Span(HEAD + SIZE * i, HEAD + SIZE * (i + 1)) for i in range(len(keys))]
    chunk = Chunk("text")
    texts = [Segment(Span(0, HEAD), SegmentKind.TEXT, "head")]
    layout = PromptLayout(
        tuple(range(spans[-1].end)),
        (*texts, *(Segment(s, SegmentKind.CHUNK, "c", chunk, k) for s, k in zip(spans, keys, strict=True))),
    )
    refs = tuple(
        ChunkRef(span, key, f"prefix {i}", is_shared=key == SHARED_KEY)
        for i, (span, key) in enumerate(zip(spans, keys, strict=True))
    )
    spec = RequestSpec("request", TENANT, refs, "cachecraft", alpha=0.3, share=0.2, recompute_ratio=0.5)
    sampling = SamplingOptions(max_tokens=500, temperature=0.7)
    request = BackendRequest("request", layout.token_ids, sampling, "salt", spec.to_params())
    return Prepared(Call("prompt", (), CallOptions(**options)), layout, spec, request, ())


def reported(spec: RequestSpec, *, num_stored: int = 0) -> ReuseReport:
    """What a scheduler side would say that has every chunk and was asked to follow `spec`."""

    def of(ref: ChunkRef) -> ChunkReport:
        is_computed = spec.full_reason is not None or ref.refusal is not None
        decision = ChunkDecision.COMPUTED if is_computed else ChunkDecision.REPAIRED
        reason = spec.full_reason or ref.refusal or Reason.OTHER_PREFIX
        return ChunkReport(ref.key, None, None, decision, reason, ref.span.start, SIZE)

    chunks = tuple(map(of, spec.chunks))
    is_reuse = any(chunk.decision is not ChunkDecision.COMPUTED for chunk in chunks)
    return ReuseReport(
        request_id=spec.request_id,
        decision=RequestDecision.REUSE if is_reuse else RequestDecision.FULL,
        reason=spec.full_reason or Reason.OTHER_PREFIX,
        num_stored_tokens=num_stored,
        chunks=chunks,
    )


def completed(spec: RequestSpec, *, is_good: bool = True, num_stored: int = 0) -> Completion:
    text, logprobs = ("the right answer", GOOD) if is_good else ("quite another text", BAD)
    return Completion(text, (1,), "stop", reported(spec, num_stored=num_stored), (), (logprobs,))


@dataclass
class Engine:
    """Answers shadow runs: wrong where the KV of a chunk in `corrupt` is reused in the real tenant, or
    of one in `delicate` anywhere."""

    corrupt: set[ChunkKey] = field(default_factory=set)
    delicate: set[ChunkKey] = field(default_factory=set)
    asked: list[Prepared] = field(default_factory=list)
    controls: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    gate: asyncio.Event | None = None
    num_free: int = 0  # runs that pass the gate
    fault: Exception | None = None

    async def ask(self, prepared: Prepared) -> Completion:
        self.asked.append(prepared)
        if self.gate is not None and len(self.asked) > self.num_free:
            await self.gate.wait()
        if self.fault is not None:
            raise self.fault
        spec = prepared.spec
        reused = {r.key for r in spec.chunks if r.refusal is None and spec.full_reason is None}
        wrong = self.delicate | (self.corrupt if spec.tenant == TENANT else set())
        return completed(spec, is_good=not reused & wrong)

    async def control(self, action: str, **arguments: Any) -> int:
        self.controls.append((action, arguments))
        return 1

    @property
    def dropped(self) -> list[ChunkKey]:
        """Keys dropped in the tenant of the requests."""
        return [k for _, args in self.controls if args["tenant"] == TENANT for k in args["keys"]]


@pytest.fixture
def engine() -> Engine:
    return Engine()


MakeFeedback = Callable[..., Feedback]


@pytest.fixture
def make(engine: Engine) -> MakeFeedback:
    def make(**settings: Any) -> Feedback:
        config = CacheCraftConfig(**{"feedback_share": 1.0, **settings})
        return Feedback(
            config, engine.ask, engine.control, engine.forgotten.append, IdleWork(idle_before_work_s=0.0)
        )

    return make


async def serve(feedback: Feedback, keys: tuple[ChunkKey, ...] = KEYS[:3], **options: Any) -> RequestSpec:
    """One request, steered, answered and offered; the spec it was sent with."""
    prepared = prepared_for(keys, **options)
    spec = feedback.steer(prepared.spec, prepared.call.options)
    with feedback._idle.traffic():
        num_stored = sum(SIZE for ref in spec.chunks if ref.refusal is not None)
        completion = completed(spec, num_stored=num_stored)
        feedback.offer(replace(prepared, spec=spec), completion)
    return spec


async def examine(feedback: Feedback, keys: tuple[ChunkKey, ...] = KEYS[:3], **options: Any) -> RequestSpec:
    spec = await serve(feedback, keys, **options)
    await feedback.drain()
    return spec


def refused(spec: RequestSpec) -> list[ChunkKey]:
    return [ref.key for ref in spec.chunks if ref.refusal is Reason.QUARANTINED]


async def test_share_samples_by_counting(make: MakeFeedback) -> None:
    """One in 1/share eligible requests is sampled, always the same ones."""
    feedback = make(feedback_share=0.25)
    sampled = []
    for _ in range(12):
        await examine(feedback)
        sampled.append(feedback.stats()["num_sampled"])
    assert sampled == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3]


@pytest.mark.parametrize(
    "options", [{"reuse": "naive"}, {"reuse": "exact"}, {"reuse": "off"}, {"store": False}]
)
async def test_only_the_routers_own_requests_are_sampled(make: MakeFeedback, options: Any) -> None:
    """Named strategies and requests that leave nothing behind are no samples."""
    feedback = make()
    await examine(feedback, **options)
    assert feedback.stats()["num_sampled"] == 0


async def test_one_switch_turns_all_of_it_off(make: MakeFeedback, engine: Engine) -> None:
    """With a share of 0 nothing is asked again, whatever the answers are."""
    engine.corrupt = set(KEYS)
    feedback = make(feedback_share=0.0)
    for _ in range(30):
        await examine(feedback)
    assert engine.asked == [] and feedback.stats()["breaker"] == "closed"


async def test_shadow_runs_leave_nothing_behind(make: MakeFeedback, engine: Engine) -> None:
    """Both runs are greedy and short, store nothing, and share no part of vLLM's prefix cache."""
    await examine(make())
    full, reuse = engine.asked
    assert full.spec.full_reason is Reason.REUSE_OFF and reuse.spec.full_reason is None
    assert not full.spec.store and not reuse.spec.store
    assert len({full.request.cache_salt, reuse.request.cache_salt, "salt"}) == 3
    assert {run.request.sampling.temperature for run in engine.asked} == {0.0}
    assert all(run.request.sampling.max_tokens <= 64 for run in engine.asked)


@pytest.mark.parametrize(("num_done", "expected"), [(0, "full full reuse"), (1, "full reuse reuse")])
async def test_traffic_interrupts_the_work_at_once(
    make: MakeFeedback, engine: Engine, num_done: int, expected: str
) -> None:
    """A request that comes while a sample is examined ends its run; the sample is taken up again, and
    the runs that were done are not made again."""
    engine.gate, engine.num_free = asyncio.Event(), num_done
    feedback = make()
    await serve(feedback)
    work = asyncio.create_task(feedback.drain())
    while len(engine.asked) <= num_done:
        await asyncio.sleep(0)
    with feedback._idle.traffic():
        engine.gate.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(engine.asked) == num_done + 1  # nothing goes on beside the request
        assert feedback.stats()["num_examined"] == 0
    await work
    assert feedback.stats()["num_examined"] == 1
    assert [("full" if run.spec.full_reason else "reuse") for run in engine.asked] == expected.split()


async def test_open_suspicion_overrules_the_share(make: MakeFeedback, engine: Engine) -> None:
    """With one sample in ten a suspect is sampled at every request that has it, others are not."""
    engine.corrupt = {KEYS[0]}
    feedback = make(feedback_share=0.1)
    for _ in range(10):
        await examine(feedback, KEYS[:2])
    assert feedback.stats()["suspects"] == [KEYS[0]]
    await examine(feedback, KEYS[2:])
    assert feedback.stats()["num_sampled"] == 1
    await examine(feedback, KEYS[:2])
    assert feedback.stats()["quarantined"] == [KEYS[0]]


async def test_waiting_samples_are_bounded(make: MakeFeedback, engine: Engine) -> None:
    """Under steady traffic the queue drops and counts its oldest samples, but for the first, which may
    have been begun."""
    feedback = make()
    with feedback._idle.traffic():
        for index in range(MAX_WAITING_SAMPLES + 7):
            await serve(feedback, (ChunkKey(str(index)),))
        assert engine.asked == []
        assert feedback.stats()["num_waiting"] == MAX_WAITING_SAMPLES
    await feedback.drain()
    assert feedback.stats()["num_dropped"] == 7
    examined = dict.fromkeys(run.spec.chunks[0].key for run in engine.asked)
    assert list(examined) == ["0", *map(str, range(8, MAX_WAITING_SAMPLES + 7))]


async def test_corrupt_chunk_is_caught_recached_and_released(make: MakeFeedback, engine: Engine) -> None:
    """Blamed twice, a chunk loses its records and vLLM's own copies and is computed; stored anew it is
    watched for three samples, whatever the share, and then like any other."""
    engine.corrupt = {KEYS[1]}
    feedback = make()
    await examine(feedback)
    assert engine.dropped == [] and feedback.stats()["suspects"] == [KEYS[1]]
    await examine(feedback)
    assert engine.dropped == [KEYS[1]] and engine.forgotten == [TENANT]
    assert feedback.stats()["quarantined"] == [KEYS[1]]
    engine.corrupt = set()
    assert refused(await examine(feedback)) == [KEYS[1]]
    assert feedback.stats()["on_probation"] == [KEYS[1]]
    for _ in range(3):
        assert refused(await examine(feedback)) == []
    assert feedback.stats()["num_releases"] == 1 and feedback.stats()["on_probation"] == []


async def test_chunk_that_caching_anew_would_not_mend_is_not_blamed(
    make: MakeFeedback, engine: Engine
) -> None:
    """Where a fresh copy gives the same wrong answer the chunk depends on its context: no quarantine."""
    engine.delicate = {KEYS[2]}
    feedback = make(quality_threshold=0.0)
    for _ in range(30):
        await examine(feedback)
    figures = feedback.stats()
    assert (figures["num_diagnosed"], figures["num_blames"], engine.dropped) == (30, 0, [])


async def test_copies_for_a_diagnosis_are_dropped(make: MakeFeedback, engine: Engine) -> None:
    """A diagnosis caches its copies in a tenant of its own, each behind the head, and drops them."""
    engine.corrupt = {KEYS[0]}
    await examine(make())
    copies = [run for run in engine.asked if run.spec.store]
    assert [c.request.token_ids[:HEAD] for c in copies] == [tuple(range(HEAD))] * 3
    assert [len(c.request.token_ids) for c in copies] == [HEAD + SIZE] * 3
    (action, arguments) = engine.controls[0]
    assert action == "drop_chunks" and set(arguments["keys"]) == set(KEYS[:3])
    assert {c.spec.tenant for c in copies} == {arguments["tenant"]} != {TENANT}


async def test_shared_chunk_is_copied_apart_and_dropped_where_it_is_stored(
    make: MakeFeedback, engine: Engine
) -> None:
    """A diagnosis looks its fresh copies up in their own tenant; what is to blame goes for everybody."""
    engine.corrupt = {SHARED_KEY}
    feedback = make(quality_threshold=0.0)
    for _ in range(2):
        await examine(feedback, (KEYS[0], SHARED_KEY))
    asked = [run.spec for run in engine.asked if run.spec.tenant != TENANT]
    assert asked and not any(ref.is_shared for spec in asked for ref in spec.chunks)
    assert [a["keys"] for _, a in engine.controls if a["tenant"] == SHARED_TENANT] == [[SHARED_KEY]]
    assert engine.forgotten == [SHARED_TENANT]


async def test_breaker_opens_on_bad_answers_and_closes_on_good_ones(
    make: MakeFeedback, engine: Engine
) -> None:
    """A window of bad samples sends all to full compute; five good ones in a row end that."""
    engine.delicate = set(KEYS)
    feedback = make()
    for _ in range(20):
        assert (await examine(feedback)).full_reason is None
    engine.delicate = set()
    for _ in range(5):
        assert (await examine(feedback)).full_reason is Reason.QUALITY_BREAKER
    assert (await examine(feedback)).full_reason is None


async def test_open_breaker_obeys_the_caller(make: MakeFeedback, engine: Engine) -> None:
    """A strategy named by the caller is not overruled."""
    engine.delicate = set(KEYS)
    feedback = make()
    for _ in range(20):
        await examine(feedback)
    assert (await serve(feedback, reuse="naive")).full_reason is None
    await feedback.stop()


async def test_bad_answers_raise_the_budget_of_requests_that_leave_it_open(
    make: MakeFeedback, engine: Engine
) -> None:
    """Below the target alpha, share and ratio grow; a ratio that the call names is obeyed."""
    engine.delicate = set(KEYS)
    feedback = make(quality_threshold=0.0)
    for _ in range(10):
        await examine(feedback)
    spec, named = await serve(feedback), await serve(feedback, recompute_ratio=0.5)
    assert spec.alpha > 0.3 and spec.share > 0.2 and 0.5 < (spec.recompute_ratio or 0) <= 1.0
    assert (named.alpha, named.recompute_ratio) == (0.3, 0.5)
    await feedback.stop()


async def test_failed_sample_says_nothing(make: MakeFeedback, engine: Engine) -> None:
    """A sample whose run fails is counted and dropped; the next one is examined."""
    feedback = make()
    engine.fault = RuntimeError("planted")
    await examine(feedback)
    engine.fault = None
    await examine(feedback)
    figures = feedback.stats()
    assert (figures["num_failed"], figures["num_examined"], figures["num_waiting"]) == (1, 1, 0)


RIVER = Chunk("The river flows from the hills to the sea.", doc_id="river")


@pytest.fixture
def reporting_backend(backend: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The fake backend with reports that name the chunks."""

    def report(request: BackendRequest) -> dict[str, Any]:
        spec = RequestSpec.from_params(request.params)
        assert spec is not None
        return reported(spec).to_dict()

    monkeypatch.setattr(backend, "_report", report)
    return backend


@pytest.mark.parametrize("is_stream", [False, True])
def test_engine_samples_every_way_of_asking(
    make_engine: Any, reporting_backend: Any, is_stream: bool
) -> None:
    """Whole and streamed answers are sampled; shadow runs are not counted as requests."""
    engine = make_engine(CacheCraftConfig(self_test=False, feedback_share=1.0))
    if is_stream:
        list(engine.stream_complete(RIVER.text, chunks=[RIVER]))
    else:
        engine.complete(RIVER.text, chunks=[RIVER])
    engine.drain_feedback()
    figures = engine.stats()
    assert figures["feedback"]["num_examined"] == 1 and figures["engine"]["num_requests"] == 1
    assert len(reporting_backend.requests) == 3


def test_engine_closes_while_a_sample_runs(
    make_engine: Any, reporting_backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing ends the run under way, then vLLM, and waits for no sample."""
    aborted_at_shutdown = []

    async def shutdown() -> None:
        aborted_at_shutdown.append(reporting_backend.num_aborted)

    monkeypatch.setattr(reporting_backend, "shutdown", shutdown)
    engine = make_engine(CacheCraftConfig(self_test=False, feedback_share=1.0))
    engine.complete(RIVER.text, chunks=[RIVER])
    reporting_backend.gate = asyncio.Event()  # from here on no answer ends
    draining = engine._live.loop.submit(engine._running.feedback.drain())
    while len(reporting_backend.requests) < 2 and not draining.done():
        pass
    engine.close()
    assert aborted_at_shutdown == [1]
