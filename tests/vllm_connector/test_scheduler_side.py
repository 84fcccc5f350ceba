"""Planning, books and orders of the scheduler half, over requests written out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from cachecraft_rag.chunks import ChunkKey, DocumentRef, Span
from cachecraft_rag.events import Reason, RequestDecision, ReuseReport
from cachecraft_rag.planner.limits import PlanLimits
from cachecraft_rag.vllm_connector.messages import PARAMS_KEY, ChunkRef
from cachecraft_rag.vllm_connector.record_keeper import ABANDON_AFTER_STEPS
from cachecraft_rag.vllm_connector.steps import JobFacts, StepFacts

BLOCK = 4
TENANT = "t"


def chunk(start: int = 4, prefix_hash: str = "p", document: DocumentRef | None = None) -> ChunkRef:
    return ChunkRef(Span(start, start + 8), ChunkKey("k"), prefix_hash, document)


def assert_found(scheduler: Any, is_found: bool) -> None:
    assert bool(scheduler.store.variants(TENANT, ChunkKey("k"))) is is_found
    assert scheduler.store.check() == []


def test_computed_chunk_is_opened_captured_and_found(scheduler: Any) -> None:
    """A miss is captured with the text before it; once filled, another prompt is promised it."""
    first = scheduler.request([chunk()])
    orders = scheduler.schedule(first)
    assert [len(record.context) for record in orders.new_records] == [0]
    assert sorted(str(target.sink)[:5] for target in orders.captures) == ["0", "lead:"]
    assert_found(scheduler, False)
    scheduler.fill(orders)
    assert_found(scheduler, True)
    moved = scheduler.request([chunk(start=12, prefix_hash="q")])
    assert scheduler.side.look_up(moved, 0) == 20
    (job,) = (scheduler.side.admit(moved, 20), scheduler.orders())[1].jobs
    assert [load.span for load in job.loads] == [Span(12, 20)]
    assert job.recompute == (Span(0, 12),)


def test_local_hit_shortens_the_promise(scheduler: Any) -> None:
    """What vLLM's own prefix cache holds is neither promised nor loaded again."""
    scheduler.store_chunk(chunk())
    moved = scheduler.request([chunk(start=12, prefix_hash="q")])
    assert scheduler.side.look_up(moved, 16) == 4
    assert scheduler.side.look_up(moved, 20) == 0
    assert scheduler.side.look_up(moved, 24) == 0


