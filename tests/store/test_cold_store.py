"""Variants in cold tiers: written, found, read back, dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from cachecraft_rag.chunks import AttentionProfile, ChunkKey, DocumentRef, RecordMeta
from cachecraft_rag.store.cold import ColdStore, ColdVariant, with_scores
from cachecraft_rag.store.cold_record import ColdRecord
from cachecraft_rag.store.record_format import KV, ArrayForm
from cachecraft_rag.store.tiers import GuardedTier, MemoryTier, TierError

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


def keep(cold: ColdStore, meta: RecordMeta = META, num_ranks: int = 1, seed: int = 0) -> None:
    """Write all parts, then the manifest."""
    parts = [cold.put_part(meta, rank, kv(seed + rank), SCORES) for rank in range(num_ranks)]
    cold.publish(meta, [entry for entry, _ in parts], parts[0][1])


def only(found: list[ColdVariant]) -> ColdVariant:
    (variant,) = found
    return variant


def manifest_of(tier: MemoryTier, variant: ColdVariant) -> bytes | None:
    return tier.get(variant.name.manifest_blob)


def assert_kv(record: ColdRecord | None, seed: int = 0) -> None:
    assert record is not None
    np.testing.assert_array_equal(record.kv, kv(seed))


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
    """A part that was written anew belongs to a manifest that is still to come; the old one goes."""
    cold = cold_over(tiers)
    keep(cold)
    variant = only(cold.find("a", META.key))
    entry, took = cold.put_part(META, 0, kv(1), SCORES)
    assert cold.load(variant, 0, FORM) is None
    assert cold.find("a", META.key) == []
    cold.publish(META, [entry], took)
    assert_kv(cold.load(only(cold.find("a", META.key)), 0, FORM), seed=1)


def test_part_of_another_write_stays_whatever_its_form(tiers: dict[str, MemoryTier]) -> None:
    """The other write may have had another separator behind the chunk."""
    cold = cold_over(tiers)
    keep(cold)
    variant = only(cold.find("a", META.key))
    longer = np.concatenate([kv(), kv()[:, :, :1]], axis=2)
    entry, took = cold.put_part(META, 0, longer, SCORES)
    assert cold.load(variant, 0, FORM) is None
    cold.publish(META, [entry], took)
    record = cold.load(only(cold.find("a", META.key)), 0, {KV: ArrayForm("float32", longer.shape)})
    assert record is not None
    np.testing.assert_array_equal(record.kv, longer)


def test_manifest_without_its_blob_is_not_found(tiers: dict[str, MemoryTier]) -> None:
    """Blobs are evicted one by one. Finding does not use the manifest, so it is evicted next."""
    cold = cold_over(tiers, num_ranks=2)
    keep(cold, num_ranks=2)
    variant = only(cold.find("a", META.key))
    num_hits = tiers["fast"].stats().num_hits
    tiers["fast"].delete([variant.name.rank_blob(1, 2)])
    assert only(cold.find("a", META.key)).tier == "slow"
    assert tiers["fast"].stats().num_hits == num_hits
    tiers["slow"].delete([variant.name.rank_blob(0, 2)])
    assert cold.find("a", META.key) == []


def test_manifest_whose_blob_has_gone_is_dropped_in_that_tier(tiers: dict[str, MemoryTier]) -> None:
    """Evicted after it was found: the next tier is read, and keeps its manifest."""
    cold = cold_over(tiers)
    keep(cold)
    variant = only(cold.find("a", META.key))
    tiers["fast"].delete([variant.name.rank_blob(0, 1)])
    assert_kv(cold.load(variant, 0, FORM))
    assert [manifest_of(tier, variant) for tier in tiers.values()] == [None, variant.manifest]


def test_blob_missing_in_all_tiers_leaves_no_manifest(tiers: dict[str, MemoryTier]) -> None:
    cold = cold_over(tiers, num_ranks=2)
    keep(cold, num_ranks=2)
    variant = only(cold.find("a", META.key))
    for tier in tiers.values():
        tier.delete([variant.name.rank_blob(1, 2)])
    assert_kv(cold.load(variant, 0, FORM))
    assert cold.load(variant, 1, FORM) is None
    assert [manifest_of(tier, variant) for tier in tiers.values()] == [None, None]


class WrittenMeanwhile(MemoryTier):
    """A tier in which something is written right after somebody has looked in vain."""

    write: Callable[[], None] | None = None

    def get(self, name: str) -> bytes | None:
        blob = super().get(name)
        if blob is None and self.write is not None:
            write, self.write = self.write, None
            write()
        return blob


@pytest.mark.parametrize("seed", [0, 1])
def test_manifest_read_before_the_record_was_written_anew_harms_nothing(seed: int) -> None:
    """The reader saw no blob, but now there is one: the new record stays, even if it is the same KV again."""
    tier = WrittenMeanwhile(1 << 20)
    cold = cold_over({"fast": tier})
    keep(cold)
    old = only(cold.find("a", META.key))
    tier.delete([old.name.rank_blob(0, 1)])
    tier.write = lambda: keep(cold, seed=seed)
    assert cold.load(old, 0, FORM) is None
    assert_kv(cold.load(only(cold.find("a", META.key)), 0, FORM), seed=seed)


def test_another_write_in_the_next_tier_stays(tiers: dict[str, MemoryTier]) -> None:
    """What the first tier's manifest says is nothing against the second tier's."""
    keep(cold_over({"slow": tiers["slow"]}), seed=1)
    keep(cold_over({"fast": tiers["fast"]}))
    cold = cold_over(tiers)
    variant = only(cold.find("a", META.key))
    tiers["fast"].delete([variant.name.rank_blob(0, 1)])
    assert cold.load(variant, 0, FORM) is None
    assert_kv(cold.load(only(cold.find("a", META.key)), 0, FORM), seed=1)


def test_tier_that_cannot_be_asked_keeps_its_manifest(tiers: dict[str, MemoryTier]) -> None:
    """A timeout is not a missing blob."""
    cold = cold_over(tiers)
    keep(cold)
    variant = only(cold.find("a", META.key))

    class Slow(MemoryTier):
        def get(self, name: str) -> bytes | None:
            raise TierError("timeout")

        def discard(self, name: str, seen: bytes) -> bool:
            return tiers["fast"].discard(name, seen)

    asked = cold_over({"fast": GuardedTier(Slow(0)), "slow": tiers["slow"]})
    assert_kv(asked.load(variant, 0, FORM))
    assert manifest_of(tiers["fast"], variant) == variant.manifest


@pytest.mark.parametrize(
    "scores",
    [None, SCORES[:-1], SCORES.astype(np.float16), SCORES[None]],
    ids=["none", "few", "half", "flat"],
)
def test_scores_of_another_form_are_damage(tiers: dict[str, MemoryTier], scores: np.ndarray | None) -> None:
    """The planner would fail over them later, in the middle of a request."""
    cold = cold_over(tiers)
    entry, took = cold.put_part(META, 0, kv(), scores)
    cold.publish(META, [entry], took)
    assert cold.load(only(cold.find("a", META.key)), 0, FORM) is None
    assert [list(tier.names()) for tier in tiers.values()] == [[], []]


def test_record_without_a_profile_needs_no_scores(tiers: dict[str, MemoryTier]) -> None:
    cold = cold_over(tiers)
    meta = replace(META, profile=None)
    entry, took = cold.put_part(meta, 0, kv(), None)
    cold.publish(meta, [entry], took)
    record = cold.load(only(cold.find("a", META.key)), 0, FORM)
    assert_kv(record)
    assert record is not None and record.token_scores is None


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


# --- copies in faster tiers ------------------------------------------------------------------------


def keep_slow(tiers: dict[str, MemoryTier], num_ranks: int = 1, codec: str = "raw") -> None:
    keep(cold_over({"slow": tiers["slow"]}, num_ranks, codec), num_ranks=num_ranks)


def copy(cold: ColdStore, variant: ColdVariant, rank: int = 0) -> None:
    record = cold.load(variant, rank, FORM)
    assert record is not None
    entry, took = cold.copy_part(variant, rank, record, cold.faster_tiers(variant))
    assert (entry, took) == (variant.blobs[rank], ("fast",))


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_used_record_is_copied_to_the_faster_tier(tiers: dict[str, MemoryTier], codec: str) -> None:
    """Byte for byte, so it lives no longer there, and what is not exact stays so."""
    keep_slow(tiers, codec=codec)
    cold = cold_over(tiers, codec=codec)
    variant = only(cold.find("a", META.key))
    assert (variant.tier, cold.faster_tiers(variant)) == ("slow", ("fast",))
    copy(cold, variant)
    assert only(cold.find("a", META.key)).tier == "slow"
    cold.promote(variant, ["fast"])
    promoted = only(cold.find("a", META.key))
    assert replace(promoted.meta, profile=None) == replace(variant.meta, profile=None)
    assert promoted.meta.prefix_is_exact == (codec == "raw")
    assert (promoted.tier, cold.faster_tiers(promoted)) == ("fast", ())
    assert {n: tiers["fast"].get(n) for n in tiers["fast"].names()} == {
        n: tiers["slow"].get(n) for n in tiers["slow"].names()
    }
    assert cold.load(promoted, 0, FORM) is not None


def test_copy_of_some_ranks_is_not_found(tiers: dict[str, MemoryTier]) -> None:
    """Not even behind a manifest that was left there when the blobs were evicted."""
    keep(cold_over(tiers, num_ranks=2), num_ranks=2)
    cold = cold_over(tiers, num_ranks=2)
    old = only(cold.find("a", META.key))
    tiers["fast"].delete([old.name.rank_blob(rank, 2) for rank in range(2)])
    variant = only(cold.find("a", META.key))
    copy(cold, variant, 0)
    assert only(cold.find("a", META.key)).tier == "slow"
    copy(cold, variant, 1)
    cold.promote(variant, ["fast"])
    assert only(cold.find("a", META.key)).tier == "fast"


@pytest.mark.parametrize("seed", [None, 1])
def test_dropped_record_is_not_promoted(tiers: dict[str, MemoryTier], seed: int | None) -> None:
    """Nor one that was written anew in the meantime: the copies are not of it."""
    keep_slow(tiers)
    cold = cold_over(tiers)
    variant = only(cold.find("a", META.key))
    copy(cold, variant)
    cold_over({"slow": tiers["slow"]}).drop("a", [META.key])
    if seed is not None:
        keep(cold_over({"slow": tiers["slow"]}), seed=seed)
    cold.promote(variant, ["fast"])
    assert manifest_of(tiers["fast"], variant) is None


def test_blob_already_in_the_faster_tier_is_not_copied_again(tiers: dict[str, MemoryTier]) -> None:
    """As after a copy whose manifest was never written."""
    keep_slow(tiers)
    cold = cold_over(tiers)
    variant = only(cold.find("a", META.key))
    copy(cold, variant)
    record = cold.load(variant, 0, FORM)
    assert record is not None and record.tier == "fast"
    full = cold_over({"fast": Broken(0), "slow": tiers["slow"]})
    assert full.copy_part(variant, 0, record, ["fast"]) == (variant.blobs[0], ("fast",))


def test_faster_tier_without_room_takes_no_copy(tiers: dict[str, MemoryTier]) -> None:
    keep_slow(tiers)
    cold = cold_over({"fast": MemoryTier(100), "slow": tiers["slow"]})
    variant = only(cold.find("a", META.key))
    record = cold.load(variant, 0, FORM)
    assert record is not None
    assert cold.copy_part(variant, 0, record, ["fast"]) == (variant.blobs[0], ())


def test_tier_that_only_the_workers_have_is_passed_over(tiers: dict[str, MemoryTier]) -> None:
    """The scheduler side may not have been able to open it."""
    cold = cold_over({"slow": tiers["slow"]})
    entry, _ = cold.put_part(META, 0, kv(), SCORES)
    cold.publish(META, [entry], ["fast", "slow"])
    assert only(cold.find("a", META.key)).tier == "slow"


def test_withdrawing_a_copy_leaves_the_original(tiers: dict[str, MemoryTier]) -> None:
    keep_slow(tiers)
    cold = cold_over(tiers)
    variant = only(cold.find("a", META.key))
    copy(cold, variant)
    cold.withdraw(variant.meta, ["fast"])
    assert list(tiers["fast"].names()) == []
    assert only(cold.find("a", META.key)).tier == "slow"
