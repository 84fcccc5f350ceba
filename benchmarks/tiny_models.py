"""Tiny models with random weights, one per architecture, saved as Hugging Face folders.

Weights are drawn wide enough that attention is sharp and logits differ: an error in a key's position
or a mask then changes answers, where the usual initialisation would hide it. The exactness cells and
the soak run on them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB_SIZE = 2048
MAX_POSITIONS = 2048
SEED = 20260

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.12,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def _llama() -> Any:
    from transformers import LlamaConfig

    rope = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    return LlamaConfig(**COMMON, rope_parameters=rope)


def _qwen2() -> Any:
    from transformers import Qwen2Config

    rope = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    return Qwen2Config(**COMMON, rope_parameters=rope)


def _qwen3() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**COMMON)


def _mistral() -> Any:
    from transformers import MistralConfig

    rope = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
    return MistralConfig(**COMMON, rope_parameters=rope, sliding_window=None)


def _gemma3() -> Any:
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        **COMMON,
        sliding_window=96,
        query_pre_attn_scalar=32,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )


CONFIGS = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "gemma3": _gemma3,
}


def tiny_model(name: str, root: Path) -> Path:
    """Folder of the tiny model `name` below `root`; made once."""
    folder = root / name
    if (folder / "config.json").is_file():
        return folder
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.copy_(parameter + 0.1 * torch.randn_like(parameter))
            elif parameter_name.endswith("bias"):
                parameter.copy_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    """One word per id: the cells work on token ids, vLLM only wants a tokenizer to be there."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<bos>", "<eos>", "<pad>", *(f"w{index}" for index in range(3, VOCAB_SIZE))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
