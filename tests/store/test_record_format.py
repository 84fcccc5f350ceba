"""Stored blobs: what goes in comes out, and nothing that is not whole, unchanged and expected is believed."""

from __future__ import annotations

import dataclasses
import pickle
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cachecraft_rag.errors import StoreError
from cachecraft_rag.store.codecs import CODECS, DTYPES
from cachecraft_rag.store.record_format import (
    ArrayForm,
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
from cachecraft_rag.store.record_format.header import MAGIC, seal, unseal

Array = NDArray[Any]

VARIANT = VariantName("model@1", "chunk", "prefix")
FACTS = RecordFacts(
    variant=VARIANT, rank=1, num_ranks=2, num_tokens=3, meta={"start": 7, "means": [0.1, 1e-300]}
)
EXPECTED = Expected(variant=VARIANT, rank=1, num_ranks=2)
KV_SHAPE = (2, 2, 3, 1, 5)
NUM_FLIPS = 500

names = st.text(st.characters(exclude_characters="/", exclude_categories=["Cs"]), min_size=1, max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
metas = st.dictionaries(st.text(), json_values, max_size=4)


def kv_of(dtype: str = "bfloat16", shape: tuple[int, ...] = KV_SHAPE, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(DTYPES[dtype])


def arrays_of(dtype: str = "bfloat16") -> dict[str, Array]:
    """60 elements of KV, so that in every codec there is padding behind them."""
    return {"kv": kv_of(dtype), "token_scores": np.array([0.5, 0.25, 0.125], np.float32)}


def record_blob(codec: str = "raw") -> bytes:
    return b"".join(encode(FACTS, arrays_of(), codec))


MANIFEST = Manifest(
    variant=VARIANT,
    num_tokens=3,
    blobs=(BlobEntry(10, "00" * 16), BlobEntry(20, "ff" * 16)),
    meta={"start": 7},
)


def open_record(blob: bytes | memoryview) -> StoredRecord:
    return decode(blob, EXPECTED)


def open_header(blob: bytes | memoryview) -> StoredRecord:
    return decode(blob, EXPECTED, verify=False)


def open_manifest(blob: bytes | memoryview) -> Manifest:
    return decode_manifest(blob, VARIANT, 2)


BLOBS: dict[str, tuple[bytes, Callable[[bytes], object]]] = {
    **{codec: (record_blob(codec), open_record) for codec in CODECS},
    "manifest": (encode_manifest(MANIFEST), open_manifest),
}


@pytest.fixture(params=BLOBS)
def blob_and_reader(request: pytest.FixtureRequest) -> tuple[bytes, Callable[[bytes], object]]:
    return BLOBS[request.param]


def assert_damaged(read: Callable[[bytes], object], blob: bytes, rule: str | None = None) -> None:
    with pytest.raises(RecordDamagedError, match=rule):
        read(blob)


def is_detected(read: Callable[[bytes], object], blob: bytes) -> bool:
    try:
        read(blob)
    except RecordDamagedError:
        return True
    return False


def assert_same_array(found: Array, expected: Array) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()


def sealed(text: bytes) -> bytes:
    """A blob of one header that matches its checksum, whatever its text is."""
    header = text + b" " * (-(32 + len(text)) % 64)
    return struct.pack("<8sII16s", MAGIC, 1, len(header), xxhash.xxh3_128_digest(header)) + header


def forged(change: Callable[[dict[str, Any]], object], codec: str = "raw") -> bytes:
    """A record whose header was changed by someone who can compute checksums."""
    facts, payload = unseal(record_blob(codec))
    change(facts)
    return seal(facts) + payload


# -- what goes in comes out


@settings(max_examples=60)
@given(
    dtype=st.sampled_from(list(DTYPES)),
    codec=st.sampled_from([codec.name for codec in CODECS.values() if codec.is_exact]),
    shape=st.tuples(st.integers(1, 3), st.just(2), st.integers(1, 20), st.integers(1, 3), st.integers(1, 9)),
    parts=st.tuples(names, names, names),
    ranks=st.integers(1, 9).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n))),
    meta=metas,
    seed=st.integers(0, 2**32),
)
def test_a_record_comes_back_as_it_was(
    dtype: str,
    codec: str,
    shape: tuple[int, ...],
    parts: tuple[str, str, str],
    ranks: tuple[int, int],
    meta: dict[str, Any],
    seed: int,
) -> None:
    """Facts and arrays survive, whatever their dtype, shape, names and meta; one token too."""
    variant = VariantName(*parts)
    facts = RecordFacts(variant=variant, rank=ranks[0], num_ranks=ranks[1], num_tokens=shape[2], meta=meta)
    arrays = {"kv": kv_of(dtype, shape, seed), "token_scores": np.ones(shape[2], np.float32)}
    buffers = encode(facts, arrays, codec)
    expected = Expected(
        variant=variant,
        rank=ranks[0],
        num_ranks=ranks[1],
        num_tokens=shape[2],
        arrays={name: ArrayForm(array.dtype.name, array.shape) for name, array in arrays.items()},
        entry=entry_of(buffers),
    )
    record = decode(b"".join(buffers), expected)
    assert record.facts == facts
    assert list(record.sections) == list(arrays)
    for name, array in arrays.items():
        assert_same_array(record.array(name), array)


