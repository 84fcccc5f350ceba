"""The manifest of a variant: a blob with a header and nothing behind it.

It is written after all ranks' blobs: where it is there and its entries match, they are whole and of
one and the same write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cachecraft_rag.store.codecs import Buffer
from cachecraft_rag.store.record_format.facts import (
    BlobEntry,
    VariantName,
    read_entry,
    read_variant,
    require_equal,
)
from cachecraft_rag.store.record_format.header import checked, header_checksum, naming, seal, unseal

KIND = "manifest"
MANIFEST_FIELDS = {"kind": str, "variant": dict, "num_tokens": int, "meta": dict, "blobs": list}


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All ranks' blobs of one variant, in the order of ranks; `meta` as in `RecordFacts`."""

    variant: VariantName
    num_tokens: int
    blobs: tuple[BlobEntry, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)


def entry_of(blob: Sequence[Buffer]) -> BlobEntry:
    """The manifest's entry for a blob, given as the buffers that `encode` made."""
    return BlobEntry(sum(len(buffer) for buffer in blob), header_checksum(blob[0]))


def encode_manifest(manifest: Manifest) -> bytes:
    """
    Raises:
        StoreError: `meta` is not JSON-safe, or too large.
    """
    return seal(
        {
            "kind": KIND,
            "variant": asdict(manifest.variant),
            "num_tokens": manifest.num_tokens,
            "meta": dict(manifest.meta),
            "blobs": [asdict(entry) for entry in manifest.blobs],
        }
    )


def decode_manifest(blob: Buffer, variant: VariantName, num_ranks: int) -> Manifest:
    """
    Raises:
        RecordDamagedError: the blob is not, whole and unchanged, a manifest of this variant and of
            so many ranks.
    """
    with naming(variant.manifest_blob):
        header, payload = unseal(blob)
        facts = checked(header, MANIFEST_FIELDS)
        manifest = Manifest(
            variant=read_variant(facts["variant"]),
            num_tokens=facts["num_tokens"],
            blobs=tuple(read_entry(entry) for entry in facts["blobs"]),
            meta=facts["meta"],
        )
        require_equal("kind", facts["kind"], KIND)
        require_equal("number of bytes behind the header", len(payload), 0)
        require_equal("variant", manifest.variant, variant)
        require_equal("number of ranks", len(manifest.blobs), num_ranks)
        return manifest
