"""Planning, books and orders of the scheduler half, over requests written out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from cachecraft_rag.chunks import ChunkKey, DocumentRef, Span
from cachecraft_rag.events import Reason, ReuseReport
from cachecraft_rag.store.host import HostChunkStore
from cachecraft_rag.vllm_connector.messages import PARAMS_KEY, ChunkRef, ControlMessage, RequestSpec
from cachecraft_rag.vllm_connector.record_keeper import ABANDON_AFTER_STEPS
from cachecraft_rag.vllm_connector.scheduler_side import SchedulerSide
from cachecraft_rag.vllm_connector.steps import JobFacts, StepFacts, StepOrders

BLOCK = 4
NUM_TOKENS = 40
NUM_BLOCKS = NUM_TOKENS // BLOCK
TENANT = "t"


class Scheduler:
    """The part of vLLM's scheduler that drives the connector: one step after another."""

    def __init__(self) -> None:
        self.store = HostChunkStore(1 << 20, 2)
        self.side = SchedulerSide(
            self.store, block_size=BLOCK, bytes_per_token=8, min_chunk_tokens=2, num_ranks=1
        )
        self.evicted: set[int] = set()
        self.side.bind_block_pool(SimpleNamespace(evict_blocks=self.evicted.update))
        self.num_requests = 0

    def request(self, chunks: Sequence[ChunkRef], **options: Any) -> Any:
        self.num_requests += 1
        name = f"r{self.num_requests}"
        options = {"strategy": "naive", **options}
        spec = RequestSpec(name, TENANT, tuple(chunks), **options)
        return SimpleNamespace(
            request_id=f"vllm-{name}",
            kv_transfer_params=spec.to_params(),
            num_prompt_tokens=NUM_TOKENS,
            prompt_token_ids=list(range(NUM_TOKENS)),
            skip_reading_prefix_cache=False,
            block_hashes=[bytes([index]) * 4 for index in range(NUM_BLOCKS)],
            status=SimpleNamespace(name="FINISHED_STOPPED"),
        )

    def schedule(self, request: Any, local: int = 0) -> StepOrders:
        """Look up, admit, and run the rest of the prompt in one step."""
        promised = self.side.look_up(request, local)
        self.side.admit(request, promised)
        return self.orders((request, local + promised))

    def orders(self, *running: tuple[Any, int]) -> StepOrders:
        """Orders of a step in which each request runs from a position to its end."""
        blocks = {request.request_id: list(range(NUM_BLOCKS)) for request, _ in running}
        new = [SimpleNamespace(req_id=r.request_id, num_computed_tokens=start) for r, start in running]
        return self.side.build_orders(
            SimpleNamespace(
                num_scheduled_tokens={r.request_id: NUM_TOKENS - start for r, start in running},
                scheduled_new_reqs=new,
                scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
                kv_connector_block_state=SimpleNamespace(
                    resolve_block_ids=lambda request_id: (blocks[request_id],)
                ),
            )
        )

    def fill(self, orders: StepOrders) -> None:
        """The workers have filled all that was opened."""
        self.side.take_facts(StepFacts({record.record_id: None for record in orders.new_records}))

    def store_chunk(self, chunk: ChunkRef) -> None:
        """A whole request that computes and stores one chunk."""
        request = self.request([chunk])
        self.fill(self.schedule(request))
        self.side.finish(request, [])
        self.orders()

    def control(self, action: str, **arguments: Any) -> Any:
        message = ControlMessage("c", action, {"tenant": TENANT, **arguments})
        self.side.on_new_request(SimpleNamespace(kv_transfer_params=message.to_params()))
        return dict(self.orders().replies)["c"]


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


def chunk(start: int = 4, prefix_hash: str = "p", document: DocumentRef | None = None) -> ChunkRef:
    return ChunkRef(Span(start, start + 8), ChunkKey("k"), prefix_hash, document)


def assert_found(scheduler: Scheduler, is_found: bool) -> None:
    assert bool(scheduler.store.variants(TENANT, ChunkKey("k"))) is is_found
    assert scheduler.store.check() == []


def test_computed_chunk_is_opened_captured_and_found(scheduler: Scheduler) -> None:
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
    (job,) = (scheduler.side.admit(moved, 20), scheduler.orders((moved, 20)))[1].jobs
    assert [load.span for load in job.loads] == [Span(12, 20)]
    assert job.recompute == (Span(0, 12),)


def test_local_hit_shortens_the_promise(scheduler: Scheduler) -> None:
    """What vLLM's own prefix cache holds is neither promised nor loaded again."""
    scheduler.store_chunk(chunk())
    moved = scheduler.request([chunk(start=12, prefix_hash="q")])
    assert scheduler.side.look_up(moved, 16) == 4
    assert scheduler.side.look_up(moved, 20) == 0
    assert scheduler.side.look_up(moved, 24) == 0


