"""Copying keys, values and queries while the model computes them.

A chunk may be computed over several engine steps and inside the recompute pass; rows of the batch
come in another order than positions and are padded. So each target names the slots of the paged
cache it wants, and rows are found by the slot mapping of the forward at hand.

Shapes: L layers, P profiled layers, T tokens of a sink, H KV heads, Q query heads, D head size.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from cachecraft_rag.vllm_connector.compat import KVLayer
from cachecraft_rag.vllm_connector.steps import CaptureTarget, NewRecord

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Sink:
    """Where captured rows go.

    Attributes:
        kv: (L, 2, T, H, D) in the model's dtype; keys as computed, at their own positions. A lead
            buffer holds profiled layers only, `layers` says which.
        queries: (P, T, Q, D), kept only until the profile is measured.
        filled: (T,), rows whose last layer has been written.
        start: position of row 0 in the prompt it was captured from.
    """

    kv: torch.Tensor
    layers: dict[int, int]
    filled: np.ndarray
    start: int = 0
    queries: torch.Tensor | None = None
    spec: NewRecord | None = None

    @property
    def is_complete(self) -> bool:
        return bool(self.filled.all())


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Rows of the current forward that belong to one sink; slices where they are contiguous."""

    sink: Sink
    source: slice | torch.Tensor
    target: slice | torch.Tensor


@dataclass(slots=True, eq=False)
class CaptureSession:
    """The captures of one engine step: `on_update` and `on_query` are called by the layers."""

    layers: Sequence[KVLayer]
    profile_layers: dict[int, int]
    _targets: list[tuple[Sink, CaptureTarget]] = field(default_factory=list)
    _rows: list[_Rows] = field(default_factory=list)

    def arm(self, targets: Sequence[tuple[Sink, CaptureTarget]]) -> None:
        self._targets, self._rows = list(targets), []

    def disarm(self) -> None:
        self._targets, self._rows = [], []

    def on_update(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        if not self._targets:
            return
        try:
            self._copy(layer, key, value, slot_mapping)
        except Exception:
            # A capture must not cost the request its answer; rows not copied stay unfilled, so
            # their records never become ready.
            logger.exception("capture failed on layer %d", layer)
            self.disarm()

    def _copy(self, layer: int, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        if layer == 0:
            self._rows = _match_rows(self._targets, slot_mapping)
        for rows in self._rows:
            index = rows.sink.layers.get(layer)
            if index is not None:
                rows.sink.kv[index, 0, rows.target] = key[rows.source]
                rows.sink.kv[index, 1, rows.target] = value[rows.source]
            if layer == len(self.layers) - 1:
                rows.sink.filled[_as_numpy(rows.target)] = True

    def on_query(self, layer: int, query: torch.Tensor) -> None:
        if not self._rows:
            return
        try:
            shaped = query.view(query.shape[0], -1, self.layers[layer].head_size)
            for rows in self._rows:
                if rows.sink.queries is not None:
                    place = self.profile_layers[layer]
                    rows.sink.queries[place, rows.target] = shaped[rows.source]
        except Exception:
            logger.exception("capture failed on the queries of layer %d", layer)
            self.disarm()


def _match_rows(targets: Sequence[tuple[Sink, CaptureTarget]], slot_mapping: torch.Tensor) -> list[_Rows]:
    slots = slot_mapping.cpu().numpy()
    order = np.argsort(slots, kind="stable")
    ordered = slots[order]
    found: list[_Rows] = []
    for sink, target in targets:
        place = np.searchsorted(ordered, target.slots)
        place[place == len(ordered)] = 0
        hit = ordered[place] == target.slots
        if hit.any():
            rows = order[place[hit]]
            wanted = np.flatnonzero(hit) + target.offset
            device = sink.kv.device
            found.append(_Rows(sink, _as_index(rows, device), _as_index(wanted, device)))
    return found


def _as_index(rows: np.ndarray, device: torch.device) -> slice | torch.Tensor:
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows) and (np.diff(rows) == 1).all():
        return slice(first, last + 1)
    return torch.from_numpy(rows).to(device)


def _as_numpy(index: slice | torch.Tensor) -> slice | np.ndarray:
    return index if isinstance(index, slice) else index.cpu().numpy()
