"""What load jobs want computed, and what they see of it while the layers compute it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from cachecraft_rag.chunks import Span
from cachecraft_rag.planner.selection import positions_of
from cachecraft_rag.vllm_connector.gathered_attention import GatheredRequest
from cachecraft_rag.vllm_connector.steps import LoadJob


class PassEnded(Exception):  # noqa: N818  (not an error: the pass has done its work)
    """A pass has seen the layers it was run for."""


@dataclass(slots=True, eq=False)
class PassWatch:
    """What is kept of a pass: rows of some layers, in the order of the pass's tokens.

    Attributes:
        layers: whose rows are kept.
        stop_before: layer before whose KV is written the pass ends, None for a whole pass.
    """

    layers: frozenset[int]
    stop_before: int | None = None
    keys: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    values: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    queries: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def on_update(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Raises PassEnded where the pass is to end."""
        if layer == self.stop_before:
            raise PassEnded
        if layer in self.layers:
            # Copies: the model's buffers are used again by the layers above.
            self.keys.setdefault(layer, []).append(key.clone())
            self.values.setdefault(layer, []).append(value.clone())

    def on_query(self, layer: int, query: torch.Tensor) -> None:
        if layer in self.layers:
            self.queries.setdefault(layer, []).append(query.clone())


@dataclass(frozen=True, slots=True, eq=False)
class WantedPass:
    """Tokens that a job wants computed before it goes on.

    Attributes:
        watch: what it wants to see of them.
        provisional: positions among them whose KV is computed once more afterwards.
    """

    runs: tuple[Span, ...]
    watch: PassWatch | None = None
    provisional: Span = field(default=Span(0, 0))


@dataclass(frozen=True, slots=True, eq=False)
class PassPart:
    """One job's part of a pass.

    Attributes:
        positions: int64 (num_tokens,), ascending, those of `spans`.
    """

    job: LoadJob
    spans: tuple[Span, ...]
    wanted: WantedPass
    positions: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "positions", positions_of(self.spans))

    @property
    def is_final(self) -> np.ndarray:
        """bool (num_tokens,): false for tokens whose KV is computed once more afterwards."""
        once_more = self.wanted.provisional
        is_final: np.ndarray = (self.positions < once_more.start) | (self.positions >= once_more.end)
        return is_final


@dataclass(frozen=True, slots=True, eq=False)
class PassUnderWay:
    """What is to be seen of a pass while the layers compute it.

    Attributes:
        watches: rows of the pass, and who watches them.
        final_slots: int64 (num_tokens,) in the paged cache; -1 for what is computed once more, which
            must not be captured.
        gathered: the requests of the pass, if their attention is ours to compute; else none.
    """

    watches: tuple[tuple[slice, PassWatch], ...]
    final_slots: torch.Tensor
    gathered: tuple[GatheredRequest, ...] = ()

    def on_update(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Raises PassEnded where the pass is to end."""
        for rows, watch in self.watches:
            watch.on_update(layer, key[rows], value[rows])

    def on_query(self, layer: int, query: torch.Tensor) -> None:
        for rows, watch in self.watches:
            watch.on_query(layer, query[rows])
