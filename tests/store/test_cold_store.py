"""Variants in cold tiers: written, found, read back, dropped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from cachecraft_rag.chunks import AttentionProfile, ChunkKey, DocumentRef, RecordMeta
from cachecraft_rag.store.cold import ColdStore, ColdVariant, with_scores
from cachecraft_rag.store.record_format import KV, ArrayForm
from cachecraft_rag.store.tiers import MemoryTier, TierError

NUM_TOKENS = 5
SHAPE = (2, 2, NUM_TOKENS, 1, 4)
FORM = {KV: ArrayForm("float32", SHAPE)}
SCORES = np.arange(NUM_TOKENS, dtype=np.float32)
META = RecordMeta(
    record_id=7,
    key=ChunkKey("k1"),
    tenant="a",
    num_tokens=NUM_TOKENS,
    start=12,
    size_bytes=320,
    prefix_hash="p1",
    prefix_chunks=(ChunkKey("k0"),),
    separator=(3,),
    document=DocumentRef("doc", "v1"),
    generation=4,
    profile=AttentionProfile(0.25, 0.5, (0.125,), SCORES),
)


@pytest.fixture
def tiers() -> dict[str, MemoryTier]:
    return {"fast": MemoryTier(1 << 20), "slow": MemoryTier(1 << 20)}


def cold_over(tiers: dict[str, MemoryTier], num_ranks: int = 1, codec: str = "raw") -> ColdStore:
    return ColdStore(tiers, "model", num_ranks, codec)


def kv(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPE, dtype=np.float32)


def keep(cold: ColdStore, meta: RecordMeta = META, num_ranks: int = 1) -> None:
    """Write all parts, then the manifest."""
    parts = [cold.put_part(meta, rank, kv(rank), SCORES) for rank in range(num_ranks)]
    cold.publish(meta, [entry for entry, _ in parts], parts[0][1])


def only(found: list[ColdVariant]) -> ColdVariant:
    (variant,) = found
    return variant


def test_what_was_kept_is_found_and_read_back(tiers: dict[str, MemoryTier]) -> None:
    """All facts of the record but its id and generation, which are this process's own."""
    cold = cold_over(tiers)
    keep(cold)
    variant = only(cold.find("a", META.key))
    assert variant.tier == "fast"
    assert replace(variant.meta, profile=None) == replace(META, record_id=0, generation=0, profile=None)
    record = cold.load(variant, 0, FORM)
    assert record is not None
    np.testing.assert_array_equal(record.kv, kv())
    profile = with_scores(variant.meta, record.token_scores)
    assert profile is not None
    assert (profile.inter_mean, profile.intra_mean, profile.inter_by_prefix) == (0.25, 0.5, (0.125,))
    np.testing.assert_array_equal(profile.token_scores, SCORES)


def test_parts_without_a_manifest_are_not_found(tiers: dict[str, MemoryTier]) -> None:
    """As after a crash between them."""
    cold = cold_over(tiers)
    cold.put_part(META, 0, kv(), SCORES)
    assert cold.find("a", META.key) == []


def test_each_rank_reads_its_own_part(tiers: dict[str, MemoryTier]) -> None:
    cold = cold_over(tiers, num_ranks=2)
    keep(cold, num_ranks=2)
    variant = only(cold.find("a", META.key))
    for rank in range(2):
        record = cold.load(variant, rank, FORM)
        assert record is not None
        np.testing.assert_array_equal(record.kv, kv(rank))


def test_other_models_sizes_tenants_and_chunks_are_not_found(tiers: dict[str, MemoryTier]) -> None:
    keep(cold_over(tiers))
    assert cold_over(tiers, num_ranks=2).find("a", META.key) == []
    assert ColdStore(tiers, "other model", 1).find("a", META.key) == []
    assert cold_over(tiers).find("b", META.key) == []
    assert cold_over(tiers).find("a", ChunkKey("k")) == []


def test_the_slower_tier_answers_where_the_faster_one_forgot(tiers: dict[str, MemoryTier]) -> None:
    cold = cold_over(tiers)
    keep(cold)
    tiers["fast"].delete(list(tiers["fast"].names()))
    variant = only(cold.find("a", META.key))
    assert variant.tier == "slow"
    assert cold.load(variant, 0, FORM) is not None


