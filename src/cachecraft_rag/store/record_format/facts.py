"""What headers say, and what readers expect of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from cachecraft_rag.errors import StoreError
from cachecraft_rag.store.codecs import DTYPES, num_array_bytes
from cachecraft_rag.store.record_format.header import RecordDamagedError, checked

VARIANT_FIELDS = {"namespace": str, "chunk_key": str, "prefix_hash": str}
MAX_AXES = 8
ENTRY_FIELDS = {"size_bytes": int, "checksum": str}


@dataclass(frozen=True, slots=True)
class VariantName:
    """Which variant of which chunk; `namespace` stands for model, revision and layout of the KV.

    Raises:
        StoreError: a part is empty or holds a slash, so that joined names would be ambiguous.
    """

    namespace: str
    chunk_key: str
    prefix_hash: str

    def __post_init__(self) -> None:
        for name, part in asdict(self).items():
            if not part or "/" in part:
                raise StoreError(f"{name} is {part!r}: a part of a blob's name is not empty and has no '/'")

    def __str__(self) -> str:
        return f"{self.namespace}/{self.chunk_key}/{self.prefix_hash}"

    @property
    def manifest_blob(self) -> str:
        return f"{self}/manifest"

    def rank_blob(self, rank: int, num_ranks: int) -> str:
        return f"{self}/{rank}of{num_ranks}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFacts:
    """What a record is; `meta` is free-form, of what JSON gives back unchanged.

    Raises:
        StoreError: the rank is none of the ranks, or there is no token.
    """

    variant: VariantName
    rank: int
    num_ranks: int
    num_tokens: int
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.num_ranks and self.num_tokens > 0):
            raise StoreError(
                f"rank {self.rank} of {self.num_ranks} with {self.num_tokens} tokens is no record: "
                "need 0 <= rank < num_ranks and a token"
            )

    @property
    def blob_name(self) -> str:
        return self.variant.rank_blob(self.rank, self.num_ranks)


@dataclass(frozen=True, slots=True)
class ArrayForm:
    """Dtype (a name in `codecs.DTYPES`) and shape of a decoded array.

    Raises:
        StoreError: the dtype is not stored, an axis is empty, or there are too many.
    """

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise StoreError(f"dtype {self.dtype!r} is not stored: need one of {', '.join(DTYPES)}")
        if len(self.shape) > MAX_AXES or not all(type(n) is int and n > 0 for n in self.shape):
            raise StoreError(
                f"shape {self.shape!r:.200} is not stored: need at most {MAX_AXES} axes, none empty"
            )

    @property
    def num_bytes(self) -> int:
        return num_array_bytes(DTYPES[self.dtype], self.shape)


@dataclass(frozen=True, slots=True)
class Section:
    """Where an array lies behind the header, and how; length and checksum are of its encoded bytes."""

    name: str
    form: ArrayForm
    codec: str
    offset: int
    length: int
    checksum: str

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class BlobEntry:
    """A blob as its manifest lists it; the checksum is that of its header, which covers all the rest."""

    size_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the reader of a record knows beforehand; None is not compared.

    Attributes:
        arrays: sections that must be there, and their form. Others may be there too.
        entry: what the manifest says of this blob.
    """

    variant: VariantName
    rank: int
    num_ranks: int
    num_tokens: int | None = None
    arrays: Mapping[str, ArrayForm] = field(default_factory=dict)
    entry: BlobEntry | None = None

    @property
    def blob_name(self) -> str:
        return self.variant.rank_blob(self.rank, self.num_ranks)


def require_equal(what: str, found: object, expected: object) -> None:
    """Raises `RecordDamagedError` unless what a header says is what its reader expects."""
    if found != expected:
        raise RecordDamagedError(f"{what} is {found}: the reader expects {expected}")


def read_variant(facts: Any) -> VariantName:
    return VariantName(**checked(facts, VARIANT_FIELDS))


def read_entry(facts: Any) -> BlobEntry:
    return BlobEntry(**checked(facts, ENTRY_FIELDS))
