"""What the workers measure for a live selection: a pass of the question, or one through early layers.

Both passes write the KV that they compute, so nothing in them is lost: the question's pass also
computes what has to be computed anyway, and the early layers stay fresh.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cachecraft_rag.chunks import Span
from cachecraft_rag.planner.live import LiveMethod, LiveSelection
from cachecraft_rag.planner.selection import positions_of
from cachecraft_rag.vllm_connector.compat import KVLayer
from cachecraft_rag.vllm_connector.passes import PassWatch, WantedPass
from cachecraft_rag.vllm_connector.profile import LayerInputs, attention_received
from cachecraft_rag.vllm_connector.recompute import merge_spans

logger = logging.getLogger(__name__)

DEVIATION_LAYER = 1
"""Layer whose values are compared, as in CacheBlend's released code; it and those below are computed."""


MAX_PROBE_SHARE = 0.25
"""Of a budget, the most that `focus` spends on asking the question. What is left for repair matters more:
at 5 % of a short prompt the question's pass took half, and answers were worse than by stored need alone."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedRows:
    """KV as it was loaded, on the layers that are measured.

    Attributes:
        positions: int64 (n,), ascending positions in the prompt.
        keys / values: layer → (n, num_kv_heads, head_size), keys rotated to `positions`.
    """

    positions: np.ndarray
    keys: dict[int, torch.Tensor]
    values: dict[int, torch.Tensor]

    def add(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """The next rows of one layer."""
        known = layer in self.keys
        self.keys[layer] = torch.cat([self.keys[layer], key]) if known else key
        self.values[layer] = torch.cat([self.values[layer], value]) if known else value

    def rows_of(self, spans: Sequence[Span]) -> np.ndarray:
        return np.searchsorted(self.positions, positions_of(spans))


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The tokens chosen, and what is still to be computed, they included."""

    chosen: tuple[Span, ...]
    remaining: tuple[Span, ...]
    num_probe_tokens: int = 0


Choosing = Generator[WantedPass, None, Choice]
"""Yields the passes that it needs run, and is resumed when they have been; then gives the choice."""
SumOverRanks = Callable[[np.ndarray | None, int], np.ndarray | None]


@dataclass(frozen=True, slots=True, eq=False)
class LiveChooser:
    """Measures and chooses for one job.

    Attributes:
        probe_layers: layers on which the question's attention is read.
        sum_over_ranks: adds up what each rank measured on its own heads; (None, n) if it could not.
        lead_keys: keys of the text before the first chunk by layer, from position 0 on; None if unknown.
    """

    layers: Sequence[KVLayer]
    probe_layers: frozenset[int]
    sum_over_ranks: SumOverRanks
    lead_keys: Callable[[int], torch.Tensor | None]

    def choose(
        self, live: LiveSelection, loaded: LoadedRows, runs: tuple[Span, ...], probe: Span
    ) -> Choosing:
        """Choose within the budget, the cost of measuring taken off first.

        Args:
            runs: what has to be computed anyway.
        """
        if live.method is LiveMethod.DEVIATION:
            return (yield from self._by_deviation(live, loaded, runs))
        return (yield from self._by_question(live, loaded, runs, probe))

    def _by_question(
        self, live: LiveSelection, loaded: LoadedRows, runs: tuple[Span, ...], probe: Span
    ) -> Choosing:
        is_dear = not probe or len(probe) > MAX_PROBE_SHARE * live.num_tokens
        if live.method is LiveMethod.FOCUS and is_dear:
            chosen = live.choose(None, live.num_tokens)
            return Choice(chosen, merge_spans([*runs, *chosen]))
        budget = live.num_tokens - len(probe)
        if budget <= 0 or not probe:
            return Choice((), runs)
        watch = PassWatch(self.probe_layers)
        first = merge_spans([*runs, probe])
        yield WantedPass(first, watch, probe)
        measured = self._measure(live, lambda: self._attention(live, loaded, first, len(probe), watch))
        chosen = live.choose(measured, budget)
        return Choice(chosen, chosen, len(probe))

    def _by_deviation(self, live: LiveSelection, loaded: LoadedRows, runs: tuple[Span, ...]) -> Choosing:
        num_layers, num_early = len(self.layers), DEVIATION_LAYER + 1
        num_later = num_layers - num_early
        left = num_layers * live.num_tokens - num_early * live.num_candidates
        if num_later <= 0 or left < num_later:
            return Choice((), runs)
        first = merge_spans([*runs, *live.spans])
        yield WantedPass(first, watch := PassWatch(frozenset({DEVIATION_LAYER}), stop_before=num_early))
        measured = self._measure(live, lambda: _deviation(live, loaded, first, watch))
        chosen = live.choose(measured, left // num_later)
        return Choice(chosen, merge_spans([*runs, *chosen]))

    def _measure(self, live: LiveSelection, measure: Callable[[], np.ndarray]) -> np.ndarray | None:
        try:
            own: np.ndarray | None = measure()
        except Exception:
            logger.exception("tokens are chosen by their stored need: measuring failed")
            own = None
        # Every rank comes here, measured or not: the others wait for it.
        return self.sum_over_ranks(own, live.num_candidates)

    def _attention(
        self,
        live: LiveSelection,
        loaded: LoadedRows,
        computed: Sequence[Span],
        num_queries: int,
        watch: PassWatch,
    ) -> np.ndarray:
        """Attention mass that the question puts on each candidate, over heads and probe layers."""
        leads = {index: self.lead_keys(index) for index in sorted(self.probe_layers)}
        num_lead = min(0 if lead is None else len(lead) for lead in leads.values())
        # What the pass itself computed of the text before the chunks is not counted twice.
        known = np.setdiff1d(np.arange(num_lead), positions_of(computed))
        key_positions = np.concatenate([known, loaded.positions, positions_of(computed)])
        columns = torch.from_numpy(len(known) + loaded.rows_of(live.spans))
        total = torch.zeros(live.num_candidates)
        for index, lead in leads.items():
            layer, fresh = self.layers[index], torch.cat(watch.keys[index])
            own = [] if lead is None else [lead[torch.from_numpy(known)].to(fresh.device)]
            keys = torch.cat([*own, loaded.keys[index], fresh])
            queries = torch.cat(watch.queries[index]).view(-1, layer.num_heads, layer.head_size)
            positions = torch.from_numpy(key_positions).to(fresh.device)
            received = attention_received(LayerInputs(layer, queries[-num_queries:], keys, positions))
            total += received[columns]
        return total.numpy()


def _deviation(
    live: LiveSelection, loaded: LoadedRows, computed: Sequence[Span], watch: PassWatch
) -> np.ndarray:
    """Squared distance of each candidate's loaded value from the fresh one, over heads and channels."""
    fresh = torch.cat(watch.values[DEVIATION_LAYER])
    rows = np.searchsorted(positions_of(computed), positions_of(live.spans))
    new = fresh[torch.from_numpy(rows).to(fresh.device)].float()
    old = loaded.values[DEVIATION_LAYER][torch.from_numpy(loaded.rows_of(live.spans)).to(fresh.device)]
    distances: np.ndarray = (new - old.float()).square().flatten(1).sum(1).cpu().numpy()
    return distances
