"""What the scheduler side looks for, orders, publishes and drops in the cold tiers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cachecraft_rag.chunks import SHARED_TENANT, ChunkKey, DocumentRef, RecordMeta, Span
from cachecraft_rag.events import Reason, ReuseReport
from cachecraft_rag.store.cold import ColdStore
from cachecraft_rag.store.host import HostChunkStore
from cachecraft_rag.store.journal import Action, Entry
from cachecraft_rag.store.tiers import MemoryTier, TierError
from cachecraft_rag.vllm_connector.cold_side import ColdSide, Orphans
from cachecraft_rag.vllm_connector.messages import PARAMS_KEY, ChunkRef
from cachecraft_rag.vllm_connector.steps import (
    ColdFacts,
    ColdRead,
    JobFacts,
    LoadedPart,
    StepFacts,
    WrittenPart,
)

MakeBench = Callable[..., "Bench"]

KEY, OTHER_KEY = ChunkKey("k1"), ChunkKey("k2")
META = RecordMeta(
    record_id=0,
    key=KEY,
    tenant="a",
    num_tokens=3,
    start=4,
    size_bytes=100,
    prefix_hash="p1",
    document=DocumentRef("doc", "v1"),
)
TENANT = "t"
WAIT_S = 0.05


class Bench:
    """A cold side over tiers in memory, a clock that stands, and threads that run at once."""

    def __init__(
        self,
        executor: Executor,
        num_ranks: int = 1,
        host_bytes: int = 1000,
        has_slow_tier: bool = False,
    ) -> None:
        self.now_s = 0.0
        self.executor = executor
        self.tier = MemoryTier(1 << 20)
        self.slow_tier = MemoryTier(1 << 20)
        tiers = {"disk": self.tier, "redis": self.slow_tier} if has_slow_tier else {"disk": self.tier}
        self.num_ranks = num_ranks
        self.cold = ColdStore(tiers, "model", num_ranks)
        orphans = Orphans()
        self.host = HostChunkStore(host_bytes, 2, orphans.add)
        self.side = ColdSide(
            self.cold, self.host, num_ranks, WAIT_S, orphans, lambda: self.now_s, lambda _: self.executor
        )

    def commit(self, **changes: Any) -> RecordMeta:
        """A record that was captured and committed, as the keeper does it."""
        meta = replace(META, record_id=self.host.next_record_id(), **changes)
        assert self.host.reserve(meta).accepted
        assert self.host.commit(meta.record_id, None)
        self.side.keep(meta)
        return meta

    def part(self, meta: RecordMeta, rank: int = 0) -> WrittenPart:
        kv = np.zeros((1, 2, meta.num_tokens, 1, 4), np.float32)
        return WrittenPart(*self.cold.put_part(meta, rank, kv, None))

    def write(self, meta: RecordMeta) -> None:
        """All ranks carry out a write order."""
        for rank in range(self.num_ranks):
            self.side.take_facts({rank: ColdFacts(written={meta.record_id: self.part(meta, rank)})})

    def loaded(self, record_id: int, rank: int = 0, *, is_loaded: bool = True) -> None:
        self.side.take_facts({rank: ColdFacts(loaded={record_id: LoadedPart(is_loaded)})})

    def store_cold(self) -> None:
        """The chunk is in the cold tier and nowhere else."""
        meta = self.commit()
        (order,), _ = self.side.take_orders()
        self.write(order)
        self.host.discard(meta.record_id)
        self.host.drain_freed()

    def read_order(self) -> int:
        return self.order().record_id

    def order(self) -> ColdRead:
        _, (order,) = self.side.take_orders()
        return order

    def store_slow(self) -> ColdRead:
        """The chunk is in the slower tier and nowhere else, and is read from there."""
        self.store_cold()
        self.tier.delete([*self.tier.names()])
        self.side.seek("a", [KEY])
        return self.order()

    def copy(self, order: ColdRead, rank: int = 0) -> WrittenPart:
        record = self.cold.load(order.variant, rank, {})
        assert record is not None
        return WrittenPart(*self.cold.copy_part(order.variant, rank, record, order.copy_to))

    def copied(self, order: ColdRead, part: WrittenPart | None = None, rank: int = 0) -> None:
        """A rank has copied what it read, or failed to."""
        facts = ColdFacts(written={order.record_id: part or self.copy(order, rank)})
        self.side.take_facts({rank: facts})

    def tiers_found(self) -> list[str]:
        return [variant.tier for variant in self.cold.find("a", KEY)]


@pytest.fixture
def make_bench(executor: Executor) -> MakeBench:
    return lambda **settings: Bench(executor, **settings)


def test_cold_chunk_is_read_and_then_found(make_bench: MakeBench) -> None:
    """The request waits until the workers have it; the report will name the tier."""
    bench = make_bench()
    bench.store_cold()
    search = bench.side.seek("a", [KEY])
    assert search is not None
    assert bench.side.is_pending(search)
    record_id = bench.read_order()
    assert not bench.host.holds("a", KEY)
    bench.loaded(record_id)
    assert not bench.side.is_pending(search)
    assert bench.host.holds("a", KEY)
    assert bench.side.tier_of(record_id) == "disk"
    assert bench.host.check() == []


def test_nothing_is_sought_that_the_host_tier_has(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.commit()
    assert bench.side.seek("a", [KEY]) is None


def test_chunk_that_is_nowhere_is_not_waited_for(make_bench: MakeBench) -> None:
    bench = make_bench()
    search = bench.side.seek("a", [KEY])
    assert search is not None
    assert not bench.side.is_pending(search)
    assert bench.side.take_orders() == ((), ())


def test_nobody_waits_beyond_the_deadline(make_bench: MakeBench) -> None:
    """A tier that does not answer costs `wait_s`; what comes later serves the next request."""
    bench = make_bench()
    bench.store_cold()
    bench.executor.is_held = True
    search = bench.side.seek("a", [KEY])
    assert search is not None
    assert bench.side.is_pending(search)
    bench.now_s = WAIT_S
    assert not bench.side.is_pending(search)
    bench.executor.release()
    bench.loaded(bench.read_order())
    assert bench.host.holds("a", KEY)


def test_two_requests_read_a_chunk_once(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.store_cold()
    searches = [bench.side.seek("a", [KEY]) for _ in range(2)]
    record_id = bench.read_order()
    third = bench.side.seek("a", [KEY])
    assert bench.side.take_orders() == ((), ())
    assert all(search and bench.side.is_pending(search) for search in (*searches, third))
    bench.loaded(record_id)
    assert not any(search and bench.side.is_pending(search) for search in (*searches, third))


def test_read_that_fails_leaves_nothing(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.store_cold()
    search = bench.side.seek("a", [KEY])
    bench.loaded(bench.read_order(), is_loaded=False)
    assert search and not bench.side.is_pending(search)
    assert not bench.host.holds("a", KEY)
    assert bench.host.check() == []
    assert bench.host.stats().num_reserved == 0


def test_read_that_any_rank_missed_leaves_nothing(make_bench: MakeBench) -> None:
    """And is not given up before all ranks have spoken: the others still hold what they read."""
    bench = make_bench(num_ranks=2)
    meta = bench.commit()
    bench.side.take_orders()
    bench.side.take_facts(
        {rank: ColdFacts(written={meta.record_id: bench.part(meta, rank)}) for rank in range(2)}
    )
    bench.host.discard(meta.record_id)
    bench.side.seek("a", [KEY])
    record_id = bench.read_order()
    bench.loaded(record_id, 0, is_loaded=False)
    assert bench.host.stats().num_reserved == 1
    bench.loaded(record_id, 1)
    assert bench.host.stats().num_reserved == 0
    assert not bench.host.holds("a", KEY)


def test_document_that_changed_while_it_was_read_stays_out(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.store_cold()
    bench.side.seek("a", [KEY])
    record_id = bench.read_order()
    bench.host.invalidate("a", "doc")
    bench.loaded(record_id)
    assert not bench.host.holds("a", KEY)
    assert bench.host.check() == []


def test_record_is_found_by_others_once_all_ranks_wrote_it(make_bench: MakeBench) -> None:
    bench = make_bench(num_ranks=2)
    meta = bench.commit()
    assert bench.side.take_orders() == ((meta,), ())
    bench.side.take_facts({0: ColdFacts(written={meta.record_id: bench.part(meta, 0)})})
    assert bench.cold.find("a", KEY) == []
    bench.side.take_facts({1: ColdFacts(written={meta.record_id: bench.part(meta, 1)})})
    assert len(bench.cold.find("a", KEY)) == 1


def test_record_that_a_rank_could_not_write_is_withdrawn(make_bench: MakeBench) -> None:
    bench = make_bench(num_ranks=2)
    meta = bench.commit()
    facts = {0: ColdFacts(written={meta.record_id: bench.part(meta, 0)})}
    bench.side.take_facts({**facts, 1: ColdFacts(written={meta.record_id: WrittenPart(None)})})
    assert list(bench.tier.names()) == []


def test_document_that_changed_while_it_was_written_is_withdrawn(make_bench: MakeBench) -> None:
    bench = make_bench()
    meta = bench.commit()
    bench.host.invalidate("a", "doc")
    bench.write(meta)
    assert list(bench.tier.names()) == []


def test_approximate_kv_is_not_written(make_bench: MakeBench) -> None:
    """Approximations would pile up over restarts."""
    bench = make_bench()
    bench.commit(prefix_is_exact=False)
    assert bench.side.take_orders() == ((), ())


def test_what_was_read_is_not_written_again(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.store_cold()
    bench.side.seek("a", [KEY])
    bench.loaded(bench.read_order())
    assert bench.side.take_orders() == ((), ())


def test_invalidated_document_leaves_the_cold_tiers(make_bench: MakeBench) -> None:
    """Text that another document has as well stays."""
    bench = make_bench()
    shared = ChunkKey("shared")
    for meta in (bench.commit(), bench.commit(key=shared)):
        bench.write(meta)
    bench.host.register("a", shared, DocumentRef("other"))
    bench.host.invalidate("a", "doc")
    assert bench.side.drop_orphaned().result() == 1
    assert bench.cold.find("a", KEY) == []
    assert len(bench.cold.find("a", shared)) == 1


def test_flush_waits_for_what_is_on_its_way(make_bench: MakeBench) -> None:
    bench = make_bench()
    meta = bench.commit()
    bench.side.take_orders()
    flush = bench.side.flush()
    bench.side.take_orders()
    assert not flush.done()
    bench.write(meta)
    bench.side.take_orders()
    assert flush.result(timeout=0) is None
    assert len(bench.cold.find("a", KEY)) == 1


def test_host_tier_without_room_reads_nothing(make_bench: MakeBench) -> None:
    bench = make_bench(host_bytes=150)
    bench.store_cold()
    other = bench.commit(key=ChunkKey("k2"))
    bench.host.pin(other.record_id, "r")
    search = bench.side.seek("a", [KEY])
    assert search and not bench.side.is_pending(search)
    assert bench.side.take_orders()[1] == ()


# --- copies in faster tiers -----------------------------------------------------------------------


def test_record_from_a_slower_tier_is_copied_to_the_faster_one(make_bench: MakeBench) -> None:
    """Behind the reading: the record serves requests before, and the copy is found once it is whole."""
    bench = make_bench(has_slow_tier=True)
    order = bench.store_slow()
    assert (order.variant.tier, order.copy_to) == ("redis", ("disk",))
    bench.loaded(order.record_id)
    assert bench.host.holds("a", KEY)
    bench.copied(order)
    assert bench.tiers_found() == ["disk"]
    assert bench.slow_tier.get(order.variant.name.manifest_blob) == order.variant.manifest
    assert bench.side.take_orders() == ((), ())


def test_record_from_the_fastest_tier_is_not_copied(make_bench: MakeBench) -> None:
    bench = make_bench(has_slow_tier=True)
    bench.store_cold()
    bench.side.seek("a", [KEY])
    assert bench.order().copy_to == ()


def test_copy_is_found_once_all_ranks_made_it(make_bench: MakeBench) -> None:
    """One may have made it before another has even read."""
    bench = make_bench(num_ranks=2, has_slow_tier=True)
    order = bench.store_slow()
    bench.loaded(order.record_id, 0)
    bench.copied(order, rank=0)
    assert bench.tiers_found() == ["redis"]
    bench.loaded(order.record_id, 1)
    assert bench.tiers_found() == ["redis"]
    bench.copied(order, rank=1)
    assert bench.tiers_found() == ["disk"]


def test_copy_that_a_rank_could_not_make_goes(make_bench: MakeBench) -> None:
    """What it was made of stays."""
    bench = make_bench(num_ranks=2, has_slow_tier=True)
    order = bench.store_slow()
    bench.copied(order, rank=0)
    bench.copied(order, WrittenPart(None), rank=1)
    assert list(bench.tier.names()) == []
    assert bench.tiers_found() == ["redis"]


def test_copy_of_a_document_that_was_invalidated_goes(make_bench: MakeBench) -> None:
    """From all tiers, though its parts came after the drop."""
    bench = make_bench(has_slow_tier=True)
    order = bench.store_slow()
    part = bench.copy(order)
    bench.host.invalidate("a", "doc")
    bench.side.drop_orphaned()
    bench.tier.put(order.variant.name.rank_blob(0, 1), b"late")
    bench.copied(order, part)
    assert [*bench.tier.names(), *bench.slow_tier.names()] == []


def test_text_that_a_new_version_keeps_stays_in_the_slower_tier(make_bench: MakeBench) -> None:
    """The copy is given up, as nobody can tell at that moment; what was published is not touched."""
    bench = make_bench(has_slow_tier=True)
    order = bench.store_slow()
    part = bench.copy(order)
    bench.host.replace("a", "doc", "v2", [KEY])
    bench.side.drop_orphaned()
    bench.copied(order, part)
    assert bench.tiers_found() == ["redis"]
    assert list(bench.tier.names()) == []


def test_copy_that_was_published_is_dropped_by_what_comes_after(make_bench: MakeBench) -> None:
    """Changes of the tiers run in the order in which they were decided."""
    bench = make_bench(has_slow_tier=True)
    order = bench.store_slow()
    part = bench.copy(order)
    bench.executor.is_held = True
    bench.copied(order, part)
    bench.host.invalidate("a", "doc")
    dropped = bench.side.drop_orphaned()
    assert not dropped.done()
    bench.executor.release()
    assert dropped.result() == 1
    assert [*bench.tier.names(), *bench.slow_tier.names()] == []


def test_dropped_chunk_does_not_come_back(make_bench: MakeBench) -> None:
    """Neither from a search, nor from a read or a copy that was under way: its KV may be wrong."""
    bench = make_bench(has_slow_tier=True)
    order = bench.store_slow()
    part = bench.copy(order)
    bench.side.drop("a", [KEY])
    bench.tier.put(order.variant.name.rank_blob(0, 1), b"late")
    bench.loaded(order.record_id)
    bench.copied(order, part)
    assert not bench.host.holds("a", KEY)
    assert bench.host.stats().num_reserved == 0
    assert [*bench.tier.names(), *bench.slow_tier.names()] == []


def test_dropped_chunk_that_was_just_found_is_not_read(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.store_cold()
    search = bench.side.seek("a", [KEY])
    bench.side.drop("a", [KEY])
    assert search is not None and not bench.side.is_pending(search)
    assert bench.side.take_orders() == ((), ())


def test_dropped_chunk_that_was_being_written_is_withdrawn(make_bench: MakeBench) -> None:
    """Another chunk is not."""
    bench = make_bench()
    metas = [bench.commit(), bench.commit(key=ChunkKey("k2"))]
    bench.side.drop("a", [KEY])
    for meta in metas:
        bench.write(meta)
    assert bench.cold.find("a", KEY) == []
    assert len(bench.cold.find("a", ChunkKey("k2"))) == 1


def test_flush_waits_for_copies(make_bench: MakeBench) -> None:
    """And for those that failed no longer than for the others."""
    bench = make_bench(has_slow_tier=True)
    order = bench.store_slow()
    flush = bench.side.flush()
    bench.loaded(order.record_id, is_loaded=False)
    bench.side.take_orders()
    assert not flush.done()
    bench.copied(order, WrittenPart(None))
    bench.side.take_orders()
    assert flush.result(timeout=0) is None


def test_what_is_being_dropped_does_not_come_back(make_bench: MakeBench) -> None:
    """A search between the change of the books and that of the tiers would find it, and read it for good."""
    bench = make_bench()
    bench.store_cold()
    bench.side.seek("a", [KEY])
    bench.executor.is_held = True
    bench.host.invalidate("a", "doc")
    bench.side.drop_orphaned()
    assert bench.side.take_orders()[1] == ()
    assert bench.side.seek("a", [KEY]) is None
    bench.executor.release()
    search = bench.side.seek("a", [KEY])
    bench.executor.release()
    assert search and not bench.side.is_pending(search)
    assert bench.side.take_orders()[1] == ()


@pytest.mark.parametrize(
    ("drop", "others"),
    [
        (lambda side: side.drop("a", [KEY]), {("a", OTHER_KEY), ("b", KEY)}),
        (lambda side: side.drop_tenant("a"), {("b", KEY)}),
        (lambda side: side.drop_all(), set()),
    ],
    ids=["chunks", "tenant", "all"],
)
def test_only_what_is_dropped_is_not_sought(
    make_bench: MakeBench, drop: Callable[[ColdSide], object], others: set[tuple[str, ChunkKey]]
) -> None:
    """And that only until it is dropped."""
    bench = make_bench()
    bench.executor.is_held = True
    drop(bench.side)
    everything = [("a", KEY), ("a", OTHER_KEY), ("b", KEY)]
    assert {each for each in everything if bench.side.seek(each[0], [each[1]])} == others
    bench.executor.release()
    assert all(bench.side.seek(tenant, [key]) for tenant, key in everything)


def test_chunk_that_was_invalidated_while_it_was_read_stays_out(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.store_cold()
    bench.side.seek("a", [KEY])
    record_id = bench.read_order()
    bench.host.invalidate_chunks("a", [KEY])
    bench.loaded(record_id)
    assert not bench.host.holds("a", KEY)
    assert bench.host.check() == []


def test_chunk_that_was_invalidated_while_it_was_written_is_withdrawn(make_bench: MakeBench) -> None:
    bench = make_bench()
    meta = bench.commit()
    bench.host.invalidate_chunks("a", [KEY])
    bench.write(meta)
    assert list(bench.tier.names()) == []


def test_invalidated_chunk_leaves_the_cold_tiers_and_may_be_stored_again(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.store_cold()
    bench.host.invalidate_chunks("a", [KEY])
    assert bench.side.drop_orphaned().result() == 1
    bench.write(bench.commit(generation=bench.host.generation("a", "doc", KEY)))
    assert len(bench.cold.find("a", KEY)) == 1


def test_drops_that_failed_are_told_once(make_bench: MakeBench) -> None:
    """Whoever waits for them learns it, whichever thread had ordered them."""
    bench = make_bench()
    bench.side.settled().result()
    bench.cold.close()
    bench.side.drop_tenant("a")
    with pytest.raises(TierError):
        bench.side.settled().result()
    bench.side.settled().result()


# --- the scheduler side with cold tiers -----------------------------------------------------------


def chunk(prefix_hash: str = "p", start: int = 4) -> ChunkRef:
    return ChunkRef(Span(start, start + 8), KEY, prefix_hash, DocumentRef("doc", "v1"))


def forget_host(scheduler: Any) -> None:
    """The host tier evicts everything; what was written behind stays."""
    for record in scheduler.store.variants(TENANT, KEY):
        scheduler.store.discard(record.record_id)


def store_cold(scheduler: Any) -> None:
    scheduler.store_chunk(chunk())
    (meta,) = scheduler.store.variants(TENANT, KEY)
    kv = np.zeros((1, 2, meta.num_tokens, 1, 4), np.float32)
    part = WrittenPart(*scheduler.cold._cold.put_part(meta, 0, kv, None))
    scheduler.side.take_facts(StepFacts(cold={0: ColdFacts(written={meta.record_id: part})}))
    forget_host(scheduler)


def test_request_is_asked_again_until_its_chunk_is_there(cold_scheduler: Any, executor: Any) -> None:
    """Then it is promised KV, and its report names the tier."""
    scheduler = cold_scheduler
    store_cold(scheduler)
    request = scheduler.request([chunk("q", start=12)])
    executor.is_held = True
    assert scheduler.side.look_up(request, 0) is None
    executor.release()
    assert scheduler.side.look_up(request, 0) is None
    (order,) = scheduler.orders().cold_reads
    scheduler.side.take_facts(StepFacts(cold={0: ColdFacts(loaded={order.record_id: LoadedPart(True)})}))
    promised = scheduler.side.look_up(request, 0)
    assert promised == 20
    scheduler.side.admit(request, promised)
    (job,) = scheduler.orders((request, promised)).jobs
    scheduler.side.take_facts(StepFacts(jobs={job.request_id: JobFacts(0.0, 0.0, 0)}))
    report = scheduler.side.finish(request, [])
    (found,) = ReuseReport.from_dict(report[PARAMS_KEY]).chunks
    assert found.tier == "disk"


def test_request_whose_chunk_is_nowhere_is_planned_at_once(cold_scheduler: Any) -> None:
    request = cold_scheduler.request([chunk()])
    assert cold_scheduler.side.look_up(request, 0) == 0


def test_full_compute_waits_for_nothing(cold_scheduler: Any, executor: Any) -> None:
    store_cold(cold_scheduler)
    executor.is_held = True
    request = cold_scheduler.request([chunk()], full_reason=Reason.REUSE_OFF)
    assert cold_scheduler.side.look_up(request, 0) == 0


def test_command_is_answered_when_the_cold_tiers_are_done(cold_scheduler: Any, executor: Any) -> None:
    """Until then the answer is to ask again; in the end nothing is left anywhere."""
    store_cold(cold_scheduler)
    executor.is_held = True
    assert cold_scheduler.control("invalidate", doc_id="doc") == {"awaits": "c"}
    assert cold_scheduler.control("await", control_id="c") == {"awaits": "c"}
    executor.release()
    assert cold_scheduler.control("await", control_id="c") == {"result": 0}
    executor.is_held = False
    assert cold_scheduler.side.look_up(cold_scheduler.request([chunk()]), 0) == 0


def test_invalidated_chunk_is_gone_from_every_tier(cold_scheduler: Any) -> None:
    store_cold(cold_scheduler)
    cold_scheduler.store_chunk(chunk(), full_reason=Reason.REUSE_OFF)
    assert cold_scheduler.control("invalidate_chunks", keys=[KEY]) == {"result": 1}
    assert cold_scheduler.cold._cold.find(TENANT, KEY) == []
    assert cold_scheduler.side.look_up(cold_scheduler.request([chunk()]), 0) == 0


def test_purge_by_another_process_is_finished_by_this_one(cold_scheduler: Any) -> None:
    """Its author may have died before it came to the cold tiers; what the journal tells again at a start is
    over and done with."""
    store_cold(cold_scheduler)
    entry = Entry(action=Action.PURGE, tenant=TENANT)
    cold_scheduler.side._on_applied(entry, False)
    assert len(cold_scheduler.cold._cold.find(TENANT, KEY)) == 1
    cold_scheduler.side._on_applied(entry, True)
    assert cold_scheduler.cold._cold.find(TENANT, KEY) == []


def test_shared_chunk_is_read_from_the_cold_tiers_by_any_tenant(cold_scheduler: Any) -> None:
    """It lies there under the shared tenant."""
    shared = replace(chunk(), is_shared=True)
    cold_scheduler.store_chunk(shared, tenant=SHARED_TENANT)
    (meta,) = cold_scheduler.store.variants(SHARED_TENANT, KEY)
    kv = np.zeros((1, 2, meta.num_tokens, 1, 4), np.float32)
    part = WrittenPart(*cold_scheduler.cold._cold.put_part(meta, 0, kv, None))
    cold_scheduler.side.take_facts(StepFacts(cold={0: ColdFacts(written={meta.record_id: part})}))
    cold_scheduler.store.discard(meta.record_id)
    private = replace(chunk(start=20), key=ChunkKey("private"))
    assert cold_scheduler.side.look_up(cold_scheduler.request([shared, private]), 0) is None
    (order,) = cold_scheduler.orders().cold_reads
    assert order.variant.meta.tenant == SHARED_TENANT


def test_check_repairs_the_books_of_all_tiers(cold_scheduler: Any) -> None:
    """And says what was wrong, what was done, and of the cold tiers how much."""
    store_cold(cold_scheduler)
    cold_scheduler.store_chunk(chunk(), full_reason=Reason.REUSE_OFF)
    cold_scheduler.store._books.used_bytes = 7
    cold_scheduler.cold._cold._tiers["disk"]._used_bytes = 7
    assert len(cold_scheduler.control("check")["result"]) == 2
    told = cold_scheduler.control("check", repair=True)["result"]
    assert told[-1] == "repaired: 1 of 1 faults of the cold tiers"
    assert sum(sentence.startswith("repaired: ") for sentence in told) == 2
    assert cold_scheduler.control("check")["result"] == []


def test_command_that_a_tier_missed_fails(cold_scheduler: Any) -> None:
    cold_scheduler.cold._cold.close()
    reply = cold_scheduler.control("purge")
    assert reply["error"].startswith("purge failed: ")


def test_awaiting_what_is_not_under_way_is_an_error(cold_scheduler: Any) -> None:
    assert "error" in cold_scheduler.control("await", control_id="x")