def test_damaged_part_is_no_answer_and_is_dropped(tiers: dict[str, MemoryTier]) -> None:
    """Its neighbour in the next tier is read instead."""
    cold = cold_over(tiers)
    keep(cold)
    name = cold.name_of(META).rank_blob(0, 1)
    blob = bytearray(tiers["fast"].get(name) or b"")
    blob[-1] ^= 1
    tiers["fast"].put(name, bytes(blob))
    record = cold.load(only(cold.find("a", META.key)), 0, FORM)
    assert record is not None
    np.testing.assert_array_equal(record.kv, kv())
    assert list(tiers["fast"].names()) == []
    assert only(cold.find("a", META.key)).tier == "slow"


def test_part_of_another_write_than_the_manifest_is_no_answer(tiers: dict[str, MemoryTier]) -> None:
    """A part that was written anew belongs to a manifest that is still to come."""
    cold = cold_over(tiers)
    keep(cold)
    variant = only(cold.find("a", META.key))
    cold.put_part(META, 0, kv(1), SCORES)
    assert cold.load(variant, 0, FORM) is None


def test_lossy_kv_is_never_exact(tiers: dict[str, MemoryTier]) -> None:
    cold = cold_over(tiers, codec="int8")
    keep(cold)
    assert not only(cold.find("a", META.key)).meta.prefix_is_exact


def test_drop_takes_all_variants_of_a_chunk_and_nothing_else(tiers: dict[str, MemoryTier]) -> None:
    cold = cold_over(tiers)
    others = [replace(META, key=ChunkKey("k2")), replace(META, tenant="b")]
    for meta in (META, replace(META, prefix_hash="p2"), *others):
        keep(cold, meta)
    assert cold.drop("a", [META.key]) == 2
    assert cold.find("a", META.key) == []
    assert [len(cold.find(meta.tenant, meta.key)) for meta in others] == [1, 1]
    assert cold.drop_tenant("a") == 1
    assert [len(cold.find(meta.tenant, meta.key)) for meta in others] == [0, 1]


def test_withdraw_leaves_the_other_variants(tiers: dict[str, MemoryTier]) -> None:
    cold = cold_over(tiers)
    keep(cold)
    keep(cold, replace(META, prefix_hash="p2"))
    cold.withdraw(META)
    assert only(cold.find("a", META.key)).meta.prefix_hash == "p2"


def test_blobs_of_strangers_are_passed_over(tiers: dict[str, MemoryTier]) -> None:
    cold = cold_over(tiers)
    keep(cold)
    prefix = str(cold.name_of(META)).rsplit("/", 1)[0]
    for name in (f"{prefix}//manifest", f"{prefix}/p9/manifest", f"{prefix}/p8/x/manifest"):
        tiers["fast"].put(name, b"no manifest")
    assert only(cold.find("a", META.key)).meta.prefix_hash == "p1"


class Broken(MemoryTier):
    """A tier whose medium has failed."""

    def names(self, prefix: str = "") -> Iterator[str]:
        raise TierError("gone")


def test_a_failed_tier_hides_no_other(tiers: dict[str, MemoryTier]) -> None:
    keep(cold_over(tiers))
    cold = cold_over({"broken": Broken(1 << 20), **tiers})
    assert only(cold.find("a", META.key)).tier == "fast"


def test_a_drop_that_a_tier_missed_says_so(tiers: dict[str, MemoryTier]) -> None:
    """Or the caller would take it for complete."""
    cold = cold_over({**tiers, "broken": Broken(1 << 20)})
    with pytest.raises(TierError):
        cold.drop("a", [META.key])


def test_variants_expire(tiers: dict[str, MemoryTier]) -> None:
    """Counted from when they were stored, whoever asks."""
    keep(ColdStore(tiers, "model", 1, clock=lambda: 100.0))
    young, old = (
        ColdStore(tiers, "model", 1, ttl_s=10.0, clock=lambda now=now: now) for now in (109.0, 110.0)
    )
    assert len(young.find("a", META.key)) == 1
    assert old.find("a", META.key) == []
