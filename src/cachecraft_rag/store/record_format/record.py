"""A record: one rank's share of one stored variant of a chunk.

    header (`header`) | section | zeros up to a multiple of 64 | section | ...

A section is one array. The header says what the record is, and for each section its dtype, shape,
codec, place and checksum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import xxhash

from cachecraft_rag.store.codecs import DTYPES, Array, Buffer, dtype_name, get_codec
from cachecraft_rag.store.record_format.facts import (
    ArrayForm,
    BlobEntry,
    Expected,
    RecordFacts,
    Section,
    read_variant,
    require_equal,
)
from cachecraft_rag.store.record_format.header import (
    RecordDamagedError,
    checked,
    header_checksum,
    naming,
    padding,
    seal,
    unseal,
)

KIND = "record"
KV = "kv"
"""Name of the section with the KV: (num_layers, 2, num_tokens, num_kv_heads, head_size)."""
MAX_ARRAY_BYTES = 1 << 30
"""A header that says it makes a larger array, larger than its blob too, is not believed."""

RECORD_FIELDS = {
    "kind": str,
    "variant": dict,
    "rank": int,
    "num_ranks": int,
    "num_tokens": int,
    "meta": dict,
    "sections": list,
}
SECTION_FIELDS = {
    "name": str,
    "dtype": str,
    "shape": list,
    "codec": str,
    "offset": int,
    "length": int,
    "checksum": str,
}


@dataclass(frozen=True, slots=True, eq=False)
class StoredRecord:
    """A blob with a sound header. Arrays are decoded when they are asked for."""

    facts: RecordFacts
    sections: Mapping[str, Section]
    payload: memoryview = field(repr=False)

    def verify(self) -> None:
        """Compare every section with its checksum.

        Raises:
            RecordDamagedError: one differs.
        """
        with naming(self.facts.blob_name):
            for section in self.sections.values():
                checksum = xxhash.xxh3_128_hexdigest(self._encoded(section))
                require_equal(f"checksum of section {section.name!r}", checksum, section.checksum)

    def array(self, name: str) -> Array:
        """The decoded array; with codec `raw` a read-only view of the blob, which it keeps alive.

        Raises:
            RecordDamagedError: there is no such section, or its bytes do not make such an array.
        """
        with naming(self.facts.blob_name):
            if name not in self.sections:
                raise RecordDamagedError(f"section {name!r} is missing")
            section = self.sections[name]
            dtype = DTYPES[section.form.dtype]
            return get_codec(section.codec).decode(self._encoded(section), dtype, section.form.shape)

    def _encoded(self, section: Section) -> memoryview:
        return self.payload[section.offset : section.end]


def encode(facts: RecordFacts, arrays: Mapping[str, Array], codec: str = "raw") -> list[Buffer]:
    """The record as buffers, to be joined or written in this order.

    Args:
        arrays: by name, of dtypes in `codecs.DTYPES`. Buffers alias contiguous ones, which must not
            change until the buffers are written.
        codec: of the array called `KV`; all others are stored raw.

    Raises:
        StoreError: an array does not fit its codec, or `facts.meta` is not JSON-safe or too large.
    """
    sections: list[Section] = []
    buffers: list[Buffer] = []
    end = 0
    for name, array in arrays.items():
        gap = padding(end)
        section, encoded = _encode_section(name, array, codec if name == KV else "raw", end + gap)
        buffers += [bytes(gap), *encoded] if gap else encoded
        sections.append(section)
        end = section.end
    return [_seal(facts, sections), *buffers]


def decode(
    blob: Buffer, expected: Expected, *, verify: bool = True, max_array_bytes: int = MAX_ARRAY_BYTES
) -> StoredRecord:
    """Check a blob and open it, without a copy.

    Args:
        verify: compare the sections' checksums too, which reads the whole blob once. Without, call
            `StoredRecord.verify` before the arrays are used.
        max_array_bytes: refuse an array that takes more than this and than the blob.

    Raises:
        RecordDamagedError: the blob is not, whole and unchanged, the expected record.
    """
    with naming(expected.blob_name):
        header, payload = unseal(blob)
        record = _read_record(header, payload)
        _require_expected(record.facts, record.sections, expected)
        _require_tiled(record.sections, payload)
        limit = max(max_array_bytes, len(blob))
        for section in record.sections.values():
            _require_readable(section, limit)
        if expected.entry is not None:
            require_equal("entry", BlobEntry(len(blob), header_checksum(blob)), expected.entry)
    if verify:
        record.verify()
    return record


def _encode_section(name: str, array: Array, codec: str, offset: int) -> tuple[Section, list[Buffer]]:
    form = ArrayForm(dtype_name(array), array.shape)
    encoded = get_codec(codec).encode(array)
    checksum = xxhash.xxh3_128()
    for buffer in encoded:
        checksum.update(buffer)
    length = sum(len(buffer) for buffer in encoded)
    return Section(name, form, codec, offset, length, checksum.hexdigest()), encoded


def _seal(facts: RecordFacts, sections: Sequence[Section]) -> bytes:
    return seal(
        {
            "kind": KIND,
            "variant": asdict(facts.variant),
            "rank": facts.rank,
            "num_ranks": facts.num_ranks,
            "num_tokens": facts.num_tokens,
            "meta": dict(facts.meta),
            "sections": [_section_facts(section) for section in sections],
        }
    )


def _section_facts(section: Section) -> dict[str, Any]:
    facts = asdict(section)
    form = facts.pop("form")
    return facts | {"dtype": form["dtype"], "shape": list(form["shape"])}


def _read_record(header: dict[str, Any], payload: memoryview) -> StoredRecord:
    fields = dict(checked(header, RECORD_FIELDS))
    require_equal("kind", fields.pop("kind"), KIND)
    sections = [_read_section(section) for section in fields.pop("sections")]
    by_name = {section.name: section for section in sections}
    require_equal("number of different sections", len(by_name), len(sections))
    facts = RecordFacts(**fields | {"variant": read_variant(fields["variant"])})
    return StoredRecord(facts, by_name, payload)


def _read_section(facts: Any) -> Section:
    fields = dict(checked(facts, SECTION_FIELDS))
    dtype, shape = fields.pop("dtype"), fields.pop("shape")
    return Section(form=ArrayForm(dtype, tuple(shape)), **fields)


def _require_expected(facts: RecordFacts, sections: Mapping[str, Section], expected: Expected) -> None:
    require_equal("name", facts.blob_name, expected.blob_name)
    if expected.num_tokens is not None:
        require_equal("number of tokens", facts.num_tokens, expected.num_tokens)
    for name, form in expected.arrays.items():
        found = sections[name].form if name in sections else None
        require_equal(f"section {name!r}", found, form)


def _require_tiled(sections: Mapping[str, Section], payload: memoryview) -> None:
    """Sections follow one another with nothing but zeros between them, and end with the blob."""
    end = 0
    for section in sections.values():
        start = end + padding(end)
        require_equal(f"offset of section {section.name!r}", section.offset, start)
        if any(payload[end:start]):
            raise RecordDamagedError(f"the padding before section {section.name!r} is not zero")
        end = section.end
    require_equal("number of bytes behind the header", len(payload), end)


def _require_readable(section: Section, max_array_bytes: int) -> None:
    get_codec(section.codec)
    if section.form.num_bytes > max_array_bytes:
        raise RecordDamagedError(
            f"section {section.name!r} says it makes {section.form.num_bytes} bytes: at most "
            f"{max_array_bytes} are believed"
        )
