"""What each codec costs in bytes and error."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.store_codecs import codec_way, errors, made_kv, measure

from cachecraft_rag.store.codecs import CODECS, DTYPES

DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True)
class CodecRow:
    """Errors are relative to the root mean square of all keys, or all values, of the layer."""

    codec: str
    bytes_per_token: float
    share_of_raw: float
    keys_rms_percent: float
    keys_largest_percent: float
    values_rms_percent: float
    values_largest_percent: float


def measure_codecs() -> list[CodecRow]:
    kv = made_kv().astype(DTYPES[DTYPE])
    rows = []
    for codec in CODECS.values():
        result = measure(codec_way(codec, kv), kv, rounds=1)
        rows.append(
            CodecRow(
                codec.name,
                result.num_bytes / kv.shape[2],
                result.num_bytes / kv.nbytes,
                *map(float, errors(result.decoded, kv)),
            )
        )
    return rows