@pytest.mark.parametrize("codec", CODECS)
def test_the_codec_is_the_kv_s_alone(codec: str) -> None:
    """Small arrays are stored raw, and so exactly, beside KV in whatever codec."""
    record = open_record(record_blob(codec))
    assert record.sections["kv"].codec == codec
    assert record.sections["token_scores"].codec == "raw"
    assert_same_array(record.array("token_scores"), arrays_of()["token_scores"])


def test_raw_kv_is_never_copied() -> None:
    """The buffers to write alias the KV, and the KV read is a read-only view of the blob."""
    kv = kv_of()
    assert any(np.shares_memory(kv, np.frombuffer(part, np.uint8)) for part in encode(FACTS, {"kv": kv}))
    blob = record_blob()
    found = open_record(blob).array("kv")
    assert np.shares_memory(found, np.frombuffer(blob, np.uint8))
    assert not found.flags.writeable


def test_a_writable_or_unaligned_buffer_reads_the_same() -> None:
    """A blob in the midst of a larger, writable buffer gives equal, read-only arrays."""
    buffer = bytearray(b"x" + record_blob())
    found = open_record(memoryview(buffer)[1:]).array("kv")
    assert_same_array(found, kv_of())
    assert not found.flags.writeable


def test_equal_records_are_equal_bytes() -> None:
    """Encoding depends on nothing but the record, not even on the order of meta."""
    turned = dataclasses.replace(FACTS, meta=dict(reversed(FACTS.meta.items())))
    assert b"".join(encode(turned, arrays_of())) == record_blob()


def test_a_manifest_comes_back_as_it_was() -> None:
    """Variant, number of tokens, entries in order, and meta."""
    assert open_manifest(encode_manifest(MANIFEST)) == MANIFEST


def test_names_of_blobs() -> None:
    """Blobs are filed by namespace, chunk key, prefix hash, and rank of how many."""
    assert FACTS.blob_name == EXPECTED.blob_name == "model@1/chunk/prefix/1of2"
    assert VARIANT.manifest_blob == "model@1/chunk/prefix/manifest"


# -- what cannot be stored


