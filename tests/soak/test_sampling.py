"""Whose time a sample is."""

from __future__ import annotations

import pytest
from benchmarks.soak_parts.sampling import Place, Sampler, owner_of

TORCH = Place("/env/site-packages/torch/functional.py", "cat")
VLLM = Place("/env/site-packages/vllm/v1/core.py", "EngineCore.step")
HOOK = Place("/repo/src/cachecraft_rag/vllm_connector/capture.py", "CaptureSession._copy")
KERNEL = Place("/repo/src/cachecraft_rag/vllm_connector/gathered_attention.py", "GatheredRequest.attend")
WAIT = Place("/usr/lib/python3.11/threading.py", "Condition.wait")
OTHER = Place("/usr/lib/python3.11/json/decoder.py", "decode")


@pytest.mark.parametrize(
    ("stack", "owner"),
    [
        ([TORCH, HOOK, VLLM], "vllm_connector/capture.py:CaptureSession._copy"),
        ([TORCH, VLLM, HOOK, VLLM], "vllm"),
        ([TORCH, KERNEL, HOOK, VLLM], "vllm"),
        ([WAIT, HOOK, VLLM], ""),
        ([OTHER], ""),
        ([], ""),
    ],
    ids=["torch for us", "vllm for us", "the attention of a pass", "waiting", "others", "empty"],
)
def test_sample_belongs_to_the_innermost_of_ours_and_vllm(stack: list[Place], owner: str) -> None:
    assert owner_of(stack) == owner


def test_only_what_runs_inside_is_sampled() -> None:
    sampler = Sampler()
    with sampler.running():
        while sampler.num_samples < 3:
            pass
    seen = sampler.num_samples
    sum(range(10**6))
    assert sampler.num_samples == seen
    assert sampler.shares() == []
