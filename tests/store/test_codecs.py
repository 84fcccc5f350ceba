"""Codecs: exact ones give back the bits, the others stay within their bounds, and none trusts its input."""

from __future__ import annotations

import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray

from cachecraft_rag.errors import StoreError
from cachecraft_rag.store.codecs import CODECS, DTYPES, dtype_name, get_codec

Array = NDArray[Any]

EXACT = [codec.name for codec in CODECS.values() if codec.is_exact]
SCALED = [codec.name for codec in CODECS.values() if not codec.is_exact]
FLOAT32_STEP = float(np.finfo(np.float32).smallest_subnormal)
SCALE_SLACK = 2 * 448 * FLOAT32_STEP
"""A scale is off by up to two of float32's smallest steps, which counts for numbers below 1e-42 only."""

dtype_names = st.sampled_from(list(DTYPES))
any_shapes = npst.array_shapes(min_dims=0, max_dims=5, max_side=6)
kv_shapes = st.tuples(
    *(st.integers(1, 3), st.just(2), st.integers(1, 9), st.integers(1, 3), st.integers(1, 8))
)


def random_bits(dtype: str, shape: tuple[int, ...], seed: int) -> Array:
    """Any bit pattern at all: nan, inf and subnormal numbers too."""
    num_bytes = int(np.prod(shape)) * DTYPES[dtype].itemsize
    return np.frombuffer(np.random.default_rng(seed).bytes(num_bytes), DTYPES[dtype]).reshape(shape)


@st.composite
def finite_kv(draw: st.DrawFn) -> Array:
    """KV with ordinary, outlying, tiny, huge and zero channels."""
    shape = draw(kv_shapes)
    dtype = DTYPES[draw(dtype_names)]
    largest = float(ml_dtypes.finfo(dtype).max)
    sizes = st.sampled_from([0.0, 1e-44, 1e-6, 1.0, 300.0, largest])
    channels = draw(npst.arrays(np.float64, (*shape[:2], 1, *shape[3:]), elements=sizes))
    unit = draw(npst.arrays(np.float64, shape, elements=st.floats(-1, 1)))
    return (unit * channels).astype(dtype)


def through(codec: str, array: Array) -> Array:
    stored = b"".join(get_codec(codec).encode(array))
    return get_codec(codec).decode(memoryview(stored), array.dtype, array.shape)


def assert_same_bits(found: Array, expected: Array) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()


def assert_within(found: Array, expected: Array, bound: Array) -> None:
    """`bound` plus what rounding to the dtype and float32 arithmetic may add."""
    assert found.dtype == expected.dtype
    error = np.abs(found.astype(np.float64) - expected.astype(np.float64))
    limits = ml_dtypes.finfo(expected.dtype)
    rounding = np.abs(expected.astype(np.float64)) * float(limits.eps) + float(limits.smallest_subnormal)
    slack = rounding + bound * (1e-4 + float(limits.eps)) + SCALE_SLACK
    assert (error <= bound + slack).all(), (error - bound - slack).max()