@pytest.mark.parametrize("part", ["", "a/b"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_names_must_not_be_ambiguous(place: int, part: str) -> None:
    """Two different variants never have one joined name."""
    parts = ["a", "b", "c"]
    parts[place] = part
    with pytest.raises(StoreError, match="a part of a blob's name"):
        VariantName(*parts)


@pytest.mark.parametrize(("rank", "num_ranks", "num_tokens"), [(-1, 1, 3), (1, 1, 3), (0, 0, 3), (0, 1, 0)])
def test_facts_of_no_record_are_refused(rank: int, num_ranks: int, num_tokens: int) -> None:
    """A rank is one of the ranks, and a record has a token."""
    with pytest.raises(StoreError, match="is no record"):
        RecordFacts(variant=VARIANT, rank=rank, num_ranks=num_ranks, num_tokens=num_tokens)


@pytest.mark.parametrize(
    "array",
    [
        np.ones(KV_SHAPE, ">f4"),
        np.ones(KV_SHAPE, np.float64),
        np.ones((2, 2, 0, 1, 5), np.float32),
        np.ones((1,) * 9, np.float32),
    ],
    ids=["big-endian", "float64", "no tokens", "9 axes"],
)
def test_arrays_of_no_model_are_refused(array: Array) -> None:
    """Other byte orders and dtypes, and empty arrays, are refused when written."""
    with pytest.raises(StoreError, match="is not stored"):
        encode(FACTS, {"kv": array})


@pytest.mark.parametrize(
    "meta",
    [{"a": (1, 2)}, {1: "a"}, {"a": float("nan")}, {"a": b"x"}, {"a": np.float32(1)}, {"a": "x" * (1 << 20)}],
    ids=["tuple", "integer key", "nan", "bytes", "numpy", "too large"],
)
def test_meta_that_json_would_change_is_refused(meta: dict[Any, Any]) -> None:
    """What would not come back as it was is refused when written."""
    with pytest.raises(StoreError):
        encode(dataclasses.replace(FACTS, meta=meta), arrays_of())
    with pytest.raises(StoreError):
        encode_manifest(dataclasses.replace(MANIFEST, meta=meta))


# -- damage


def test_every_flipped_byte_is_detected(blob_and_reader: tuple[bytes, Callable[[bytes], object]]) -> None:
    """Each byte in turn, padding included, then 500 at random: none passes, whatever the codec."""
    blob, read = blob_and_reader
    dice = random.Random(4)
    places = [*range(len(blob)), *(dice.randrange(len(blob)) for _ in range(NUM_FLIPS))]
    num_detected = 0
    for place in places:
        damaged = bytearray(blob)
        damaged[place] ^= dice.randrange(1, 256)
        num_detected += is_detected(read, bytes(damaged))
    assert num_detected == len(places) >= NUM_FLIPS


def test_every_truncation_is_detected(blob_and_reader: tuple[bytes, Callable[[bytes], object]]) -> None:
    """A blob cut at any length is damaged."""
    blob, read = blob_and_reader
    assert all(is_detected(read, blob[:length]) for length in range(len(blob)))


@pytest.mark.parametrize("tail", [b"\0", b"\0" * 64, b"x" * 1000])
def test_trailing_bytes_are_detected(
    blob_and_reader: tuple[bytes, Callable[[bytes], object]], tail: bytes
) -> None:
    """A blob ends where its header says."""
    blob, read = blob_and_reader
    assert_damaged(read, blob + tail)


def test_a_torn_rewrite_is_detected(blob_and_reader: tuple[bytes, Callable[[bytes], object]]) -> None:
    """The head of one write with the tail of another, as long, is no record, wherever they meet."""
    blob, read = blob_and_reader
    other = bytes(255 - byte for byte in blob)
    for seam in range(1, len(blob)):
        assert is_detected(read, blob[:seam] + other[seam:])
        assert is_detected(read, other[:seam] + blob[seam:])


def test_a_foreign_version_says_so(blob_and_reader: tuple[bytes, Callable[[bytes], object]]) -> None:
    """A later format is told from damage, so that the message names both versions."""
    blob, read = blob_and_reader
    assert_damaged(
        read, blob[:8] + struct.pack("<I", 2) + blob[12:], "format version 2: this release reads 1"
    )


def test_the_header_can_be_read_without_the_arrays() -> None:
    """Without verification a flip in an array passes until `verify` is called; one in the header does not."""
    blob = bytearray(record_blob())
    blob[-1] ^= 1
    record = open_header(bytes(blob))
    assert record.facts == FACTS
    with pytest.raises(
        RecordDamagedError, match="model@1/chunk/prefix/1of2: checksum of section 'token_scores'"
    ):
        record.verify()
    blob[40] ^= 1
    assert_damaged(open_header, bytes(blob), "header does not match")


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"variant": VariantName("model@2", "chunk", "prefix")}, "name is model@1/"),
        ({"variant": VariantName("model@1", "other", "prefix")}, "name is model@1/chunk/"),
        ({"variant": VariantName("model@1", "chunk", "other")}, "name is model@1/chunk/prefix/"),
        ({"rank": 0}, "name is model@1/chunk/prefix/1of2"),
        ({"num_ranks": 3}, "name is model@1/chunk/prefix/1of2"),
        ({"num_tokens": 4}, "number of tokens is 3"),
        ({"arrays": {"kv": ArrayForm("float16", KV_SHAPE)}}, "section 'kv' is .*bfloat16"),
        ({"arrays": {"kv": ArrayForm("bfloat16", (2, 2, 3, 5, 1))}}, "section 'kv' is"),
        ({"arrays": {"other": ArrayForm("bfloat16", (1,))}}, "section 'other' is None"),
        ({"entry": BlobEntry(1, "00" * 16)}, "entry is"),
    ],
)
def test_a_sound_record_that_is_not_the_expected_one_is_refused(change: dict[str, Any], rule: str) -> None:
    """A blob filed under a wrong name, or of another model, dtype, shape or write, is not used."""
    with pytest.raises(RecordDamagedError, match=rule):
        decode(record_blob(), dataclasses.replace(EXPECTED, **change))


