"""Machines that were not at hand: rates from data sheets, and what is guessed of them."""

from __future__ import annotations

from types import MappingProxyType

from benchmarks.cluster_sim.assumptions import Assumptions

GB = 1e9
_MFU = 0.45
_COMMON = {
    "step_overhead_s": "guess: scheduling and launching of a vLLM step, a few ms without CUDA graphs",
    "max_batched_tokens": "vLLM's default for a server on this GPU",
    "max_sequences": "vLLM's default for a server on this GPU",
    "host_tokens": "256 GB of host memory over kv_bytes_per_token",
    "shared_tokens": "1 TB of Redis over kv_bytes_per_token",
    "shared_bytes_per_s": "measured here: GET of 2 MiB from Redis, docs/store-benchmark.md",
    "repair_overhead": "not measured on these: the aim of 1.10 that `ttft` has here",
}


def _gpu(
    name: str,
    *,
    num_gpus: int,
    flops: float,
    memory_bytes_per_s: float,
    memory_bytes: float,
    link_bytes_per_s: float,
    server_limits: tuple[int, int],
    model: tuple[float, int, int, int],
    sheet: str,
) -> Assumptions:
    """`server_limits`: tokens of a step and sequences; `model`: parameters, layers, width, and bytes of KV
    per token. Weights are in bfloat16."""
    parameters, num_layers, width, kv_bytes = model
    weights_bytes = 2 * parameters
    return Assumptions(
        name=name,
        prefill_tokens_per_s=num_gpus * flops * _MFU / (2 * parameters),
        weights_s=weights_bytes / (num_gpus * memory_bytes_per_s),
        context_tokens_per_s=num_gpus * memory_bytes_per_s / kv_bytes,
        attention_balance_tokens=2 * parameters / (4 * num_layers * width),
        step_overhead_s=0.002,
        max_batched_tokens=server_limits[0],
        max_sequences=server_limits[1],
        kv_bytes_per_token=kv_bytes,
        device_tokens=int((0.9 * num_gpus * memory_bytes - weights_bytes) / kv_bytes),
        host_tokens=int(256 * GB / kv_bytes),
        shared_tokens=int(1_000 * GB / kv_bytes),
        host_bytes_per_s=num_gpus * link_bytes_per_s,
        shared_bytes_per_s=1.8 * GB,
        repair_overhead=1.10,
        sources=MappingProxyType(
            {
                **_COMMON,
                "prefill_tokens_per_s": f"{sheet}, {flops / 1e12:.0f} TFLOPS dense bfloat16; "
                f"guess: {_MFU:.0%} of it reached, at 2 operations per parameter and token",
                "weights_s": f"{sheet}, memory bandwidth {memory_bytes_per_s / 1e12:.2f} TB/s",
                "context_tokens_per_s": f"{sheet}, memory bandwidth over kv_bytes_per_token",
                "attention_balance_tokens": "2 P over 4 L d operations, from the model's published shape",
                "kv_bytes_per_token": "the model's published shape: layers, KV heads, head size, bfloat16",
                "device_tokens": f"{sheet}, {memory_bytes / GB:.0f} GB, 90 % as vLLM takes, less the weights",
                "host_bytes_per_s": f"{sheet}, host link; guess: 80 % of its nominal rate",
            }
        ),
    )


_LLAMA_8B = (8.0e9, 32, 4_096, 2 * 32 * 8 * 128 * 2)
_LLAMA_70B = (70.6e9, 80, 8_192, 2 * 80 * 8 * 128 * 2)

PROFILES = {
    profile.name: profile
    for profile in (
        _gpu(
            "a100-8b",
            num_gpus=1,
            flops=312e12,
            memory_bytes_per_s=2.04e12,
            memory_bytes=80 * GB,
            link_bytes_per_s=0.8 * 32 * GB,
            server_limits=(2_048, 256),
            model=_LLAMA_8B,
            sheet="NVIDIA A100 80GB SXM data sheet",
        ),
        _gpu(
            "h100-8b",
            num_gpus=1,
            flops=989e12,
            memory_bytes_per_s=3.35e12,
            memory_bytes=80 * GB,
            link_bytes_per_s=0.8 * 64 * GB,
            server_limits=(8_192, 1_024),
            model=_LLAMA_8B,
            sheet="NVIDIA H100 SXM data sheet",
        ),
        _gpu(
            "h100x4-70b",
            num_gpus=4,
            flops=989e12,
            memory_bytes_per_s=3.35e12,
            memory_bytes=80 * GB,
            link_bytes_per_s=0.8 * 64 * GB,
            server_limits=(8_192, 1_024),
            model=_LLAMA_70B,
            sheet="NVIDIA H100 SXM data sheet, four of them",
        ),
    )
}
"""By name: Llama 3.1 of 8 and 70 thousand million parameters, on one or four GPUs to an engine."""