def test_approximate_blocks_get_names_of_their_own(scheduler: Any) -> None:
    """Block hashes change from the first block with approximate KV on, once however often asked."""
    scheduler.store_chunk(chunk())
    moved = scheduler.request([chunk(start=14, prefix_hash="q")])
    before = list(moved.block_hashes)
    scheduler.side.look_up(moved, 0)
    salted = list(moved.block_hashes)
    assert salted[: 14 // BLOCK] == before[: 14 // BLOCK]
    assert not set(salted[14 // BLOCK :]) & set(before)
    scheduler.side.look_up(moved, 0)
    assert moved.block_hashes == salted


def test_exact_reuse_keeps_the_names_of_its_blocks(scheduler: Any) -> None:
    """KV behind the same prefix may be served by vLLM's prefix cache afterwards."""
    scheduler.store_chunk(chunk())
    again = scheduler.request([chunk()])
    before = list(again.block_hashes)
    assert scheduler.side.look_up(again, 0) == 12
    assert again.block_hashes == before


def test_late_insert_after_invalidate_is_refused(scheduler: Any) -> None:
    """A request planned before its document was invalidated stores nothing of it any more."""
    document = DocumentRef("doc", "v1")
    request = scheduler.request([chunk(document=document)])
    scheduler.side.look_up(request, 0)
    scheduler.control("invalidate", doc_id="doc", version=None)
    scheduler.side.admit(request, 0)
    assert scheduler.orders((request, 0)).new_records == ()
    scheduler.fill(scheduler.schedule(scheduler.request([chunk(document=document)])))
    assert_found(scheduler, True)


def test_capture_under_way_is_dropped_by_invalidate(scheduler: Any) -> None:
    """A record that is being filled when its document goes never becomes ready."""
    orders = scheduler.schedule(scheduler.request([chunk(document=DocumentRef("doc"))]))
    scheduler.control("invalidate", doc_id="doc", version=None)
    scheduler.fill(orders)
    assert_found(scheduler, False)


def test_shared_text_stays_until_its_last_document_goes(scheduler: Any) -> None:
    """A document that only ever hit the KV of another keeps it all the same."""
    scheduler.store_chunk(chunk(document=DocumentRef("a")))
    scheduler.side.look_up(scheduler.request([chunk(document=DocumentRef("b"))]), 0)
    assert scheduler.control("invalidate", doc_id="a", version=None) == {"result": 0}
    assert_found(scheduler, True)
    assert scheduler.control("invalidate", doc_id="b", version=None) == {"result": 1}
    assert_found(scheduler, False)


def test_superseded_version_is_neither_used_nor_stored(scheduler: Any) -> None:
    """A retriever that lags behind gets full compute with a reason."""
    scheduler.store_chunk(chunk(document=DocumentRef("doc", "v1")))
    scheduler.control("replace", doc_id="doc", version="v2", keys=["k"])
    old = scheduler.request([chunk(document=DocumentRef("doc", "v1"))])
    assert scheduler.side.look_up(old, 0) == 0
    scheduler.side.admit(old, 0)
    assert scheduler.orders((old, 0)).new_records == ()
    params = scheduler.side.finish(old, [])
    assert params is not None
    assert ReuseReport.from_dict(params[PARAMS_KEY]).reason is Reason.SUPERSEDED_VERSION


def test_report_waits_for_the_facts_of_its_job(scheduler: Any) -> None:
    """It is returned at once if the facts are in, and always sent to the workers for fetching."""
    scheduler.store_chunk(chunk())
    early, late = (scheduler.request([chunk(start=12, prefix_hash=name)]) for name in "ab")
    for request in (early, late):
        scheduler.schedule(request)
    scheduler.side.take_facts(StepFacts(jobs={"r2": JobFacts(0.1, 0.2, 64)}))
    assert scheduler.side.finish(early, []) is not None
    assert scheduler.side.finish(late, []) is None
    scheduler.side.take_facts(StepFacts(jobs={"r3": JobFacts(0.3, 0.4, 128)}))
    sent = {name: ReuseReport.from_dict(report) for name, report in scheduler.orders().reports}
    assert {name: report.loaded_bytes for name, report in sent.items()} == {"r2": 64, "r3": 128}


def test_request_that_stores_nothing_leaves_no_block(scheduler: Any) -> None:
    """No record is opened for it and its blocks leave vLLM's prefix cache."""
    request = scheduler.request([chunk()], store=False)
    assert scheduler.schedule(request).new_records == ()
    scheduler.side.finish(request, [3, 5])
    assert scheduler.evicted == {3, 5}


def test_abort_while_loading_gives_everything_back(scheduler: Any) -> None:
    """Its pins, and at once the record that its job has not filled."""
    scheduler.store_chunk(chunk())
    other = ChunkRef(Span(20, 28), ChunkKey("other"), "o")
    request = scheduler.request([chunk(start=6, prefix_hash="q"), other])
    scheduler.schedule(request)
    request.status.name = "FINISHED_ABORTED"
    scheduler.side.finish(request, [])
    stats = scheduler.control("stats")["result"]
    assert (stats["num_pinned"], stats["num_reserved"], stats["num_running"]) == (0, 0, 0)
    assert stats["num_aborted_in_load"] == 1


def test_record_that_nobody_fills_is_given_up(scheduler: Any) -> None:
    """Its tokens were scheduled, so it is waited for, but not for ever."""
    request = scheduler.request([chunk()])
    scheduler.schedule(request)
    scheduler.side.finish(request, [])
    assert scheduler.control("stats")["result"]["num_reserved"] == 1
    for _ in range(ABANDON_AFTER_STEPS):
        scheduler.orders()
    assert scheduler.control("stats")["result"]["num_reserved"] == 0


def test_request_that_ended_before_the_step_is_answered_without_a_job(scheduler: Any) -> None:
    """vLLM keeps its blocks until the workers answer, so they are told to."""
    scheduler.store_chunk(chunk())
    request = scheduler.request([chunk(start=12, prefix_hash="q")])
    scheduler.side.admit(request, scheduler.side.look_up(request, 0))
    scheduler.side.finish(request, [])
    orders = scheduler.orders()
    assert (orders.jobs, orders.failed) == ((), (request.request_id,))


def test_request_that_ends_while_it_loads_is_dropped_once(scheduler: Any) -> None:
    """Its workers are told in the next step; one whose job was answered has nothing left to drop."""
    scheduler.store_chunk(chunk())
    loading, loaded = (scheduler.request([chunk(start=12, prefix_hash=name)]) for name in "ab")
    for request in (loading, loaded):
        scheduler.schedule(request)
    scheduler.side.take_facts(StepFacts(jobs={"r3": JobFacts(0.1, 0.2, 64)}))
    for request in (loading, loaded):
        request.status.name = "FINISHED_ABORTED"
        scheduler.side.finish(request, [])
    assert scheduler.orders().dropped == (loading.request_id,)
    assert scheduler.orders().dropped == ()
    assert scheduler.control("stats")["result"]["num_aborted_in_load"] == 1


def test_only_a_preempted_request_is_admitted_again(scheduler: Any) -> None:
    """One that waited for its job joins the batch for the first time; its KV is loaded again once it has
    lost its blocks."""
    scheduler.store_chunk(chunk())
    request = scheduler.request([chunk(start=12, prefix_hash="q")])
    scheduler.schedule(request)
    scheduler.side.take_facts(StepFacts(jobs={"r2": JobFacts(0.1, 0.2, 64)}))
    scheduler.side.admit(request, 0)
    scheduler.orders((request, 20))
    assert scheduler.control("stats")["result"]["num_readmitted"] == 0
    assert len(scheduler.schedule(request).jobs) == 1
    assert scheduler.control("stats")["result"]["num_readmitted"] == 1


def test_job_captures_what_it_computes(scheduler: Any) -> None:
    """A missing chunk before the loaded one is copied while the job computes it, over as many steps as
    that takes; only then is its record no longer awaited."""
    scheduler.store_chunk(chunk())
    other = ChunkRef(Span(4, 10), ChunkKey("other"), "o")
    request = scheduler.request([other, chunk(start=12, prefix_hash="q")])
    orders = scheduler.schedule(request)
    (job,), (record,) = orders.jobs, orders.new_records
    assert orders.captures == ()
    slots = {target.sink: target.slots.tolist() for target in job.captures}
    assert slots[record.record_id] == list(range(4, 10))
    scheduler.side.take_facts(StepFacts(jobs={"r2": JobFacts(0.1, 0.2, 64)}))
    scheduler.fill(orders)
    assert scheduler.orders((request, 20)).captures == ()
    scheduler.side.finish(request, [])
    assert scheduler.store.variants(TENANT, ChunkKey("other"))


def test_jobs_share_the_step_with_its_forward(scheduler: Any) -> None:
    """What the forward computes is taken off what the workers may compute for jobs."""
    assert scheduler.orders().num_work_tokens == 64
    request = scheduler.request([])
    assert scheduler.schedule(request).num_work_tokens == 64 - 40


MISSING = ChunkRef(Span(24, 32), ChunkKey("missing"), "m")


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (PlanLimits(max_missing_share=0.4), Reason.TOO_MANY_MISSING),
        (PlanLimits(max_overhead_share=0.5), Reason.OVERHEAD_TOO_HIGH),
    ],
)
def test_plan_beyond_its_limits_gets_full_compute(scheduler: Any, limits: PlanLimits, reason: Reason) -> None:
    """Half of the chunks are missing and 24 of 40 tokens would be computed ahead: nothing is promised,
    pinned or renamed, the report says why, and what is computed is offered to the store."""
    scheduler.store_chunk(chunk())
    request = scheduler.request([chunk(start=12, prefix_hash="q"), MISSING], limits=limits)
    before = list(request.block_hashes)
    orders = scheduler.schedule(request)
    assert (orders.jobs, request.block_hashes) == ((), before)
    assert scheduler.store.stats().num_pinned == 0
    assert len(orders.new_records) == 2
    params = scheduler.side.finish(request, [])
    report = ReuseReport.from_dict(params[PARAMS_KEY])
    assert (report.decision, report.reason) == (RequestDecision.FULL, reason)
    assert {part.reason for part in report.chunks} == {reason}
    assert report.num_computed_tokens == report.num_prompt_tokens


@pytest.mark.parametrize("limits", [None, PlanLimits(0.5, 0.6)])
def test_plan_within_its_limits_is_carried_out(scheduler: Any, limits: PlanLimits | None) -> None:
    """A limit that is just met refuses nothing, and neither does a named strategy, which has none."""
    scheduler.store_chunk(chunk())
    request = scheduler.request([chunk(start=12, prefix_hash="q"), MISSING], limits=limits)
    assert len(scheduler.schedule(request).jobs) == 1
    assert scheduler.store.stats().num_pinned == 1


def test_exact_plan_is_beyond_no_limit(scheduler: Any) -> None:
    """It costs nothing in quality, and what it does not load is computed once."""
    scheduler.store_chunk(chunk())
    request = scheduler.request([chunk(), MISSING], limits=PlanLimits(0.0, 0.0))
    assert len(scheduler.schedule(request).jobs) == 1


def test_tokens_the_workers_chose_are_in_the_report(scheduler: Any) -> None:
    """The plan has none of them: what came back with the facts is what was recomputed."""
    scheduler.store_chunk(chunk())
    moved = scheduler.request([chunk(start=12, prefix_hash="q")], strategy="question", share=0.5)
    (job,) = scheduler.schedule(moved).jobs
    assert job.live is not None and job.live.num_tokens == 4
    facts = JobFacts(0.1, 0.2, 64, num_probe_tokens=1, chosen=(Span(13, 16),))
    scheduler.side.take_facts(StepFacts(jobs={"r2": facts}))
    report = ReuseReport.from_dict(scheduler.side.finish(moved, [])[PARAMS_KEY])
    assert (report.num_reused_tokens, report.num_recomputed_tokens, report.num_probe_tokens) == (5, 3, 1)
