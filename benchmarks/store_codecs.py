"""What each way to store KV costs in bytes, time and error: the tables of docs/record-format.md.

    python -m benchmarks.store_codecs                    made-up KV with channels of unlike scale
    python -m benchmarks.store_codecs --model default    KV of that model, or of a folder, over demo passages

The error is that of the decoded KV against the KV in the model's dtype, relative to the root mean
square of all keys, or all values, of the same layer: its own root mean square over all layers, and
the largest. MB/s are of uncompressed KV in the model's dtype, on one thread, best of `--rounds`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from cachecraft_rag.models import default_model
from cachecraft_rag.store.codecs import CODECS, DTYPES, Codec
from cachecraft_rag.store.record_format import KV, Expected, RecordFacts, VariantName, decode, encode

try:
    import zfpy
except ModuleNotFoundError:
    zfpy = None

Array = NDArray[Any]

MADE_SHAPE = (16, 2, 160, 4, 64)
SEED = 4
ZFP_BITS = (8, 12)
ZFP_TOLERANCES = (0.01, 0.05)
"""Largest error that is allowed, in parts of the layer's root mean square."""
MAX_TOKENS = 384
"""Fewer than any window, so that windowed layers hold as many keys as the others."""
PASSAGES = Path(__file__).resolve().parents[1] / "examples" / "data" / "passages.jsonl"
MB = 1e6


@dataclass(frozen=True, slots=True)
class Way:
    """One way to store KV: `decode` takes the joined buffers of `encode`."""

    name: str
    is_exact: bool
    encode: Callable[[Array], list[Any]]
    decode: Callable[[bytes], Array]


@dataclass(frozen=True, slots=True)
class Result:
    num_bytes: int
    encode_s: float
    decode_s: float
    decoded: Array


def codec_way(codec: Codec, kv: Array) -> Way:
    return Way(
        codec.name,
        codec.is_exact,
        codec.encode,
        lambda blob: codec.decode(memoryview(blob), kv.dtype, kv.shape),
    )


def zfp_ways(kv: Array) -> list[Way]:
    """Keys, or values, of a layer as one float32 (tokens, channels) array each: zfp has no bfloat16."""
    limits = layer_rms(kv.astype(np.float32))
    rates = [zfp_way(kv, f"zfp, {bits} bits", lambda _, bits=bits: {"rate": bits}) for bits in ZFP_BITS]
    tolerances = [
        zfp_way(
            kv,
            f"zfp, error < {part}",
            lambda place, part=part: {"tolerance": part * float(limits[place].item())},
        )
        for part in ZFP_TOLERANCES
    ]
    return rates + tolerances


def zfp_way(kv: Array, name: str, setting: Callable[[tuple[int, ...]], dict[str, float]]) -> Way:
    places = list(np.ndindex(kv.shape[:2]))

    def encode_all(array: Array) -> list[Any]:
        planes = [array[p].astype(np.float32).reshape(array.shape[2], -1) for p in places]
        streams = [zfpy.compress_numpy(plane, **setting(p)) for p, plane in zip(places, planes, strict=True)]
        return [np.array([len(stream) for stream in streams]).tobytes(), *streams]

    def decode_all(blob: bytes) -> Array:
        lengths = np.frombuffer(blob, np.int64, len(places))
        ends = itertools.accumulate(lengths.tolist(), initial=lengths.nbytes)
        found = np.empty(kv.shape, kv.dtype)
        for place, (start, end) in zip(places, itertools.pairwise(ends), strict=True):
            found[place] = zfpy.decompress_numpy(blob[start:end]).reshape(kv.shape[2:])
        return found

    return Way(name, False, encode_all, decode_all)


