"""What one rank's side threads read, write and copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

from cachecraft_rag.chunks import AttentionProfile, ChunkKey, RecordMeta
from cachecraft_rag.store.cold import ColdStore
from cachecraft_rag.store.tiers import MemoryTier
from cachecraft_rag.store.tiers.base import Blob
from cachecraft_rag.vllm_connector import cold_io
from cachecraft_rag.vllm_connector.cold_io import ColdIO
from cachecraft_rag.vllm_connector.steps import ColdFacts, ColdRead, LoadedPart

Tiers = dict[str, "HeldTier"]

NUM_TOKENS = 5
SHAPE = (2, 2, NUM_TOKENS, 1, 4)
KV = np.random.default_rng(0).standard_normal(SHAPE, dtype=np.float32)
SCORES = np.arange(NUM_TOKENS, dtype=np.float32)
META = RecordMeta(
    record_id=7,
    key=ChunkKey("k1"),
    tenant="a",
    num_tokens=NUM_TOKENS,
    start=12,
    size_bytes=320,
    prefix_hash="p1",
    profile=AttentionProfile(0.25, 0.5, (), SCORES),
)
PATIENT_S = 30.0


class HeldTier(MemoryTier):
    """A tier whose writes wait until they are let go."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.go = Event()
        self.go.set()

    def put(self, name: str, value: Blob) -> bool:
        assert self.go.wait(PATIENT_S)
        return super().put(name, value)


@pytest.fixture
def tiers() -> Tiers:
    return {"disk": HeldTier(), "redis": HeldTier()}


@pytest.fixture
def io(tiers: Tiers) -> Iterator[ColdIO]:
    io = ColdIO(ColdStore(tiers, "model", 1), 0)
    yield io
    for tier in tiers.values():
        tier.go.set()
    io.close()


def wait_for(io: ColdIO, is_done: Callable[[ColdFacts], object]) -> tuple[dict[int, Any], ColdFacts]:
    """Everything that was finished, once it is enough."""
    kept: dict[int, Any] = {}
    written: dict[int, Any] = {}
    loaded: dict[int, Any] = {}
    for _ in range(int(PATIENT_S / 0.001)):
        more, facts = io.take_done()
        kept |= more
        written |= facts.written
        loaded |= facts.loaded
        if is_done(ColdFacts(written, loaded)):
            return kept, ColdFacts(written, loaded)
        Event().wait(0.001)
    raise AssertionError(f"only {written} and {loaded} were finished")


def store_slow(tiers: Tiers) -> ColdRead:
    """A record in the slower tier alone; the order to read it."""
    slow = ColdStore({"redis": tiers["redis"]}, "model", 1)
    entry, took = slow.put_part(META, 0, KV, SCORES)
    slow.publish(META, [entry], took)
    (variant,) = ColdStore(tiers, "model", 1).find("a", META.key)
    return ColdRead(3, variant, ("disk",))


def read(io: ColdIO, order: ColdRead) -> None:
    io.read(order, SHAPE, torch.float32)


def assert_loaded(part: LoadedPart, kept: Mapping[int, Any]) -> None:
    assert part.is_loaded and part.profile is not None
    np.testing.assert_array_equal(part.profile.token_scores, SCORES)
    start, kv = kept[3]
    assert start == META.start
    np.testing.assert_array_equal(kv.numpy(), KV)


def test_record_is_written_and_read_back(io: ColdIO, tiers: Tiers) -> None:
    io.write(META, torch.from_numpy(KV))
    _, facts = wait_for(io, lambda facts: facts.written)
    part = facts.written[META.record_id]
    assert part.tiers == ("disk", "redis")
    cold = ColdStore(tiers, "model", 1)
    cold.publish(META, [part.entry], part.tiers)
    (variant,) = cold.find("a", META.key)
    read(io, ColdRead(3, variant))
    kept, facts = wait_for(io, lambda facts: facts.loaded)
    assert_loaded(facts.loaded[3], kept)
    assert facts.written == {}


def test_record_is_there_before_its_copy(io: ColdIO, tiers: Tiers) -> None:
    """A faster tier that takes its time costs the reader nothing."""
    order = store_slow(tiers)
    tiers["disk"].go.clear()
    read(io, order)
    kept, facts = wait_for(io, lambda facts: facts.loaded)
    assert_loaded(facts.loaded[3], kept)
    assert facts.written == {}
    tiers["disk"].go.set()
    _, facts = wait_for(io, lambda facts: facts.written)
    assert (facts.written[3].entry, facts.written[3].tiers) == (order.variant.blobs[0], ("disk",))
    blob = order.variant.name.rank_blob(0, 1)
    assert list(tiers["disk"].names()) == [blob]
    assert tiers["disk"].get(blob) == tiers["redis"].get(blob)


def test_copy_of_what_could_not_be_read_is_answered_too(io: ColdIO, tiers: Tiers) -> None:
    """Or the scheduler side would wait for it for ever."""
    order = store_slow(tiers)
    tiers["redis"].delete([*tiers["redis"].names()])
    read(io, order)
    _, facts = wait_for(io, lambda facts: facts.written and facts.loaded)
    assert not facts.loaded[3].is_loaded
    assert (facts.written[3].entry, facts.written[3].tiers) == (None, ())


def test_writes_and_copies_share_one_limit(io: ColdIO, tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits is kept alive; beyond the limit it is left out, and said so."""
    order = store_slow(tiers)
    monkeypatch.setattr(cold_io, "MAX_WAITING_WRITE_BYTES", KV.nbytes)
    tiers["disk"].go.clear()
    io.write(META, torch.from_numpy(KV))
    io.write(replace(META, record_id=8), torch.from_numpy(KV))
    read(io, order)
    _, facts = wait_for(io, lambda facts: len(facts.written) == 2)
    assert {record_id: part.tiers for record_id, part in facts.written.items()} == {8: (), 3: ()}
    tiers["disk"].go.set()
    _, facts = wait_for(io, lambda facts: facts.written)
    assert facts.written[META.record_id].tiers == ("disk", "redis")
