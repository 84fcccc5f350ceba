"""What is assumed of a machine and its model, each figure with where it comes from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from cachecraft_rag.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """One engine. A step costs

        step_overhead_s + max(weights_s, work / prefill_tokens_per_s)
        + decoded context / context_tokens_per_s + loads

    where work counts tokens of an empty context, a token behind c others being 1 + c /
    attention_balance_tokens of them.

    Attributes:
        weights_s: reading the weights once.
        context_tokens_per_s: tokens of context that decoding reads.
        kv_bytes_per_token: of all layers.
        device_tokens: KV of running requests and of vLLM's prefix cache together.
        host_tokens: KV of chunks in host memory, one engine's.
        shared_tokens: KV of chunks in Redis, shared by all engines.
        host_bytes_per_s / shared_bytes_per_s: loads from there into the paged cache; a step waits for them.
        repair_overhead: cost of a token of the recompute pass, that of a token of prefill being 1.
        sources: for every figure above, where it comes from.

    Raises:
        ConfigurationError: a figure is not positive or has no source.
    """

    name: str
    prefill_tokens_per_s: float
    weights_s: float
    context_tokens_per_s: float
    attention_balance_tokens: float
    step_overhead_s: float
    max_batched_tokens: int
    max_sequences: int
    kv_bytes_per_token: float
    device_tokens: int
    host_tokens: int
    shared_tokens: int
    host_bytes_per_s: float
    shared_bytes_per_s: float
    repair_overhead: float
    sources: Mapping[str, str]

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.name in ("name", "sources"):
                continue
            if not self.sources.get(each.name):
                raise ConfigurationError(f"{self.name}: {each.name} has no source: say where it comes from")
            value = getattr(self, each.name)
            may_be_zero = each.name in ("weights_s", "step_overhead_s")
            if not (value > 0 or (may_be_zero and value == 0)):
                raise ConfigurationError(f"{self.name}: {each.name} is {value!r}: it must be positive")


def read_assumptions(path: Path) -> Assumptions:
    """Measured rates of one machine: a JSON object with the fields of `Assumptions`.

    Raises:
        ConfigurationError: a field is missing, unknown, or breaks its rule.
    """
    values = json.loads(path.read_text())
    names = {each.name for each in fields(Assumptions)}
    if values.keys() != names:
        raise ConfigurationError(f"{path}: missing or unknown fields: {sorted(names ^ values.keys())}")
    return Assumptions(**values)
