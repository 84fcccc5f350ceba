"""Variants of chunks in the cold tiers: disk and Redis, which outlive a process and are shared by many.

A variant is one blob per tensor-parallel rank and a manifest, written last (`record_format`). Its name
starts with the tenant's part and the chunk's key, so that one prefix finds all variants of a chunk,
and another all of a tenant. Everything here blocks: for side threads only.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cachecraft_rag.chunks import AttentionProfile, ChunkKey, RecordMeta
from cachecraft_rag.store.codecs import Array, Buffer, get_codec
from cachecraft_rag.store.cold_facts import facts_of, meta_of
from cachecraft_rag.store.cold_record import TOKEN_SCORES, ColdRecord, load_record
from cachecraft_rag.store.record_format import (
    KV,
    ArrayForm,
    BlobEntry,
    Expected,
    Manifest,
    RecordDamagedError,
    RecordFacts,
    VariantName,
    decode_manifest,
    encode,
    encode_manifest,
    entry_of,
)
from cachecraft_rag.store.tiers import BlobTier, TierError

logger = logging.getLogger(__name__)

_DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class ColdVariant:
    """A variant that a cold tier holds, by its manifest.

    Attributes:
        tier: name of the first tier that holds it.
        meta: as it was stored, with `record_id` and `generation` 0 and a profile without token scores.
        manifest: as it was read.
    """

    name: VariantName
    tier: str
    meta: RecordMeta
    blobs: tuple[BlobEntry, ...]
    manifest: bytes = field(repr=False)


class ColdStore:
    """Variants by chunk, over tiers that are asked in order and that all ranks share.

    A blob may be evicted, or written anew, under a manifest that stays: whoever reads compares. A manifest
    that does not fit is dropped where it lies, if it still is the one that was read, so that one written
    meanwhile stays.

    Args:
        tiers: by name, the fastest first; each answers faults by itself (`GuardedTier`).
        namespace: fingerprint of the model and of its KV's layout.
        num_ranks: tensor-parallel size; other sizes' blobs are not found.
        ttl_s: seconds after which a variant is not found any more.
        clock: seconds that all processes agree on.
    """

    def __init__(
        self,
        tiers: Mapping[str, BlobTier],
        namespace: str,
        num_ranks: int,
        codec: str = "raw",
        ttl_s: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._ttl_s = math.inf if ttl_s is None else ttl_s
        self._clock = clock
        self._tiers = dict(tiers)
        # The number of ranks is in the manifest's name too: two sizes must not write over each other.
        self._namespace = _digest(f"{namespace} {num_ranks}")
        self._num_ranks = num_ranks
        self._codec = codec
        self._is_exact = get_codec(codec).is_exact

    def name_of(self, meta: RecordMeta) -> VariantName:
        return VariantName(self._tenant_part(meta.tenant), meta.key, meta.prefix_hash)

    # --- reading ------------------------------------------------------------------------------

    def find(self, tenant: str, key: ChunkKey) -> list[ColdVariant]:
        """All variants of a chunk, each from the first tier that holds it whole.

        Tiers that cannot be asked, and manifests that cannot be used, are passed over.
        """
        found: dict[VariantName, ColdVariant] = {}
        for tier_name, tier in self._tiers.items():
            try:
                for name in self._whole_variants(tier, f"{self._tenant_part(tenant)}/{key}/"):
                    if name not in found and (variant := self._read(tier_name, tier, name, tenant)):
                        found[name] = variant
            except TierError as error:
                logger.warning("the %s tier could not be searched: %s", tier_name, error)
        return list(found.values())

    def load(self, variant: ColdVariant, rank: int, arrays: Mapping[str, Any]) -> ColdRecord | None:
        """One rank's record, from the first tier that holds it whole; None if none does.

        Args:
            arrays: forms that its arrays must have, see `record_format.Expected`; that of the token scores
                need not be said.
        """
        if variant.meta.profile is not None:
            arrays = {**arrays, TOKEN_SCORES: ArrayForm("float32", (variant.meta.num_tokens,))}
        expected = Expected(
            variant=variant.name,
            rank=rank,
            num_ranks=self._num_ranks,
            num_tokens=variant.meta.num_tokens,
            arrays=arrays,
            entry=variant.blobs[rank],
        )
        for tier_name, tier in self._tiers.items():
            try:
                record = load_record(tier_name, tier, expected)
                if record is not None:
                    return record
                tier.discard(variant.name.manifest_blob, variant.manifest)
            except TierError as error:
                # Nothing is known of what it holds, so nothing is dropped.
                logger.warning("%s could not be read from %s: %s", expected.blob_name, tier_name, error)
        return None

    def faster_tiers(self, variant: ColdVariant) -> tuple[str, ...]:
        """Tiers that are asked before the one that holds it: where it should be copied when it is used."""
        names = list(self._tiers)
        return tuple(names[: names.index(variant.tier)])

    # --- writing ------------------------------------------------------------------------------

    def put_part(
        self, meta: RecordMeta, rank: int, kv: Array, token_scores: Array | None
    ) -> tuple[BlobEntry, tuple[str, ...]]:
        """Write one rank's share; what the manifest says of it, and the tiers that took it."""
        facts = RecordFacts(
            variant=self.name_of(meta), rank=rank, num_ranks=self._num_ranks, num_tokens=meta.num_tokens
        )
        arrays = {KV: kv} if token_scores is None else {KV: kv, TOKEN_SCORES: token_scores}
        blob: list[Buffer] = encode(facts, arrays, self._codec)
        took = tuple(name for name, tier in self._tiers.items() if tier.put(facts.blob_name, blob))
        return entry_of(blob), took

    def publish(self, meta: RecordMeta, blobs: Sequence[BlobEntry], tier_names: Iterable[str]) -> None:
        """Write the manifest: from here on the variant is found in these tiers."""
        name = self.name_of(meta)
        # What a lossy codec gives back is not the KV that was computed.
        kept = replace(meta, prefix_is_exact=meta.prefix_is_exact and self._is_exact)
        manifest = Manifest(
            variant=name,
            num_tokens=meta.num_tokens,
            blobs=tuple(blobs),
            meta={**facts_of(kept), "stored_s": self._clock()},
        )
        blob = encode_manifest(manifest)
        for tier in self._among(tier_names).values():
            tier.put(name.manifest_blob, blob)

    def copy_part(
        self, variant: ColdVariant, rank: int, record: ColdRecord, tier_names: Iterable[str]
    ) -> tuple[BlobEntry, tuple[str, ...]]:
        """Write one rank's share that was read into other tiers, as it is; answers as `put_part` does."""
        blob_name = variant.name.rank_blob(rank, self._num_ranks)
        took = tuple(
            name
            for name, tier in self._among(tier_names).items()
            if name == record.tier or tier.put(blob_name, record.blob)
        )
        return variant.blobs[rank], took

    def promote(self, variant: ColdVariant, tier_names: Iterable[str]) -> None:
        """Write the manifest, as it is, into tiers that hold copies of all ranks' shares.

        Not if it has left the tier in which it was found: then it was dropped there, or written anew.
        """
        manifest_blob = variant.name.manifest_blob
        if self._tiers[variant.tier].get(manifest_blob) == variant.manifest:
            for tier in self._among(tier_names).values():
                tier.put(manifest_blob, variant.manifest)

    def withdraw(self, meta: RecordMeta, tier_names: Iterable[str] | None = None) -> None:
        """Drop one variant from some tiers, or from all."""
        tiers = self._tiers if tier_names is None else self._among(tier_names)
        _drop_prefix(tiers.values(), f"{self.name_of(meta)}/")

    def drop(self, tenant: str, keys: Iterable[ChunkKey]) -> int:
        """Drop all variants of these chunks from all tiers; returns how many variants there were.

        Raises:
            TierError: a tier could not be asked, so that they may still be there.
        """
        part = self._tenant_part(tenant)
        return sum(_drop_prefix(self._tiers.values(), f"{part}/{key}/") for key in keys)

    def drop_tenant(self, tenant: str) -> int:
        """`drop`, of everything of a tenant."""
        return _drop_prefix(self._tiers.values(), f"{self._tenant_part(tenant)}/")

    def drop_all(self, tier_names: Iterable[str] | None = None) -> int:
        """`drop`, of everything of this model; from all tiers, or those named."""
        names = self._tiers if tier_names is None else self._tiers.keys() & set(tier_names)
        return _drop_prefix([self._tiers[name] for name in names], f"{self._namespace}.")

    # --- upkeep -------------------------------------------------------------------------------

    def flush(self) -> None:
        for tier in self._tiers.values():
            tier.flush()

    def stats(self) -> dict[str, Any]:
        """`TierStats` by the tier's name."""
        return {name: tier.stats() for name, tier in self._tiers.items()}

    def check(self, repair: bool = False) -> list[str]:
        return [f"{name}: {fault}" for name, tier in self._tiers.items() for fault in tier.check(repair)]

    def close(self) -> None:
        for tier in self._tiers.values():
            tier.close()

    def _tenant_part(self, tenant: str) -> str:
        return f"{self._namespace}.{_digest(tenant)}"

    def _among(self, tier_names: Iterable[str]) -> dict[str, BlobTier]:
        """Those of these tiers that this process has too."""
        wanted = frozenset(tier_names)
        return {name: tier for name, tier in self._tiers.items() if name in wanted}

    def _whole_variants(self, tier: BlobTier, prefix: str) -> Iterator[VariantName]:
        """Variants of which a tier lists the manifest and all ranks' blobs."""
        listed = set(tier.names(prefix))
        for blob_name in listed:
            *variant, last = blob_name.split("/")
            if last == "manifest" and len(variant) == 3 and all(variant):
                name = VariantName(*variant)
                if all(name.rank_blob(rank, self._num_ranks) in listed for rank in range(self._num_ranks)):
                    yield name

    def _read(self, tier_name: str, tier: BlobTier, name: VariantName, tenant: str) -> ColdVariant | None:
        blob = tier.get(name.manifest_blob)
        if blob is None:
            return None
        try:
            manifest = decode_manifest(blob, name, self._num_ranks)
            if self._clock() - float(manifest.meta["stored_s"]) >= self._ttl_s:
                return None
            return ColdVariant(name, tier_name, meta_of(manifest, tenant), manifest.blobs, blob)
        except (RecordDamagedError, LookupError, TypeError, ValueError) as error:
            logger.warning("%s in %s cannot be used: %s", name.manifest_blob, tier_name, error)
            return None


def _drop_prefix(tiers: Iterable[BlobTier], prefix: str) -> int:
    num_variants = 0
    for tier in tiers:
        blobs = sorted(tier.names(prefix), key=lambda name: not name.endswith("/manifest"))
        num_variants = max(num_variants, sum(name.endswith("/manifest") for name in blobs))
        if blobs:
            tier.delete(blobs)
    return num_variants


def with_scores(meta: RecordMeta, token_scores: Array | None) -> AttentionProfile | None:
    """The profile of a record that was read, its token scores included."""
    if meta.profile is None or token_scores is None:
        return None
    return replace(meta.profile, token_scores=token_scores)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()
