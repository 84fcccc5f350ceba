"""A vLLM logits processor that compares log-probabilities with a reference, and forces tokens.

It talks to the measuring code through the dictionary `TRACES`, so it works in-process only. vLLM's
own log-probabilities would not do: prompt log-probabilities switch reuse off, and those of the whole
vocabulary for each step would be copied through Python objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

NUM_STEPS = 8
"""Answer tokens that are compared."""
TRACE_ARG = "trace"
FORCED_ARG = "forced"


@dataclass(frozen=True, slots=True)
class Reference:
    """Full prefill's distributions of the first answer tokens, over the whole vocabulary.

    Attributes:
        log_probs: float32 (num_steps, vocab_size), natural logarithms.
        probs: their exponentials.
    """

    log_probs: torch.Tensor
    probs: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[torch.Tensor]) -> Reference:
        log_probs = torch.stack(list(rows))
        return cls(log_probs, log_probs.exp())

    def __len__(self) -> int:
        return len(self.log_probs)

    def kl(self, step: int, log_probs: torch.Tensor) -> float:
        """KL(reference || other) at `step`, in nats; `log_probs` is float32 (vocab_size,)."""
        terms = self.probs[step] * (self.log_probs[step] - log_probs)
        # 0 log 0 = 0, which floating point calls NaN.
        return float(torch.where(self.probs[step] > 0, terms, 0.0).sum())


@dataclass(slots=True)
class Trace:
    """What one request is compared with, and what was found.

    Attributes:
        reference: None records `rows`, to make a reference of.
        rows: step → float32 (vocab_size,) raw log-probabilities.
        kl: step → KL(reference || this request).
    """

    reference: Reference | None = None
    rows: dict[int, torch.Tensor] = field(default_factory=dict)
    kl: dict[int, float] = field(default_factory=dict)

    def record(self, step: int, logits: torch.Tensor) -> None:
        """`logits` (vocab_size,) of `step`, before anything was forced. A prompt that is computed in
        several parts passes here once for each; the last part counts."""
        if step >= (NUM_STEPS if self.reference is None else len(self.reference)):
            return
        log_probs = logits.float().log_softmax(dim=-1)
        if self.reference is None:
            self.rows[step] = log_probs
        else:
            self.kl[step] = self.reference.kl(step, log_probs)


TRACES: dict[str, Trace] = {}


@dataclass(slots=True)
class _Row:
    """One traced request in vLLM's batch; `output` is vLLM's own list, which grows."""

    trace: Trace
    forced: Sequence[int]
    output: Sequence[int]


class ForcedDecoding(LogitsProcessor):  # type: ignore[misc]
    """Traces requests that carry `extra_args={"trace": key}`, and makes those that also carry
    `"forced": [token ids]` produce these tokens, whatever their logits say."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _, output in batch_update.added:
            self._add(index, params.extra_args or {}, output)
        for source, target, direction in batch_update.moved:
            self._move(source, target, swap=direction is MoveDirectionality.SWAP)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, row in self._rows.items():
            step = len(row.output)
            row.trace.record(step, logits[index])
            if step < len(row.forced):
                logits[index, row.forced[step]] = torch.finfo(logits.dtype).max
        return logits

    def _add(self, index: int, extra_args: dict[str, Any], output: Sequence[int]) -> None:
        self._rows.pop(index, None)
        if trace := TRACES.get(extra_args.get(TRACE_ARG, "")):
            self._rows[index] = _Row(trace, extra_args.get(FORCED_ARG, ()), output)

    def _move(self, source: int, target: int, *, swap: bool) -> None:
        moved, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
        if moved is not None:
            self._rows[target] = moved
        if swap and replaced is not None:
            self._rows[source] = replaced