def assert_refuses(codec: str, data: bytes, dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(StoreError):
        get_codec(codec).decode(memoryview(data), DTYPES[dtype], shape)


@pytest.mark.parametrize("codec", EXACT)
@settings(max_examples=60)
@given(dtype=dtype_names, shape=any_shapes, seed=st.integers(0, 2**32))
def test_exact_codecs_keep_every_bit(codec: str, dtype: str, shape: tuple[int, ...], seed: int) -> None:
    """Whatever the dtype, shape and bits, an exact codec gives them back."""
    array = random_bits(dtype, shape, seed)
    assert_same_bits(through(codec, array), array)


@settings(max_examples=60)
@given(kv=finite_kv())
def test_int8_error_is_half_a_step_of_the_channel(kv: Array) -> None:
    """A value is off by at most half of its channel's largest value over 127."""
    largest = np.abs(kv.astype(np.float64)).max(axis=2, keepdims=True)
    assert_within(through("int8", kv), kv, np.broadcast_to(largest / 127 / 2, kv.shape))


@settings(max_examples=60)
@given(kv=finite_kv())
def test_fp8_error_is_a_sixteenth_of_the_value(kv: Array) -> None:
    """A value is off by at most 1/16 of itself, or by half a step of float8's smallest numbers."""
    values = np.abs(kv.astype(np.float64))
    scale = values.max(axis=(2, 4), keepdims=True) / 448
    assert_within(through("fp8", kv), kv, np.maximum(values / 16, scale * 2.0**-10))


@pytest.mark.parametrize("codec", SCALED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scaled_codecs_bear_a_dtype_s_extremes(codec: str, dtype: str) -> None:
    """Neither the largest numbers overflow, nor do the smallest become nan or change their sign."""
    limits = ml_dtypes.finfo(DTYPES[dtype])
    largest, smallest = float(limits.max), float(limits.smallest_subnormal)
    sizes = np.array([largest, largest * (1 - 2.0**-7), 380 * smallest, 900 * smallest])
    kv = np.broadcast_to(sizes[:, None, None, None, None], (4, 2, 3, 1, 2)).astype(DTYPES[dtype])
    for signed in (kv, -kv):
        found = through(codec, signed).astype(np.float64)
        assert np.isfinite(found).all()
        assert (found * np.sign(signed.astype(np.float64)) >= 0).all()


@pytest.mark.parametrize("codec", SCALED)
def test_scaled_codecs_take_a_byte_per_value_and_their_scales(codec: str) -> None:
    """The stored size is what the module's table says."""
    kv = np.ones((3, 2, 5, 4, 8), np.float32)
    num_scales = {"int8": 3 * 2 * 4 * 8, "fp8": 3 * 2 * 4}[codec]
    assert sum(len(buffer) for buffer in get_codec(codec).encode(kv)) == kv.size + 4 * num_scales


@pytest.mark.parametrize("codec", CODECS)
def test_an_array_in_another_memory_order_is_stored_like_its_copy(codec: str) -> None:
    """A transposed view, as the workers may hold it, gives the same bytes, and is not changed."""
    kv = np.random.default_rng(0).standard_normal((2, 3, 4, 2, 8)).astype(np.float32)
    view = kv.transpose(0, 3, 2, 1, 4)
    before = view.copy()
    assert b"".join(get_codec(codec).encode(view)) == b"".join(get_codec(codec).encode(before))
    assert_same_bits(view, before)


def test_raw_copies_in_neither_direction() -> None:
    """Encoding and decoding with `raw` are views, and the decoded one cannot be written."""
    array = np.arange(6, dtype=np.float32)
    (stored,) = get_codec("raw").encode(array)
    decoded = get_codec("raw").decode(memoryview(stored).toreadonly(), array.dtype, array.shape)
    assert np.shares_memory(array, decoded)
    assert not decoded.flags.writeable


def test_zstd_makes_kv_smaller() -> None:
    """Shuffled bytes of bfloat16 numbers compress: the exponents are much alike."""
    kv = np.random.default_rng(0).standard_normal((2, 2, 100, 2, 32)).astype(DTYPES["bfloat16"])
    assert sum(len(buffer) for buffer in get_codec("zstd").encode(kv)) < 0.8 * kv.nbytes


@pytest.mark.parametrize("codec", SCALED)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_scaled_codecs_refuse_what_has_no_scale(codec: str, value: float) -> None:
    """One infinite value would make a whole channel worthless, so it is an error."""
    kv = np.ones((1, 2, 3, 1, 4), np.float32)
    kv[0, 1, 2, 0, 3] = value
    with pytest.raises(StoreError, match="inf or nan"):
        get_codec(codec).encode(kv)


@pytest.mark.parametrize("codec", SCALED)
@pytest.mark.parametrize("shape", [(4,), (2, 2, 3, 4), (2, 3, 4, 5, 6), (1, 2, 3, 4, 5, 6)])
def test_scaled_codecs_refuse_what_is_no_kv(codec: str, shape: tuple[int, ...]) -> None:
    """Which axes share a scale is known for KV only, both ways."""
    with pytest.raises(StoreError, match="not that of KV"):
        get_codec(codec).encode(np.ones(shape, np.float32))
    with pytest.raises(StoreError, match="not that of KV"):
        get_codec(codec).decode(memoryview(b""), DTYPES["float32"], shape)


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_of_another_length_are_refused(codec: str) -> None:
    """Bytes that are cut or drawn out, or meant for another shape or dtype, are no such array."""
    kv = np.random.default_rng(0).standard_normal((2, 2, 3, 2, 4)).astype(np.float32)
    stored = b"".join(get_codec(codec).encode(kv))
    for cut in range(len(stored)):
        assert_refuses(codec, stored[:cut], "float32", kv.shape)
    assert_refuses(codec, stored + b"\0", "float32", kv.shape)
    assert_refuses(codec, stored, "float32", (2, 2, 4, 2, 4))


@pytest.mark.parametrize("codec", EXACT)
def test_exact_codecs_refuse_another_dtype(codec: str) -> None:
    """The stored bytes of an exact codec fit one element size."""
    stored = b"".join(get_codec(codec).encode(np.ones(8, np.float32)))
    assert_refuses(codec, stored, "float16", (8,))


def test_a_frame_that_swells_is_refused_before_it_does() -> None:
    """A small zstd frame of 256 MB of zeros costs no memory, whatever it claims."""
    writer = zstandard.ZstdCompressor().compressobj(size=256 << 20)
    bomb = b"".join([*(writer.compress(bytes(1 << 20)) for _ in range(256)), writer.flush()])
    tracemalloc.start()
    try:
        assert_refuses("zstd", bomb, "float32", (4,))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20


def test_a_frame_that_says_less_than_it_holds_is_refused() -> None:
    """The frame's own word is checked against what comes out of it."""
    honest = zstandard.ZstdCompressor(write_content_size=True).compress(bytes(64))
    lying = honest[:5] + bytes([32]) + honest[6:]
    assert zstandard.frame_content_size(lying) == 32
    assert_refuses("zstd", lying, "float32", (8,))


@pytest.mark.parametrize("dtype", [">f4", ">f2", "f8", "i4", "u1", "O", "V4"])
def test_other_dtypes_and_byte_orders_have_no_name(dtype: str) -> None:
    """What is big-endian, or no float of a model, is refused."""
    with pytest.raises(StoreError, match="is not stored"):
        dtype_name(np.zeros(3, dtype))


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_of_models_have_their_usual_names(name: str) -> None:
    """Names are those that vLLM and torch use."""
    assert dtype_name(np.zeros(3, DTYPES[name])) == name


def test_an_unknown_codec_is_refused_with_the_known_ones() -> None:
    """The message lists what there is."""
    with pytest.raises(StoreError, match="raw, zstd, int8, fp8"):
        get_codec("pickle")
