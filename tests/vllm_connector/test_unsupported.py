"""Which configurations of vLLM run without reuse, and the reason that users see."""

from __future__ import annotations

from types import SimpleNamespace as Config

import pytest

from cachecraft_rag.vllm_connector.compat import unsupported_reason


def vllm_config(**parallel: object) -> Config:
    """The part of vLLM's configuration that is asked, of a plain model on one worker."""
    sizes = dict.fromkeys(("pipeline", "data", "decode_context", "prefill_context", "tensor"), 1)
    return Config(
        model_config=Config(
            runner_type="generate",
            is_encoder_decoder=False,
            is_hybrid=False,
            has_inner_state=False,
            is_attention_free=False,
            use_mla=False,
            is_multimodal_model=False,
            hf_text_config=Config(rope_parameters={"rope_type": "default"}),
        ),
        lora_config=None,
        speculative_config=None,
        cache_config=Config(kv_sharing_fast_prefill=False),
        parallel_config=Config(
            **{
                **{f"{name}_parallel_size": size for name, size in sizes.items()},
                "use_ubatching": False,
                **parallel,
            }
        ),
    )


@pytest.mark.parametrize("size", [1, 2, 8])
def test_tensor_parallelism_is_supported(size: int) -> None:
    assert unsupported_reason(vllm_config(tensor_parallel_size=size)) is None


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"data_parallel_size": 2}, "data parallelism"),
        ({"decode_context_parallel_size": 2}, "decode context parallelism"),
        ({"prefill_context_parallel_size": 2}, "prefill context parallelism"),
        ({"use_ubatching": True}, "micro-batches"),
    ],
)
def test_other_parallelism_computes_in_full(setting: dict[str, object], reason: str) -> None:
    """Beside tensor parallelism too."""
    found = unsupported_reason(vllm_config(**{"tensor_parallel_size": 2, **setting}))
    assert found is not None and found.startswith(reason)


def test_all_reasons_are_said() -> None:
    found = unsupported_reason(vllm_config(pipeline_parallel_size=2, data_parallel_size=2))
    assert found is not None and "pipeline parallelism" in found and "data parallelism" in found
