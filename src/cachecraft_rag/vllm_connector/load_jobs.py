"""Load jobs: from stored records to KV in a request's blocks, with what has to be computed among it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cachecraft_rag.chunks import Span
from cachecraft_rag.planner.live import LiveMethod, LiveSelection
from cachecraft_rag.planner.plan import Load
from cachecraft_rag.planner.selection import positions_of
from cachecraft_rag.vllm_connector import compat
from cachecraft_rag.vllm_connector.capture import Sink
from cachecraft_rag.vllm_connector.live_choice import (
    DEVIATION_LAYER,
    Choice,
    LiveChooser,
    LoadedRows,
    PassEnded,
    PassWatch,
)
from cachecraft_rag.vllm_connector.recompute import cut_runs, merge_spans
from cachecraft_rag.vllm_connector.rotary import RotaryTable, turn_between
from cachecraft_rag.vllm_connector.steps import JobFacts, LoadJob, slots_at


@dataclass(slots=True, eq=False)
class JobRunner:
    """Runs the load jobs of one rank, each before the forward that attends to its KV.

    Attributes:
        records: record id → stored KV; the worker side's own, as it changes.
        leads: name → keys of the text before a first chunk.
        probe_layers: layers on which the question's attention is read.
        watch: what the layers are to keep of the pass under way, None outside of one.
    """

    runner: Any
    layers: Sequence[compat.KVLayer]
    probe_layers: frozenset[int]
    records: Mapping[int, Sink]
    leads: Mapping[str, Sink]
    block_size: int
    tensor_parallel_size: int
    watch: PassWatch | None = None

    def run(self, job: LoadJob) -> JobFacts:
        """Load, choose and recompute. Raises what a failed pass raises; the promise then is not kept."""
        began = time.perf_counter()
        failed = np.array([not self._can_load(load) for load in job.loads], dtype=bool)
        failed = compat.agree_on_failures(failed, self.tensor_parallel_size)
        loads = [load for load, bad in zip(job.loads, failed, strict=True) if not bad]
        missing = [load for load, bad in zip(job.loads, failed, strict=True) if bad]
        live = job.live.without([load.span for load in missing]) if job.live else None
        rows = self._load(job, loads, self._layers_to_keep(live)) if loads else None
        loaded = time.perf_counter()
        runs = merge_spans([*job.recompute, *(load.span for load in missing)])
        choice = Choice((), runs)
        if live is not None and live.candidates and rows is not None:
            choice = self._chooser(job).choose(live, rows, runs, job.probe)
        selected = time.perf_counter()
        self._recompute(job, choice.remaining)
        return JobFacts(
            load_s=loaded - began,
            select_s=selected - loaded,
            recompute_s=time.perf_counter() - selected,
            loaded_bytes=sum(self._loaded_bytes(load) for load in loads),
            failed_records=tuple(load.record_id for load in missing),
            num_tokens_repaired=sum(len(load.span) for load in missing),
            num_probe_tokens=choice.num_probe_tokens,
            chosen=choice.chosen,
        )

    def _layers_to_keep(self, live: LiveSelection | None) -> frozenset[int]:
        if live is None:
            return frozenset()
        return frozenset({DEVIATION_LAYER}) if live.method is LiveMethod.DEVIATION else self.probe_layers

    def _chooser(self, job: LoadJob) -> LiveChooser:
        def lead_keys(layer: int) -> torch.Tensor | None:
            lead = self.leads.get(job.lead)
            return lead.kv[lead.layers[layer], 0] if lead is not None and lead.is_complete else None

        def run_pass(runs: Sequence[Span], watch: PassWatch) -> None:
            self.watch = watch
            try:
                self._recompute(job, runs)
            finally:
                self.watch = None

        def sum_over_ranks(own: np.ndarray | None, length: int) -> np.ndarray | None:
            return compat.sum_over_ranks(own, length, self.tensor_parallel_size)

        return LiveChooser(self.layers, self.probe_layers, run_pass, sum_over_ranks, lead_keys)

    def _can_load(self, load: Load) -> bool:
        sink = self.records.get(load.record_id)
        return sink is not None and len(sink.filled) >= load.record_offset + len(load.span)

    def _loaded_bytes(self, load: Load) -> int:
        kv = self.records[load.record_id].kv
        return kv.nbytes // kv.shape[2] * len(load.span)

    def _load(self, job: LoadJob, loads: Sequence[Load], kept_layers: frozenset[int]) -> LoadedRows:
        """Write the loaded keys, moved, and values into the request's blocks, layer by layer; what was
        written on `kept_layers`."""
        device = self.runner.device
        parts, spans = [], []
        for load in loads:
            offset, stop = load.record_offset, load.record_offset + len(load.span)
            record = self.records[load.record_id]
            parts.append(record.kv[:, :, offset:stop])
            spans.append((record.start + offset, load.span.start, len(load.span)))
        rows = LoadedRows(positions_of([load.span for load in loads]), {}, {})
        slots = slots_at(job.block_ids, self.block_size, rows.positions)
        slot_tensor = torch.from_numpy(slots).to(device)
        turns: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self.layers):
            key = torch.cat([part[index, 0] for part in parts]).to(device, non_blocking=True)
            value = torch.cat([part[index, 1] for part in parts]).to(device, non_blocking=True)
            table = layer.rotary
            turn = turns.get(id(table.cos_sin))
            if turn is None:
                turn = turns[id(table.cos_sin)] = _turn(table, spans, device)
            moved = compat.rotate_keys(table, key, turn)
            layer.write(moved, value, slot_tensor)
            if index in kept_layers:
                rows.keys[index], rows.values[index] = moved, value
        return rows

    def _recompute(self, job: LoadJob, runs: Sequence[Span]) -> None:
        limits = compat.pass_limits(self.runner)
        for piece in cut_runs(runs, limits.max_tokens, limits.max_sequences):
            positions = positions_of(piece)
            slots = slots_at(job.block_ids, self.block_size, positions)
            with suppress(PassEnded):
                compat.run_recompute_pass(self.runner, piece, job.token_ids[positions], job.block_ids, slots)


def layers_to_probe(layers: Sequence[compat.KVLayer]) -> frozenset[int]:
    """Layers on which the question's attention is read: the later half tells more than all of them;
    windows see only what stands right before the question."""
    later = range(len(layers) // 2, len(layers))
    whole = frozenset(index for index in later if layers[index].sliding_window is None)
    return whole or frozenset(later)


def _turn(table: RotaryTable, spans: Sequence[tuple[int, int, int]], device: torch.device) -> torch.Tensor:
    """The moves of all loaded tokens: (old start, new start, number of tokens) per load."""
    old = np.concatenate([np.arange(start, start + count) for start, _, count in spans])
    new = np.concatenate([np.arange(start, start + count) for _, start, count in spans])
    return turn_between(table, torch.from_numpy(old).to(device), torch.from_numpy(new).to(device))