def test_an_entry_tells_one_write_from_another() -> None:
    """Two records that differ in one value of the KV have the same name and size, and other entries."""
    arrays = arrays_of()
    first = entry_of(encode(FACTS, arrays))
    arrays["kv"][0, 0, 0, 0, 0] += 1
    second = encode(FACTS, arrays)
    assert entry_of(second).size_bytes == first.size_bytes
    with pytest.raises(RecordDamagedError, match="entry is"):
        decode(b"".join(second), dataclasses.replace(EXPECTED, entry=first))


def test_a_manifest_of_another_variant_or_size_is_refused() -> None:
    """A manifest is believed under its own name and for its own number of ranks."""
    blob = encode_manifest(MANIFEST)
    with pytest.raises(RecordDamagedError, match="variant is"):
        decode_manifest(blob, VariantName("model@1", "chunk", "other"), 2)
    with pytest.raises(RecordDamagedError, match="number of ranks is 2"):
        decode_manifest(blob, VARIANT, 1)


def test_a_record_is_no_manifest_and_a_manifest_no_record() -> None:
    """Each is refused in the other's place."""
    assert_damaged(open_manifest, record_blob())
    assert_damaged(open_record, encode_manifest(MANIFEST))


def test_a_section_that_is_not_there_is_damage() -> None:
    """So that a reader needs to catch one error only."""
    with pytest.raises(RecordDamagedError, match="'other' is missing"):
        open_record(record_blob()).array("other")


# -- headers that lie, with checksums that match


def _kv(facts: dict[str, Any], **changes: object) -> None:
    facts["sections"][0].update(changes)


FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "codec pickle": lambda f: _kv(f, codec="pickle"),
    "dtype object": lambda f: _kv(f, dtype="object"),
    "dtype float64": lambda f: _kv(f, dtype="float64"),
    "dtype big-endian": lambda f: _kv(f, dtype=">f4"),
    "empty axis": lambda f: _kv(f, shape=[0, 1 << 60]),
    "negative axes": lambda f: _kv(f, shape=[-2, -2, 3, 1, 5]),
    "axis true": lambda f: _kv(f, shape=[True, 60]),
    "axis float": lambda f: _kv(f, shape=[60.0]),
    "many axes": lambda f: _kv(f, shape=[1] * 1000),
    "huge axis": lambda f: _kv(f, shape=[10**4000]),
    "huge axes": lambda f: _kv(f, shape=[1 << 40] * 8),
    "shape number": lambda f: _kv(f, shape=60),
    "longer than the blob": lambda f: _kv(f, length=1 << 50),
    "shorter": lambda f: _kv(f, length=1),
    "negative length": lambda f: _kv(f, length=-1),
    "offset": lambda f: _kv(f, offset=64),
    "same place": lambda f: f["sections"][1].update(offset=0),
    "same name": lambda f: f["sections"].insert(0, {**f["sections"][0], "offset": 5}),
    "no section": lambda f: f["sections"].clear(),
    "section of nothing": lambda f: f["sections"].append({}),
    "section null": lambda f: f["sections"].append(None),
    "rank text": lambda f: f.update(rank="1"),
    "rank true": lambda f: f.update(rank=True),
    "rank over": lambda f: f.update(rank=2),
    "no tokens": lambda f: f.update(num_tokens=0),
    "meta list": lambda f: f.update(meta=[]),
    "variant incomplete": lambda f: f["variant"].pop("namespace"),
    "variant slash": lambda f: f["variant"].update(namespace="model@1/chunk", chunk_key="prefix"),
    "more fields": lambda f: f.update(more=1),
    "fewer fields": lambda f: f.pop("meta"),
    "other kind": lambda f: f.update(kind="manifest"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_header_that_lies_is_refused_and_costs_no_memory(forgery: str) -> None:
    """Every fact is checked when the header is read; nothing large is allocated for what it says."""
    blob = forged(FORGERIES[forgery])
    tracemalloc.start()
    try:
        assert_damaged(open_header, blob)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "record"},
        {"num_tokens": -1},
        {"blobs": []},
        {"blobs": [{"size_bytes": -1, "checksum": ""}] * 2},
        {"blobs": [None, None]},
        {"blobs": "ab"},
        {"variant": {}},
        {"meta": None},
        {"more": 1},
    ],
)
def test_a_manifest_that_lies_is_refused(change: dict[str, Any]) -> None:
    """A manifest's facts are checked like a record's."""
    facts, _ = unseal(encode_manifest(MANIFEST))
    assert_damaged(open_manifest, seal({**facts, **change}))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", [[2, 2, 4, 1, 5], [1, 2, 3, 1, 5], [61]])
