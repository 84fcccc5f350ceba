"""What a stored record looks like in bytes; docs/record-format.md.

A stored variant of a chunk is one blob per tensor-parallel rank (`record`) and a manifest that is
written last (`manifest`). Nothing is ever unpickled: headers are JSON (`header`), arrays are bytes of
one of three dtypes. Little-endian machines only.
"""

from __future__ import annotations

from cachecraft_rag.store.record_format.facts import (
    ArrayForm,
    BlobEntry,
    Expected,
    RecordFacts,
    Section,
    VariantName,
)
from cachecraft_rag.store.record_format.header import RecordDamagedError
from cachecraft_rag.store.record_format.manifest import Manifest, decode_manifest, encode_manifest, entry_of
from cachecraft_rag.store.record_format.record import KV, MAX_ARRAY_BYTES, StoredRecord, decode, encode

__all__ = [
    "KV",
    "MAX_ARRAY_BYTES",
    "ArrayForm",
    "BlobEntry",
    "Expected",
    "Manifest",
    "RecordDamagedError",
    "RecordFacts",
    "Section",
    "StoredRecord",
    "VariantName",
    "decode",
    "decode_manifest",
    "encode",
    "encode_manifest",
    "entry_of",
]
