"""The request traces as sequences of chunk requests."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 512
# Attention over this many tokens of context costs as much as a token's share of the weights: 2 P
# operations per token against 4 L d per token and token of context, with 7e9 weights, 32 layers, d = 4096.
BALANCE_TOKENS = 2 * 7e9 / (4 * 32 * 4096)
# Cache-Craft's CCI of a passage; measured values crowd between .5 and .65.
CCI = 0.6


@dataclass(frozen=True, slots=True)
class Access:
    """A chunk in a request.

    Attributes:
        cost: work to compute it where it stands, in tokens of an empty context.
        prefix: chunks before it; None where the chunk's identity holds them already.
    """

    chunk: int
    num_tokens: int
    cost: float
    prefix: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Request:
    time_s: float
    accesses: tuple[Access, ...]
    conversation: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    requests: tuple[Request, ...]

    def accesses(self) -> Iterator[Access]:
        return (access for request in self.requests for access in request.accesses)

    @property
    def distinct_tokens(self) -> int:
        return sum({access.chunk: access.num_tokens for access in self.accesses()}.values())

    @property
    def duration_s(self) -> float:
        return self.requests[-1].time_s - self.requests[0].time_s


def ragpulse(folder: Path) -> Trace:
    """A question service's retrieved passages; a passage named twice in a request counts once."""
    num_tokens = {row["id"]: row["tokens"] for row in rows_of(folder, "trace_ragpulse_lengths")}
    requests = [
        Request(row["t"], _passages(row["sys"], row["passages"], num_tokens), row["s"])
        for row in rows_of(folder, "trace_ragpulse")
        if row["passages"]
    ]
    return Trace("RAGPulse", tuple(requests))


def mooncake(folder: Path) -> Trace:
    """Prefix blocks of chats and documents: a block's identity holds all that stands before it."""
    return Trace(
        "Mooncake",
        tuple(
            Request(
                row["t"],
                tuple(
                    Access(block, BLOCK_TOKENS, compute_cost(BLOCK_TOKENS, index * BLOCK_TOKENS))
                    for index, block in enumerate(row["blocks"])
                ),
            )
            for row in rows_of(folder, "trace_mooncake_synthetic")
        ),
    )


def compute_cost(num_tokens: int, num_before: int) -> float:
    """Prefill work in tokens of an empty context: linear layers plus attention over what is before."""
    return num_tokens * (1 + (num_before + num_tokens / 2) / BALANCE_TOKENS)


def cfo(old_prefix: Sequence[int] | None, new_prefix: Sequence[int] | None) -> float:
    """Cache-Craft's recompute share without a model: the same inter-attention to all chunks before.

    CFO = CCI * (1 - overlap), where chunks that are new to the prefix count against the overlap as
    those that are gone do; the order of the common ones is left out.
    """
    if old_prefix == new_prefix:
        return 0.0
    old, new = set(old_prefix or ()), set(new_prefix or ())
    return CCI * (1 - len(old & new) / max(len(old), len(new)))


def _passages(system: list[int], passages: list[int], num_tokens: dict[int, int]) -> tuple[Access, ...]:
    before = sum(num_tokens[part] for part in system)
    distinct = tuple(dict.fromkeys(passages))
    accesses = []
    for index, passage in enumerate(distinct):
        size = num_tokens[passage]
        accesses.append(Access(passage, size, compute_cost(size, before), distinct[:index]))
        before += size
    return tuple(accesses)


def rows_of(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    with gzip.open(folder / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)
