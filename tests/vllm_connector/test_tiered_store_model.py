"""The tiered store against a dictionary: host books, cold side and cold tiers under any order of events."""

from __future__ import annotations

import shutil
import tempfile
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cachecraft_rag.chunks import ChunkKey, DocumentRef, RecordMeta
from cachecraft_rag.store.cold import ColdStore
from cachecraft_rag.store.host import HostChunkStore
from cachecraft_rag.store.record_format import KV, ArrayForm
from cachecraft_rag.store.tiers import MemoryTier
from cachecraft_rag.store.tiers.disk import DiskTier
from cachecraft_rag.vllm_connector.cold_side import ColdSide, Orphans
from cachecraft_rag.vllm_connector.steps import ColdFacts, ColdRead, LoadedPart, WrittenPart

NUM_TOKENS = 3
SHAPE = (1, 2, NUM_TOKENS, 1, 4)
FORM = {KV: ArrayForm("float32", SHAPE)}
DOCUMENT_OF = {ChunkKey("k0"): "d0", ChunkKey("k1"): "d0", ChunkKey("k2"): "d1"}

tenants = st.sampled_from(["a", "b"])
keys = st.sampled_from(sorted(DOCUMENT_OF))
prefixes = st.sampled_from(["p0", "p1", "p2"])
documents = st.sampled_from(["d0", "d1"])
Name = tuple[str, ChunkKey, str]


class Later(Executor):
    """Side threads that run when the test says so, each pool in its own order."""

    def __init__(self) -> None:
        self.tasks: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, task: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.tasks.append((future, lambda: task(*args, **kwargs)))
        return future

    def run_next(self) -> None:
        future, task = self.tasks.popleft()
        future.set_result(task())


def kv_of(tenant: str, key: str, prefix: str) -> np.ndarray:
    """What the chunk's KV is, so that any mix-up shows."""
    seed = int.from_bytes(f"{tenant}/{key}/{prefix}".encode(), "little")
    return np.random.default_rng(seed).standard_normal(SHAPE, dtype=np.float32)


