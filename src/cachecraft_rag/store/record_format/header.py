"""What every blob begins with: magic, format version, and a header of checked JSON.

    offset  bytes  content
    0       8      magic
    8       4      format version, unsigned little-endian
    12      4      length of the header, unsigned little-endian
    16      16     xxh3_128 of the header, big-endian as xxhash prints it
    32      ...    header: canonical JSON in ASCII, then spaces up to a multiple of 64

The header's checksum stands for the whole blob, because the header holds the checksums of all that
follows. Checksums find damage, not forgery: who can write to the store can also compute them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import xxhash

from cachecraft_rag.errors import StoreError
from cachecraft_rag.store.codecs import Buffer

MAGIC = b"\x93CCRAGKV"
FORMAT_VERSION = 1
ALIGNMENT = 64
MAX_HEADER_BYTES = 1 << 20
PREAMBLE = struct.Struct("<8sII16s")


class RecordDamagedError(StoreError):
    """A blob is not, whole and unchanged, what its name and its reader say it is: compute anew."""


@contextmanager
def naming(blob_name: str) -> Iterator[None]:
    """Every `StoreError` inside leaves as a `RecordDamagedError` that begins with the blob's name."""
    try:
        yield
    except StoreError as error:
        raise RecordDamagedError(f"{blob_name}: {error}") from error


def padding(length: int) -> int:
    """Bytes from `length` up to the next multiple of `ALIGNMENT`."""
    return -length % ALIGNMENT


def seal(facts: Mapping[str, Any]) -> bytes:
    """Preamble and header of a blob; `facts` must be the same after a round trip through JSON.

    Raises:
        StoreError: they are not (tuples, keys that are no strings, nan, ...), or take too much room.
    """
    text = _dump(facts)
    header = text + b" " * padding(PREAMBLE.size + len(text))
    if len(header) > MAX_HEADER_BYTES:
        raise StoreError(f"header of {len(header)} bytes is over {MAX_HEADER_BYTES}: put less into meta")
    return PREAMBLE.pack(MAGIC, FORMAT_VERSION, len(header), xxhash.xxh3_128_digest(header)) + header


def unseal(blob: Buffer) -> tuple[dict[str, Any], memoryview]:
    """The header's facts, and all bytes behind the header.

    Raises:
        RecordDamagedError: the blob does not begin with a sound header of this format version.
    """
    if len(blob) < PREAMBLE.size:
        raise RecordDamagedError(f"{len(blob)} bytes are too few for a header")
    magic, version, header_bytes, checksum = PREAMBLE.unpack_from(blob)
    if magic != MAGIC:
        raise RecordDamagedError(f"begins with {magic!r}, not with {MAGIC!r}: not a blob of this store")
    if version != FORMAT_VERSION:
        raise RecordDamagedError(f"has format version {version}: this release reads {FORMAT_VERSION}")
    payload_start = PREAMBLE.size + header_bytes
    if header_bytes > MAX_HEADER_BYTES or payload_start > len(blob) or padding(payload_start):
        raise RecordDamagedError(f"header cannot have {header_bytes} bytes in a blob of {len(blob)}")
    header = bytes(blob[PREAMBLE.size : payload_start])
    if xxhash.xxh3_128_digest(header) != checksum:
        raise RecordDamagedError("header does not match its checksum")
    return _parse(header), memoryview(blob)[payload_start:].toreadonly()


def header_checksum(blob: Buffer) -> str:
    """Checksum of the header as the preamble gives it, as 32 hex digits."""
    digest: bytes = PREAMBLE.unpack_from(blob)[3]
    return digest.hex()


def checked(facts: Any, fields: Mapping[str, type]) -> dict[str, Any]:
    """`facts`, if it is a dictionary of exactly these fields and types; no integer is negative.

    Raises:
        RecordDamagedError: it is not.
    """
    if type(facts) is not dict or facts.keys() != fields.keys():
        raise RecordDamagedError(
            f"header needs exactly the fields {', '.join(sorted(fields))}: got {facts!r:.200}"
        )
    for name, kind in fields.items():
        value = facts[name]
        is_kind = type(value) is kind
        if not is_kind or (kind is int and value < 0):
            raise RecordDamagedError(
                f"header field {name} is {value!r:.200}: need {kind.__name__}, not negative"
            )
    return facts


def _canonical(facts: Any) -> bytes:
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def _dump(facts: Mapping[str, Any]) -> bytes:
    try:
        text = _canonical(facts)
        is_same = json.loads(text) == facts
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"facts cannot be written as JSON: {error}") from error
    if not is_same:
        raise StoreError(
            f"facts change on their way through JSON: need plain lists and string keys in {facts!r:.400}"
        )
    return text


def _parse(header: bytes) -> dict[str, Any]:
    """Only the canonical form has a meaning: doubled keys, nan and the like are refused."""
    try:
        facts = json.loads(header)
        is_canonical = _canonical(facts) == header.rstrip(b" ")
    except (ValueError, RecursionError) as error:
        raise RecordDamagedError(f"header is not JSON: {error}") from error
    if type(facts) is not dict or not is_canonical:
        raise RecordDamagedError("header is not one JSON object in canonical form")
    return facts
