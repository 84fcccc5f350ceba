"""How an array becomes bytes and bytes an array, by name. Pure functions, safe in any thread.

| name   | exact | stored bytes                                                                          |
|--------|-------|---------------------------------------------------------------------------------------|
| `raw`  | yes   | the array itself; decoding is a view                                                  |
| `zstd` | yes   | first bytes of all elements, then second bytes, ...; compressed                       |
| `int8` | no    | float32 scales (layers, 2, heads, size), then int8 values: symmetric, per channel     |
| `fp8`  | no    | float32 scales (layers, 2, heads), then float8_e4m3fn values: per head                |

`raw` and `zstd` take any shape without an empty axis. `int8` and `fp8` take KV of shape
(num_layers, 2, num_tokens, num_kv_heads, head_size), with keys at index 0 of the second axis and
values at 1. Keys have a few channels far larger than the rest, the same for all tokens, hence int8's
scale by channel (KIVI, arXiv:2402.02750, section 3); fp8 bears such a range by its exponent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import zstandard
from numpy.typing import NDArray

from cachecraft_rag.errors import StoreError

Array: TypeAlias = NDArray[Any]
DType: TypeAlias = "np.dtype[Any]"
Buffer: TypeAlias = bytes | memoryview

DTYPES: Mapping[str, DType] = MappingProxyType(
    {
        "bfloat16": np.dtype(ml_dtypes.bfloat16),
        "float16": np.dtype("<f2"),
        "float32": np.dtype("<f4"),
    }
)
"""Dtypes that may be stored, little-endian all."""

ZSTD_LEVEL = 3
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT8_LIMIT = 448.0
"""Largest finite value; a conversion makes nan of what is much larger."""
FLOAT8_VALUES = np.arange(256, dtype=np.uint8).view(FLOAT8).astype(np.float32)
SCALE = np.dtype("<f4")
KV_AXES = ("layers", "keys and values", "tokens", "heads", "size")
TOKENS, SIZE = 0, 2
"""Axes of one plane: the keys, or the values, of one layer."""


@dataclass(frozen=True, slots=True)
class Codec:
    """A way to store arrays.

    Attributes:
        is_exact: decoding gives back the same bits.
        encode: array of a dtype in `DTYPES` → buffers to be joined. They may alias the array, which
            must not change until they are written. Raises `StoreError` for what cannot be encoded.
        decode: (read-only bytes, dtype, shape) → array. Raises `StoreError` unless the bytes are an
            encoding of exactly that dtype and shape, and allocates only a small multiple of what
            these take.
    """

    name: str
    is_exact: bool
    encode: Callable[[Array], list[Buffer]]
    decode: Callable[[memoryview, DType, tuple[int, ...]], Array]


def get_codec(name: str) -> Codec:
    """The codec of that name.

    Raises:
        StoreError: there is none.
    """
    if name not in CODECS:
        raise StoreError(f"codec {name!r} is unknown: known are {', '.join(CODECS)}")
    return CODECS[name]


def dtype_name(array: Array) -> str:
    """Name of the array's dtype in `DTYPES`.

    Raises:
        StoreError: arrays of this dtype or byte order are not stored.
    """
    name = array.dtype.name
    # `in` first: numpy takes None, which `get` would give, for float64.
    if name not in DTYPES or DTYPES[name] != array.dtype:
        raise StoreError(
            f"dtype {array.dtype.str!r} ({name}) is not stored: convert to little-endian {', '.join(DTYPES)}"
        )
    return name


def num_array_bytes(dtype: DType, shape: Sequence[int]) -> int:
    return math.prod(shape) * dtype.itemsize


def bytes_of(array: Array) -> memoryview:
    """The array's bytes in C order, without a copy where it is contiguous.

    By way of uint8, because the buffer protocol has no letter for bfloat16.
    """
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _require_length(data: memoryview, expected: int) -> None:
    if len(data) != expected:
        raise StoreError(f"{len(data)} encoded bytes do not fit: dtype and shape make them {expected}")


def _encode_raw(array: Array) -> list[Buffer]:
    return [bytes_of(array)]


def _decode_raw(data: memoryview, dtype: DType, shape: tuple[int, ...]) -> Array:
    _require_length(data, num_array_bytes(dtype, shape))
    return np.ndarray(shape, dtype, buffer=data)


def _encode_zstd(array: Array) -> list[Buffer]:
    by_element = np.frombuffer(bytes_of(array), np.uint8).reshape(-1, array.dtype.itemsize)
    shuffled = np.ascontiguousarray(by_element.T)
    return [zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(shuffled.data)]


def _decode_zstd(data: memoryview, dtype: DType, shape: tuple[int, ...]) -> Array:
    size_bytes = num_array_bytes(dtype, shape)
    shuffled = np.frombuffer(_decompress(data, size_bytes), np.uint8).reshape(dtype.itemsize, -1)
    by_element = np.empty(shuffled.shape[::-1], np.uint8)
    # Column by column: eight times as fast as a copy of the transposed array.
    for index, column in enumerate(shuffled):
        by_element[:, index] = column
    return by_element.reshape(-1).view(dtype).reshape(shape)


def _decompress(data: memoryview, size_bytes: int) -> bytes:
    """One whole frame of exactly this content size.

    The size in the frame is checked first, because `decompress` allocates what it says.
    """
    try:
        content_bytes = zstandard.frame_content_size(data)
        if content_bytes != size_bytes:
            raise StoreError(
                f"zstd frame holds {content_bytes} bytes: dtype and shape make them {size_bytes}"
            )
        return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise StoreError(f"not one whole zstd frame: {error}") from error


@dataclass(frozen=True, slots=True)
class _Scaled:
    """KV divided by a scale, in a narrower dtype; one plane at a time, so that float32 copies stay small.

    Attributes:
        stored: one byte per element.
        limit: largest absolute value that is used of `stored`.
        shared: axes of a plane over which one scale holds.
    """

    stored: DType
    limit: float
    shared: tuple[int, ...]
    narrow: Callable[[Array], Array]
    widen: Callable[[Array], Array]

    def encode(self, kv: Array) -> list[Buffer]:
        _require_kv(kv.shape)
        scales = np.empty(self._scale_shape(kv.shape), SCALE)
        values = np.empty(kv.shape, self.stored)
        for place in np.ndindex(kv.shape[:2]):
            plane = kv[place].astype(np.float32)
            scales[place] = self._scale(plane)
            plane /= np.where(scales[place] > 0, scales[place], 1)
            values[place] = self.narrow(np.clip(plane, -self.limit, self.limit, out=plane))
        return [bytes_of(scales), bytes_of(values)]

    def decode(self, data: memoryview, dtype: DType, shape: tuple[int, ...]) -> Array:
        _require_kv(shape)
        scale_shape = self._scale_shape(shape)
        num_scale_bytes = num_array_bytes(SCALE, scale_shape)
        _require_length(data, num_scale_bytes + num_array_bytes(self.stored, shape))
        scales: Array = np.ndarray(scale_shape, SCALE, buffer=data[:num_scale_bytes])
        values: Array = np.ndarray(shape, self.stored, buffer=data[num_scale_bytes:])
        kv = np.empty(shape, dtype)
        for place in np.ndindex(shape[:2]):
            kv[place] = self.widen(values[place]) * scales[place]
        return kv

    def _scale(self, plane: Array) -> Array:
        largest = np.abs(plane).max(axis=self.shared, keepdims=True)
        if not np.isfinite(largest).all():
            raise StoreError("KV holds inf or nan, which cannot be scaled: store it exactly, or not at all")
        # Rounded down: `limit` times a scale rounded up could overflow the KV's own dtype.
        scale: Array = np.nextafter(largest / np.float32(self.limit), np.float32(0))
        return scale

    def _scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        plane = (1 if axis in self.shared else length for axis, length in enumerate(shape[2:]))
        return (*shape[:2], *plane)


def _require_kv(shape: tuple[int, ...]) -> None:
    if len(shape) != len(KV_AXES) or shape[1] != 2:
        raise StoreError(f"shape {shape} is not that of KV: need ({', '.join(KV_AXES)}) with 2 of the second")


def _to_int8(plane: Array) -> Array:
    return np.rint(plane, out=plane).astype(np.int8)


def _from_int8(plane: Array) -> Array:
    return plane.astype(np.float32)


def _to_float8(plane: Array) -> Array:
    return plane.astype(FLOAT8)


def _from_float8(plane: Array) -> Array:
    """By table: 15 times as fast as ml_dtypes' own conversion."""
    return np.take(FLOAT8_VALUES, plane.view(np.uint8))


_INT8 = _Scaled(np.dtype(np.int8), 127, (TOKENS,), _to_int8, _from_int8)
_FP8 = _Scaled(FLOAT8, FLOAT8_LIMIT, (TOKENS, SIZE), _to_float8, _from_float8)

CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        codec.name: codec
        for codec in (
            Codec("raw", True, _encode_raw, _decode_raw),
            Codec("zstd", True, _encode_zstd, _decode_zstd),
            Codec("int8", False, _INT8.encode, _INT8.decode),
            Codec("fp8", False, _FP8.encode, _FP8.decode),
        )
    }
)