class TieredStore(RuleBasedStateMachine):
    """`allowed` is the model: what was committed since its text was dropped last. Nothing else may be found.
    `written` is what must be found: it was flushed, and no tier has lost any of it since."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="tiered-")
        self.tiers = {"disk": DiskTier(f"{self.folder}/blobs", 8 << 20), "redis": MemoryTier(1 << 20)}
        self.cold = ColdStore(self.tiers, "model", 1)
        orphans = Orphans()
        self.host = HostChunkStore(500, 2, orphans.add)
        self.pools: list[Later] = []
        self.side = ColdSide(
            self.cold, self.host, 1, 1.0, orphans, clock=lambda: 0.0, make_executor=self.make_pool
        )
        self.allowed: set[Name] = set()
        self.written: set[Name] = set()
        self.under_way: set[Name] = set()
        self.versions = dict.fromkeys(["d0", "d1"], 0)
        self.facts: deque[ColdFacts] = deque()

    def make_pool(self, num_threads: int) -> Later:
        self.pools.append(Later())
        return self.pools[-1]

    def teardown(self) -> None:
        for tier in self.tiers.values():
            tier.close()
        shutil.rmtree(self.folder)

    # --- requests and workers -----------------------------------------------------------------

    @rule(tenant=tenants, key=keys, prefix=prefixes)
    def commit(self, tenant: str, key: ChunkKey, prefix: str) -> None:
        """A request computed the chunk behind this prefix."""
        doc_id = DOCUMENT_OF[key]
        meta = RecordMeta(
            record_id=self.host.next_record_id(tenant),
            key=key,
            tenant=tenant,
            num_tokens=NUM_TOKENS,
            start=4,
            size_bytes=100,
            prefix_hash=prefix,
            document=DocumentRef(doc_id, f"v{self.versions[doc_id]}"),
            generation=self.host.generation(tenant, doc_id, key),
        )
        if self.host.reserve(meta).accepted:
            assert self.host.commit(meta.record_id, None)
            self.side.keep(meta)
            self.allowed.add((tenant, key, prefix))
            self.under_way.add((tenant, key, prefix))

    @rule(tenant=tenants, key=keys)
    def seek(self, tenant: str, key: ChunkKey) -> None:
        """A request asks for the chunk, and does not wait."""
        self.side.seek(tenant, [key])

    @rule()
    def work(self) -> None:
        """The workers carry out their orders; what they did is heard of later."""
        writes, reads = self.side.take_orders()
        written = {meta.record_id: self.write(meta) for meta in writes}
        loaded: dict[int, LoadedPart] = {}
        for order in reads:
            loaded[order.record_id], part = self.read(order)
            if order.copy_to:
                written[order.record_id] = part
        self.facts.append(ColdFacts(written, loaded))

    def write(self, meta: RecordMeta) -> WrittenPart:
        kv = kv_of(meta.tenant, meta.key, meta.prefix_hash)
        return WrittenPart(*self.cold.put_part(meta, 0, kv, None))

    def read(self, order: ColdRead) -> tuple[LoadedPart, WrittenPart]:
        record = self.cold.load(order.variant, 0, FORM)
        if record is None:
            return LoadedPart(False), WrittenPart(None)
        meta = order.variant.meta
        np.testing.assert_array_equal(record.kv, kv_of(meta.tenant, meta.key, meta.prefix_hash))
        if not order.copy_to:
            return LoadedPart(True), WrittenPart(None)
        return LoadedPart(True), WrittenPart(*self.cold.copy_part(order.variant, 0, record, order.copy_to))

    @precondition(lambda self: self.facts)
    @rule()
    def hear(self) -> None:
        self.side.take_facts({0: self.facts.popleft()})
        self.host.drain_freed()

    @precondition(lambda self: any(pool.tasks for pool in self.pools))
    @rule(data=st.data())
    def run_side_thread(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from([pool for pool in self.pools if pool.tasks])).run_next()

    # --- losses -------------------------------------------------------------------------------

    @rule(tenant=tenants, key=keys)
    def lose_from_host(self, tenant: str, key: ChunkKey) -> None:
        for meta in self.host.variants(tenant, key):
            self.host.discard(meta.record_id)
        self.host.drain_freed()

    @rule(data=st.data(), tier=st.sampled_from(["disk", "redis"]))
    def lose_a_blob(self, data: st.DataObject, tier: str) -> None:
        """A tier evicts one of a record's two blobs."""
        names = sorted(self.tiers[tier].names())
        if names:
            name = data.draw(st.sampled_from(names))
            self.tiers[tier].delete([name])
            key, prefix = name.split("/")[1:3]
            self.written = {each for each in self.written if each[1:] != (key, prefix)}
            self.under_way = {each for each in self.under_way if each[1:] != (key, prefix)}

    # --- changes ------------------------------------------------------------------------------

    @rule(tenant=tenants, doc_id=documents, kept=st.sets(keys))
    def replace(self, tenant: str, doc_id: str, kept: set[ChunkKey]) -> None:
        self.versions[doc_id] += 1
        own = [key for key, owner in DOCUMENT_OF.items() if owner == doc_id]
        self.host.replace(tenant, doc_id, f"v{self.versions[doc_id]}", [key for key in own if key in kept])
        self.side.drop_orphaned()
        self.forget(tenant, [key for key in own if key not in kept])
        # What was planned for the old version and is not written yet need not be.
        self.under_way = {each for each in self.under_way if each[0] != tenant or each[1] not in own}

    @rule(tenant=tenants, doc_id=documents)
    def invalidate(self, tenant: str, doc_id: str) -> None:
        self.host.invalidate(tenant, doc_id, None)
        self.side.drop_orphaned()
        self.forget(tenant, [key for key, owner in DOCUMENT_OF.items() if owner == doc_id])

    @rule(tenant=tenants, key=keys)
    def drop(self, tenant: str, key: ChunkKey) -> None:
        """The KV of a chunk was found to be wrong."""
        for meta in self.host.variants(tenant, key):
            self.host.discard(meta.record_id)
        self.side.drop(tenant, [key])
        self.forget(tenant, [key])

    @rule(tenant=tenants)
    def purge(self, tenant: str) -> None:
        self.host.purge(tenant)
        self.side.drop_orphaned()
        self.side.drop_tenant(tenant)
        self.forget(tenant, list(DOCUMENT_OF))

    def forget(self, tenant: str, dropped: list[ChunkKey]) -> None:
        for names in (self.allowed, self.written, self.under_way):
            names -= {each for each in names if each[0] == tenant and each[1] in dropped}

    # --- what must hold -----------------------------------------------------------------------

    @rule()
    def flush(self) -> None:
        """All is written that nothing has touched since it was computed."""
        flush = self.side.flush()
        while not flush.done():
            self.work()
            while self.facts:
                self.hear()
            for pool in self.pools:
                while pool.tasks:
                    pool.run_next()
        self.written |= self.under_way
        self.under_way = set()
        assert self.written <= self.found_cold()

    @invariant()
    def all_books_are_sound(self) -> None:
        assert self.host.check() == []
        assert self.cold.check() == []

    @invariant()
    def nothing_dropped_is_in_memory(self) -> None:
        found = {
            (tenant, key, meta.prefix_hash)
            for tenant in "ab"
            for key in DOCUMENT_OF
            for meta in self.host.variants(tenant, key)
        }
        assert found <= self.allowed

    @invariant()
    def nothing_dropped_is_in_the_tiers(self) -> None:
        """Once the drops are through, which commands wait for."""
        if not any(pool.tasks for pool in self.pools):
            assert self.found_cold() <= self.allowed

    def found_cold(self) -> set[Name]:
        return {
            (tenant, key, variant.name.prefix_hash)
            for tenant in "ab"
            for key in DOCUMENT_OF
            for variant in self.cold.find(tenant, key)
        }


TieredStore.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestTieredStore = TieredStore.TestCase