def best_s(rounds: int, call: Callable[[], object]) -> float:
    """Shortest of `rounds` runs, in seconds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(way: Way, kv: Array, rounds: int) -> Result:
    blob = b"".join(way.encode(kv))
    return Result(
        len(blob),
        best_s(rounds, lambda: way.encode(kv)),
        best_s(rounds, lambda: way.decode(blob)),
        way.decode(blob),
    )


def layer_rms(kv: Array) -> Array:
    """Root mean square of the keys, and of the values, of each layer: (layers, 2, 1, 1, 1)."""
    return np.sqrt(np.mean(np.square(kv), axis=(2, 3, 4), keepdims=True))


def errors(found: Array, kv: Array) -> list[str]:
    """RMS and largest relative error of the keys, then of the values, in percent."""
    exact = kv.astype(np.float32)
    relative = (found.astype(np.float32) - exact) / layer_rms(exact)
    cells = []
    for which in range(2):
        part = relative[:, which]
        cells += [f"{100 * float(np.sqrt(np.mean(np.square(part)))):.2f}", f"{100 * np.abs(part).max():.1f}"]
    return cells


def row(way: Way, kv: Array, rounds: int) -> list[str]:
    result = measure(way, kv, rounds)
    if way.is_exact:
        assert result.decoded.tobytes() == kv.tobytes(), f"{way.name} is not exact"
    speeds = [f"{kv.nbytes / MB / seconds:,.0f}" for seconds in (result.encode_s, result.decode_s)]
    return [
        f"`{way.name}`" if way.name in CODECS else way.name,
        f"{result.num_bytes / kv.shape[2]:,.0f}",
        f"{result.num_bytes / kv.nbytes:.3f}",
        *(["view", "view"] if way.name == "raw" else speeds),
        *(["0", "0", "0", "0"] if way.is_exact else errors(result.decoded, kv)),
    ]


def print_table(head: list[str], rows: list[list[str]]) -> None:
    print(f"| {' | '.join(head)} |")
    print(f"|{'---|' * len(head)}")
    for cells in rows:
        print(f"| {' | '.join(cells)} |")


def print_codecs(kv: Array, rounds: int) -> None:
    ways = [codec_way(codec, kv) for codec in CODECS.values()]
    if zfpy is None:
        print("zfp is left out: `pip install zfpy` adds it.\n")
    else:
        ways += zfp_ways(kv)
    head = ["codec", "bytes per token", "of raw", "encode MB/s", "decode MB/s"]
    head += ["keys RMS %", "keys largest %", "values RMS %", "values largest %"]
    print_table(head, [row(way, kv, rounds) for way in ways])


def print_record(kv: Array, rounds: int) -> None:
    """What the record adds to a raw array: header, checksum, and the time to open it."""
    variant = VariantName("namespace", "0" * 32, "0" * 32)
    facts = RecordFacts(variant=variant, rank=0, num_ranks=1, num_tokens=kv.shape[2])
    expected = Expected(variant=variant, rank=0, num_ranks=1)
    blob = b"".join(encode(facts, {KV: kv}))
    plain = np.frombuffer(blob, np.uint8)
    timed = {
        "open a record, header only": lambda: decode(blob, expected, verify=False).array(KV),
        "open a record, all checksums": lambda: decode(blob, expected).array(KV),
        "xxh3_128 alone": lambda: xxhash.xxh3_128_digest(plain),
        "copy of the same bytes": plain.copy,
    }
    print_table(
        [f"raw record of {len(blob) / MB:.1f} MB, {len(blob) - kv.nbytes} bytes of it header", "ms", "MB/s"],
        [
            [
                name,
                f"{1000 * seconds:.3f}",
                "" if "header only" in name else f"{len(blob) / MB / seconds:,.0f}",
            ]
            for name, call in timed.items()
            for seconds in [best_s(rounds, call)]
        ],
    )


def made_kv() -> Array:
    """Normal numbers with a scale by channel, and 1 in 32 key channels ten times as large."""
    dice = np.random.default_rng(SEED)
    layers, _, _, heads, size = MADE_SHAPE
    scales = dice.lognormal(0, 0.5, (layers, 2, 1, heads, size))
    scales[:, 0, ..., :: size // 2] *= 10
    return (dice.standard_normal(MADE_SHAPE) * scales).astype(np.float32)


def model_kv(name: str) -> Array:
    """KV of the first demo passages, keys turned to their positions: (layers, 2, tokens, heads, size)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = default_model() if name == "default" else Path(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with PASSAGES.open(encoding="utf-8") as lines:
        text = "\n\n".join(json.loads(line)["text"] for line in islice(lines, 4))
    encoded = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    with torch.no_grad():
        cache = model(encoded.input_ids[:, :MAX_TOKENS]).past_key_values
    layers = [torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]
    kv: Array = torch.stack(layers).transpose(2, 3).float().numpy()
    return kv


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.store_codecs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", help="'default', or a folder that transformers can load")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="the model's")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    given = model_kv(args.model) if args.model else made_kv()
    kv = given.astype(DTYPES[args.dtype])
    source = f"KV of {args.model}" if args.model else "made-up KV (no --model), channels of unlike scale"
    print(f"{source}: {kv.shape} in {args.dtype}; {platform.machine()}, numpy {np.__version__}\n")
    print_codecs(kv, args.rounds)
    print()
    print_record(kv, args.rounds)


if __name__ == "__main__":
    main()
