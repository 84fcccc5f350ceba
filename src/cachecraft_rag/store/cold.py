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
from dataclasses import dataclass, replace
from typing import Any

from cachecraft_rag.chunks import AttentionProfile, ChunkKey, DocumentRef, RecordMeta
from cachecraft_rag.store.codecs import Array, Buffer, get_codec
from cachecraft_rag.store.record_format import (
    KV,
    BlobEntry,
    Expected,
    Manifest,
    RecordDamagedError,
    RecordFacts,
    StoredRecord,
    VariantName,
    decode,
    decode_manifest,
    encode,
    encode_manifest,
    entry_of,
)
from cachecraft_rag.store.tiers import BlobTier, TierError

logger = logging.getLogger(__name__)

TOKEN_SCORES = "token_scores"
"""Name of the section with the profile's scores, float32 (num_tokens,)."""
_DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class ColdVariant:
    """A variant that a cold tier holds, by its manifest.

    Attributes:
        tier: name of the first tier that holds it.
        meta: as it was stored, with `record_id` and `generation` 0 and a profile without token scores.
    """

    name: VariantName
    tier: str
    meta: RecordMeta
    blobs: tuple[BlobEntry, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ColdRecord:
    """One rank's KV of a variant, read and checked; arrays may be views of the blob."""

    kv: Array
    token_scores: Array | None


class ColdStore:
    """Variants by chunk, over tiers that are asked in order.

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
        """All variants of a chunk, each from the first tier that holds it; damaged ones are dropped."""
        found: dict[VariantName, ColdVariant] = {}
        for tier_name, tier in self._tiers.items():
            for name in self._variants(tier, f"{self._tenant_part(tenant)}/{key}/"):
                if name not in found and (variant := self._read(tier_name, tier, name, tenant)):
                    found[name] = variant
        return list(found.values())

    def load(self, variant: ColdVariant, rank: int, arrays: Mapping[str, Any]) -> ColdRecord | None:
        """One rank's record, from the first tier that holds it whole; None if none does.

        Args:
            arrays: forms that its arrays must have, see `record_format.Expected`.
        """
        expected = Expected(
            variant=variant.name,
            rank=rank,
            num_ranks=self._num_ranks,
            num_tokens=variant.meta.num_tokens,
            arrays=arrays,
            entry=variant.blobs[rank],
        )
        for tier_name, tier in self._tiers.items():
            blob = tier.get(expected.blob_name)
            if blob is None:
                continue
            try:
                return _record(decode(blob, expected))
            except RecordDamagedError as error:
                logger.warning("%s: dropped from %s: %s", expected.blob_name, tier_name, error)
                _drop(tier, [variant.name.manifest_blob, expected.blob_name])
        return None

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
            meta={**_facts_of(kept), "stored_s": self._clock()},
        )
        blob = encode_manifest(manifest)
        for tier_name in tier_names:
            self._tiers[tier_name].put(name.manifest_blob, blob)

    def withdraw(self, meta: RecordMeta) -> None:
        """Drop one variant from all tiers."""
        self._drop_prefix(f"{self.name_of(meta)}/")

    def drop(self, tenant: str, keys: Iterable[ChunkKey]) -> int:
        """Drop all variants of these chunks from all tiers; returns how many variants there were.

        Raises:
            TierError: a tier could not be asked, so that they may still be there.
        """
        return sum(self._drop_prefix(f"{self._tenant_part(tenant)}/{key}/") for key in keys)

    def drop_tenant(self, tenant: str) -> int:
        """`drop`, of everything of a tenant."""
        return self._drop_prefix(f"{self._tenant_part(tenant)}/")

    def drop_all(self, tier_names: Iterable[str] | None = None) -> int:
        """`drop`, of everything of this model; from all tiers, or those named."""
        return self._drop_prefix(f"{self._namespace}.", tier_names)

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

    def _variants(self, tier: BlobTier, prefix: str) -> Iterator[VariantName]:
        try:
            for blob_name in tier.names(prefix):
                *variant, last = blob_name.split("/")
                if last == "manifest" and len(variant) == 3 and all(variant):
                    yield VariantName(*variant)
        except TierError as error:
            logger.warning("a cold tier could not be searched: %s", error)

    def _read(self, tier_name: str, tier: BlobTier, name: VariantName, tenant: str) -> ColdVariant | None:
        blob = tier.get(name.manifest_blob)
        if blob is None:
            return None
        try:
            manifest = decode_manifest(blob, name, self._num_ranks)
            if self._clock() - float(manifest.meta["stored_s"]) >= self._ttl_s:
                return None
            return ColdVariant(name, tier_name, _meta_of(manifest, tenant), manifest.blobs)
        except (RecordDamagedError, LookupError, TypeError, ValueError) as error:
            logger.warning("%s in %s cannot be used: %s", name.manifest_blob, tier_name, error)
            return None

    def _drop_prefix(self, prefix: str, tier_names: Iterable[str] | None = None) -> int:
        num_variants = 0
        for tier_name in self._tiers if tier_names is None else tier_names:
            tier = self._tiers.get(tier_name)
            if tier is None:  # it could not be opened
                continue
            blobs = sorted(tier.names(prefix), key=lambda name: not name.endswith("/manifest"))
            num_variants = max(num_variants, sum(name.endswith("/manifest") for name in blobs))
            tier.delete(blobs)
        return num_variants


def _drop(tier: BlobTier, names: Sequence[str]) -> None:
    try:
        tier.delete(names)
    except TierError as error:
        logger.warning("a damaged record could not be dropped: %s", error)


def _record(stored: StoredRecord) -> ColdRecord:
    scores = stored.array(TOKEN_SCORES) if TOKEN_SCORES in stored.sections else None
    return ColdRecord(stored.array(KV), scores)


def _facts_of(meta: RecordMeta) -> dict[str, Any]:
    """What the manifest keeps of a record, besides its name."""
    document, profile = meta.document, meta.profile
    return {
        "start": meta.start,
        "size_bytes": meta.size_bytes,
        "prefix_chunks": list(meta.prefix_chunks),
        "prefix_is_exact": meta.prefix_is_exact,
        "separator": list(meta.separator),
        "document": [document.doc_id, document.version] if document else None,
        "profile": [profile.inter_mean, profile.intra_mean, list(profile.inter_by_prefix)]
        if profile
        else None,
    }


def _meta_of(manifest: Manifest, tenant: str) -> RecordMeta:
    facts = manifest.meta
    return RecordMeta(
        record_id=0,
        key=ChunkKey(manifest.variant.chunk_key),
        tenant=tenant,
        num_tokens=manifest.num_tokens,
        start=int(facts["start"]),
        size_bytes=int(facts["size_bytes"]),
        prefix_hash=manifest.variant.prefix_hash,
        prefix_chunks=tuple(map(ChunkKey, facts["prefix_chunks"])),
        prefix_is_exact=bool(facts["prefix_is_exact"]),
        separator=tuple(map(int, facts["separator"])),
        document=DocumentRef(*facts["document"]) if facts["document"] else None,
        profile=_profile_of(facts["profile"]),
    )


def _profile_of(facts: Sequence[Any] | None) -> AttentionProfile | None:
    import numpy as np

    if facts is None:
        return None
    inter_mean, intra_mean, inter_by_prefix = facts
    return AttentionProfile(
        float(inter_mean), float(intra_mean), tuple(map(float, inter_by_prefix)), np.zeros(0, np.float32)
    )


def with_scores(meta: RecordMeta, token_scores: Array | None) -> AttentionProfile | None:
    """The profile of a record that was read, its token scores included."""
    if meta.profile is None or token_scores is None:
        return None
    return replace(meta.profile, token_scores=token_scores)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()