def test_an_array_of_another_size_is_refused_before_it_is_used(codec: str, shape: list[int]) -> None:
    """A shape that does not fit the bytes is found at the latest when the array is asked for."""
    blob = forged(lambda facts: _kv(facts, shape=shape), codec)
    assert_damaged(lambda b: open_record(b).array("kv"), blob)


def test_an_array_over_the_limit_is_not_decoded() -> None:
    """A reader can say how much an array may take; the blob's own size it may take anyway."""
    zeros = {"kv": np.zeros((2, 2, 3, 1, 500), np.float32)}
    blob = b"".join(encode(FACTS, zeros, "zstd"))
    assert len(blob) < 2000
    assert_damaged(lambda b: decode(b, EXPECTED, max_array_bytes=23_999), blob, "at most 23999 are believed")
    assert_same_array(decode(blob, EXPECTED, max_array_bytes=24_000).array("kv"), zeros["kv"])
    raw = b"".join(encode(FACTS, zeros))
    assert_same_array(decode(raw, EXPECTED, max_array_bytes=0).array("kv"), zeros["kv"])


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[1, 2]",
        b"{",
        b"[" * 100_000,
        b'{"kind":"record","kind":"record"}',
        b'{"meta":NaN}',
        b'{"rank":' + b"9" * 5000 + b"}",
        b'{"meta":"\xff\xfe"}',
        b'{"meta": {}}',
        '{"meta":"ü"}'.encode(),
    ],
)
def test_a_header_that_is_not_canonical_json_is_refused(text: bytes) -> None:
    """No other text is a header, even with a checksum that matches."""
    assert_damaged(open_record, sealed(text), "JSON")
    assert_damaged(open_manifest, sealed(text), "JSON")


def test_a_header_without_its_padding_or_over_its_limit_is_refused() -> None:
    """Or arrays would not begin where a vector register loads them, and a header could be any size."""
    text = b'{"meta":{}}'
    bare = struct.pack("<8sII16s", MAGIC, 1, len(text), xxhash.xxh3_128_digest(text)) + text
    assert_damaged(open_record, bare, "header cannot have 11 bytes")
    assert_damaged(open_record, sealed(b'"' + b"x" * (1 << 20) + b'"'), "header cannot have 1048608 bytes")


@settings(max_examples=100)
@given(
    facts=st.dictionaries(st.text(max_size=9), json_values, max_size=5) | metas, tail=st.binary(max_size=80)
)
def test_any_other_header_is_refused(facts: dict[str, Any], tail: bytes) -> None:
    """Any JSON object that is no record's raises the one error, and no other."""
    assert_damaged(open_record, seal(facts) + tail)
    assert_damaged(open_manifest, seal(facts) + tail)


@settings(max_examples=100)
@given(data=st.data())
def test_a_header_with_one_field_replaced_raises_nothing_else(data: st.DataObject) -> None:
    """Whatever stands in a field, decoding works or raises the one error."""

    def replace_one(facts: dict[str, Any]) -> None:
        holder = data.draw(st.sampled_from([facts, facts["variant"], *facts["sections"]]))
        holder[data.draw(st.sampled_from(sorted(holder)))] = data.draw(json_values)

    blob = forged(replace_one, data.draw(st.sampled_from(list(CODECS))))
    try:
        record = open_record(blob)
        for name in record.sections:
            record.array(name)
    except RecordDamagedError:
        return
    assert record.facts.blob_name == EXPECTED.blob_name


# -- pickles


class WritesFile:
    """Unpickling it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.path, "executed"))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_planted_pickle_is_refused_and_never_runs(tmp_path: Path, protocol: int) -> None:
    """In place of a blob or behind a header it is refused; in place of an array it is numbers."""
    trap = tmp_path / "executed"
    planted = pickle.dumps(WritesFile(trap), protocol)
    assert_damaged(open_record, planted)
    assert_damaged(open_manifest, planted)
    assert_damaged(open_record, record_blob() + planted)
    assert_damaged(open_record, record_blob()[:32] + planted)
    as_numbers = np.frombuffer(planted + bytes(-len(planted) % 4), np.float32)
    blob = b"".join(encode(FACTS, {"kv": as_numbers}))
    assert open_record(blob).array("kv").tobytes().startswith(planted)
    assert not trap.exists()


def test_the_planted_pickle_would_run(tmp_path: Path) -> None:
    """The trap of the test above is one: loaded as a pickle it writes its file."""
    trap = tmp_path / "executed"
    pickle.loads(pickle.dumps(WritesFile(trap)))
    assert trap.read_text() == "executed"