def test_approximate_blocks_get_names_of_their_own(scheduler: Scheduler) -> None:
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


def test_exact_reuse_keeps_the_names_of_its_blocks(scheduler: Scheduler) -> None:
    """KV behind the same prefix may be served by vLLM's prefix cache afterwards."""
    scheduler.store_chunk(chunk())
    again = scheduler.request([chunk()])
    before = list(again.block_hashes)
    assert scheduler.side.look_up(again, 0) == 12
    assert again.block_hashes == before


def test_late_insert_after_invalidate_is_refused(scheduler: Scheduler) -> None:
    """A request planned before its document was invalidated stores nothing of it any more."""
    document = DocumentRef("doc", "v1")
    request = scheduler.request([chunk(document=document)])
    scheduler.side.look_up(request, 0)
    scheduler.control("invalidate", doc_id="doc", version=None)
    scheduler.side.admit(request, 0)
    assert scheduler.orders((request, 0)).new_records == ()
    scheduler.fill(scheduler.schedule(scheduler.request([chunk(document=document)])))
    assert_found(scheduler, True)


def test_capture_under_way_is_dropped_by_invalidate(scheduler: Scheduler) -> None:
    """A record that is being filled when its document goes never becomes ready."""
    orders = scheduler.schedule(scheduler.request([chunk(document=DocumentRef("doc"))]))
    scheduler.control("invalidate", doc_id="doc", version=None)
    scheduler.fill(orders)
    assert_found(scheduler, False)


def test_shared_text_stays_until_its_last_document_goes(scheduler: Scheduler) -> None:
    """A document that only ever hit the KV of another keeps it all the same."""
    scheduler.store_chunk(chunk(document=DocumentRef("a")))
    scheduler.side.look_up(scheduler.request([chunk(document=DocumentRef("b"))]), 0)
    assert scheduler.control("invalidate", doc_id="a", version=None) == {"result": 0}
    assert_found(scheduler, True)
    assert scheduler.control("invalidate", doc_id="b", version=None) == {"result": 1}
    assert_found(scheduler, False)


def test_superseded_version_is_neither_used_nor_stored(scheduler: Scheduler) -> None:
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


def test_report_waits_for_the_facts_of_its_job(scheduler: Scheduler) -> None:
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


def test_request_that_stores_nothing_leaves_no_block(scheduler: Scheduler) -> None:
    """No record is opened for it and its blocks leave vLLM's prefix cache."""
    request = scheduler.request([chunk()], store=False)
    assert scheduler.schedule(request).new_records == ()
    scheduler.side.finish(request, [3, 5])
    assert scheduler.evicted == {3, 5}


def test_hit_that_is_computed_in_this_step_is_computed_here_too(scheduler: Scheduler) -> None:
    """vLLM's own hit on blocks that the coming forward still has to write is not trusted."""
    scheduler.store_chunk(chunk())
    request, other = scheduler.request([chunk(start=12, prefix_hash="q")]), scheduler.request([])
    scheduler.side.look_up(other, 0)
    scheduler.side.admit(other, 0)
    scheduler.side.admit(request, scheduler.side.look_up(request, 8))
    (job,) = scheduler.orders((other, 0), (request, 20)).jobs
    assert (job.start, job.recompute) == (8, (Span(0, 12),))


def test_nothing_stays_pinned_or_reserved(scheduler: Scheduler) -> None:
    """An aborted request gives back its pins, and in the end the record that nobody filled."""
    scheduler.store_chunk(chunk())
    other = ChunkRef(Span(20, 28), ChunkKey("other"), "o")
    request = scheduler.request([chunk(start=6, prefix_hash="q"), other])
    scheduler.schedule(request)
    request.status.name = "FINISHED_ABORTED"
    scheduler.side.finish(request, [])
    stats = scheduler.control("stats")["result"]
    assert (stats["num_pinned"], stats["num_reserved"], stats["num_running"]) == (0, 1, 0)
    assert stats["num_aborted_in_load"] == 1
    for _ in range(ABANDON_AFTER_STEPS):
        scheduler.orders()
    assert scheduler.control("stats")["result"]["num_reserved"] == 0


def test_request_that_ended_before_the_step_gets_no_job(scheduler: Scheduler) -> None:
    """Nothing is ordered for it, and the step goes on."""
    scheduler.store_chunk(chunk())
    request = scheduler.request([chunk(start=12, prefix_hash="q")])
    scheduler.side.admit(request, scheduler.side.look_up(request, 0))
    scheduler.side.finish(request, [])
    assert scheduler.orders().jobs == ()
