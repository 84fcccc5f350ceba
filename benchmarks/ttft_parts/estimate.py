"""How long a run will take, from one short prefill: for a look before the start, not for a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.ttft_parts.ways import Way, warming_way

PROBE_TOKENS = 500


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What decides how much a prefill computes.

    Attributes:
        num_weights: of all layers, without embeddings.
        attention_width: query heads times their size, over all layers.
    """

    num_weights: int
    attention_width: int

    @classmethod
    def read(cls, folder: Path) -> ModelSize:
        """From `config.json` of a decoder with gated feed-forward layers."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        head_size = config.get("head_dim") or hidden // heads
        kv_heads = config.get("num_key_value_heads") or heads
        attention = hidden * head_size * 2 * (heads + kv_heads)
        weights = attention + 3 * hidden * config["intermediate_size"]
        layers = config["num_hidden_layers"]
        return cls(layers * weights, layers * heads * head_size)

    def prefill_flops(self, num_tokens: int) -> float:
        """2 per weight and token, and 4 per pair of tokens and width, of which half is masked.

        Windowed layers are counted as if they saw everything.
        """
        return 2.0 * self.num_weights * num_tokens + 2.0 * self.attention_width * num_tokens**2


def num_full_prefills(ways: Sequence[Way], repeats: int) -> float:
    """What one context costs, in full prefills of it: filling the store, warming up, and the repeats."""
    warming = warming_way(ways)
    return 1.0 + (warming.cost if warming else 0.0) + repeats * sum(way.cost for way in ways)


def estimate_s(
    size: ModelSize, contexts: Sequence[int], ways: Sequence[Way], repeats: int, probe: tuple[int, float]
) -> float:
    """Seconds for all contexts.

    Args:
        probe: tokens of a prefill that was timed, and its seconds.
    """
    flops_per_s = size.prefill_flops(probe[0]) / probe[1]
    total = sum(size.prefill_flops(context) for context in contexts)
    return num_full_prefills(ways, repeats) * total / flops_per_s
