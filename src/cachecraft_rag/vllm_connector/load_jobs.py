"""Load jobs: from stored records to KV in a request's blocks, with what has to be computed among it."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
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
from cachecraft_rag.vllm_connector.gathered_attention import MIN_TOKENS, GatheredRequest
from cachecraft_rag.vllm_connector.live_choice import (
    DEVIATION_LAYER,
    Choice,
    LiveChooser,
    LoadedRows,
)
from cachecraft_rag.vllm_connector.passes import (
    PassEnded,
    PassPart,
    PassUnderWay,
    PassWatch,
    WantedPass,
)
from cachecraft_rag.vllm_connector.recompute import merge_spans
from cachecraft_rag.vllm_connector.rotary import RotaryTable, turn_between
from cachecraft_rag.vllm_connector.steps import JobFacts, LoadJob, slots_at

LOADED_PER_COMPUTED = 32
"""Tokens that are loaded in the time in which one is computed: a step that loads must not be longer than
one that computes. In bfloat16 with AVX-512, 4,954 tokens were loaded in 0.13 s and computed in 4.18 s."""


@dataclass(slots=True, eq=False)
class Allowance:
    """What a step may still do for load jobs, in tokens that are computed."""

    left: float = 0.0


Work = Generator[WantedPass | None, None, JobFacts]
"""A load job under way. It yields the passes it needs run and is resumed when they have been; None where
it waits for the allowance of the next step."""


@dataclass(slots=True, eq=False)
class JobRunner:
    """Does the work of load jobs on one rank.

    Attributes:
        records: record id → stored KV; the worker side's own, as it changes.
        leads: name → keys of the text before a first chunk.
        probe_layers: layers on which the question's attention is read.
        under_way: the pass that is computed now, None outside of one.
    """

    runner: Any
    layers: Sequence[compat.KVLayer]
    probe_layers: frozenset[int]
    records: Mapping[int, Sink]
    leads: Mapping[str, Sink]
    block_size: int
    tensor_parallel_size: int
    gathers: bool = False
    under_way: PassUnderWay | None = None

    def work(self, job: LoadJob, allowance: Allowance) -> Work:
        """Load, choose and recompute. The facts that it gives have no times yet."""
        failed = np.array([not self._can_load(load) for load in job.loads], dtype=bool)
        failed = compat.agree_on_failures(failed, self.tensor_parallel_size)
        loads = [load for load, bad in zip(job.loads, failed, strict=True) if not bad]
        missing = [load for load, bad in zip(job.loads, failed, strict=True) if bad]
        # Held from here on: a record may be freed before its last token is loaded.
        records = {load.record_id: self.records[load.record_id] for load in loads}
        live = job.live.without([load.span for load in missing]) if job.live else None
        rows = LoadedRows(positions_of([load.span for load in loads]), {}, {})
        kept = self._layers_to_keep(live)
        while loads:
            while allowance.left <= 0:
                yield None
            part, loads = take_loads(loads, math.ceil(allowance.left * LOADED_PER_COMPUTED))
            self._load(job, part, records, kept, rows)
            allowance.left -= sum(len(load.span) for load in part) / LOADED_PER_COMPUTED
        runs = merge_spans([*job.recompute, *(load.span for load in missing)])
        choice = Choice((), runs)
        if live is not None and live.candidates:
            choice = yield from self._chooser(job).choose(live, rows, runs, job.probe)
        if remaining := merge_spans([*choice.remaining, job.tail]):
            yield WantedPass(remaining)
        return JobFacts(
            load_s=0.0,
            recompute_s=0.0,
            loaded_bytes=sum(
                _loaded_bytes(records[load.record_id], load) for load in job.loads if load not in missing
            ),
            failed_records=tuple(load.record_id for load in missing),
            num_tokens_repaired=sum(len(load.span) for load in missing),
            num_probe_tokens=choice.num_probe_tokens,
            chosen=choice.chosen,
        )

    def run_pass(self, parts: Sequence[PassPart]) -> None:
        """Compute parts of several jobs, all watched to the same layer, in one forward."""
        slots = [slots_at(part.job.block_ids, self.block_size, part.positions) for part in parts]
        final_slots = [np.where(part.is_final, own, -1) for part, own in zip(parts, slots, strict=True)]
        self.under_way = PassUnderWay(
            tuple(_watches(parts)),
            torch.from_numpy(np.concatenate(final_slots)),
            tuple(self._gathered(parts)) if self.gathers else (),
        )
        try:
            with suppress(PassEnded):
                compat.run_recompute_pass(
                    self.runner,
                    [span for part in parts for span in part.spans],
                    np.concatenate([part.job.token_ids[part.positions] for part in parts]),
                    _block_table(parts),
                    np.concatenate(slots),
                )
        finally:
            self.under_way = None

    def attend(self, layer: int, query: torch.Tensor, output: torch.Tensor) -> bool:
        """Compute the attention of the pass under way, if it is one whose keys were to be gathered."""
        if self.under_way is None or not self.under_way.gathered:
            return False
        described = self.layers[layer]
        for request in self.under_way.gathered:
            keys, values = compat.read_kv(described, request.blocks)
            request.attend(query, keys, values, described.scale, output)
        return True

    def _gathered(self, parts: Sequence[PassPart]) -> Iterator[GatheredRequest]:
        """Nothing for a pass of few tokens."""
        if sum(len(part.positions) for part in parts) < MIN_TOKENS:
            return
        row = 0
        for part in parts:
            num_blocks = int(part.positions[-1]) // self.block_size + 1
            blocks = torch.from_numpy(part.job.block_ids[:num_blocks].astype(np.int64))
            yield GatheredRequest(row, torch.from_numpy(part.positions), blocks)
            row += len(part.positions)

    def _layers_to_keep(self, live: LiveSelection | None) -> frozenset[int]:
        if live is None:
            return frozenset()
        return frozenset({DEVIATION_LAYER}) if live.method is LiveMethod.DEVIATION else self.probe_layers

    def _chooser(self, job: LoadJob) -> LiveChooser:
        def lead_keys(layer: int) -> torch.Tensor | None:
            lead = self.leads.get(job.lead)
            return lead.kv[lead.layers[layer], 0] if lead is not None and lead.is_complete else None

        def sum_over_ranks(own: np.ndarray | None, length: int) -> np.ndarray | None:
            return compat.sum_over_ranks(own, length, self.tensor_parallel_size)

        return LiveChooser(self.layers, self.probe_layers, sum_over_ranks, lead_keys)

    def _can_load(self, load: Load) -> bool:
        sink = self.records.get(load.record_id)
        return sink is not None and len(sink.filled) >= load.record_offset + len(load.span)

    def _load(
        self,
        job: LoadJob,
        loads: Sequence[Load],
        records: Mapping[int, Sink],
        kept_layers: frozenset[int],
        rows: LoadedRows,
    ) -> None:
        """Write the loaded keys, moved, and values into the request's blocks, layer by layer; what was
        written on `kept_layers` is added to `rows`."""
        device = self.runner.device
        parts, spans = [], []
        for load in loads:
            offset, stop = load.record_offset, load.record_offset + len(load.span)
            record = records[load.record_id]
            parts.append(record.kv[:, :, offset:stop])
            spans.append((record.start + offset, load.span.start, len(load.span)))
        slots = slots_at(job.block_ids, self.block_size, positions_of([load.span for load in loads]))
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
                rows.add(index, moved, value)


def layers_to_probe(layers: Sequence[compat.KVLayer]) -> frozenset[int]:
    """Layers on which the question's attention is read: the later half tells more than all of them;
    windows see only what stands right before the question."""
    later = range(len(layers) // 2, len(layers))
    whole = frozenset(index for index in later if layers[index].sliding_window is None)
    return whole or frozenset(later)


def _block_table(parts: Sequence[PassPart]) -> np.ndarray:
    """int32 (num_runs, num_blocks): for each run the blocks of its request, padded."""
    num_blocks = max(len(part.job.block_ids) for part in parts)
    tables = [np.pad(part.job.block_ids, (0, num_blocks - len(part.job.block_ids))) for part in parts]
    return np.repeat(tables, [len(part.spans) for part in parts], axis=0)


def _watches(parts: Sequence[PassPart]) -> Iterator[tuple[slice, PassWatch]]:
    row = 0
    for part in parts:
        num_tokens = len(part.positions)
        if part.wanted.watch is not None:
            yield slice(row, row + num_tokens), part.wanted.watch
        row += num_tokens


def take_loads(loads: Sequence[Load], num_tokens: int) -> tuple[list[Load], list[Load]]:
    """The first `num_tokens` tokens, and what is left."""
    taken: list[Load] = []
    room = num_tokens
    for index, load in enumerate(loads):
        if room <= 0:
            return taken, list(loads[index:])
        if len(load.span) <= room:
            taken.append(load)
            room -= len(load.span)
            continue
        middle = load.span.start + room
        taken.append(Load(load.record_id, Span(load.span.start, middle), load.record_offset))
        rest = Load(load.record_id, Span(middle, load.span.end), load.record_offset + room)
        return taken, [rest, *loads[index + 1 :]]
    return taken, []


def _loaded_bytes(record: Sink, load: Load) -> int:
    return record.kv.nbytes // record.kv.shape[2] * len(load.span)


def _turn(table: RotaryTable, spans: Sequence[tuple[int, int, int]], device: torch.device) -> torch.Tensor:
    """The moves of all loaded tokens: (old start, new start, number of tokens) per load."""
    old = np.concatenate([np.arange(start, start + count) for start, _, count in spans])
    new = np.concatenate([np.arange(start, start + count) for _, start, count in spans])
    return turn_between(table, torch.from_numpy(old).to(device), torch.from_numpy(new).to(device))
