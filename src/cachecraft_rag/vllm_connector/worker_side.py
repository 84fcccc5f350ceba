"""The worker half of the connector: it obeys the scheduler side and reports what it did.

bind(orders)     free and open records, take jobs, arm the captures  (before every step)
<forward>        the layers call the capture session
run_jobs()       a bounded piece of loading and recomputing          (after the forward, or without one)
take_answered()  whose KV is there now
collect()        finished records and their profiles, job facts      (after every step)
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from cachecraft_rag.chunks import AttentionProfile, Span
from cachecraft_rag.planner.selection import positions_of
from cachecraft_rag.vllm_connector import compat
from cachecraft_rag.vllm_connector.capture import CaptureSession, Sink
from cachecraft_rag.vllm_connector.cold_io import ColdIO
from cachecraft_rag.vllm_connector.job_queue import JobQueue
from cachecraft_rag.vllm_connector.load_jobs import JobRunner, layers_to_probe
from cachecraft_rag.vllm_connector.profile import LayerInputs, measure_profile
from cachecraft_rag.vllm_connector.rotary import move_keys, turn_between
from cachecraft_rag.vllm_connector.steps import (
    CaptureTarget,
    ColdFacts,
    NewRecord,
    StepFacts,
    StepOrders,
)

logger = logging.getLogger(__name__)

MAX_LEADS = 64
"""Lead buffers kept: the keys of that many different system prompts, on profiled layers only."""
MAX_ANSWERS = 1024
"""Reports and replies kept for the driver to fetch. Most reports went out with their answer and are never
fetched, at about 1 KB for each chunk."""


class WorkerSide:
    """Records, captures and load jobs of one rank. Used from the worker's own thread only."""

    def __init__(
        self,
        num_profile_layers: int,
        block_size: int,
        tensor_parallel_size: int,
        cold: ColdIO | None = None,
    ) -> None:
        self._cold = cold
        self._num_profile_layers = num_profile_layers
        self._block_size = block_size
        self._tensor_parallel_size = tensor_parallel_size
        self._runner: Any = None
        self._layers: tuple[compat.KVLayer, ...] = ()
        self._session = CaptureSession((), {})
        self._records: dict[int, Sink] = {}
        self._job_runner: JobRunner | None = None
        self._queue: JobQueue | None = None
        self._unserved: set[str] = set()
        self._leads: OrderedDict[str, Sink] = OrderedDict()
        self._open: dict[int, Sink] = {}
        self._num_work_tokens = 0
        self._broken: set[int] = set()
        self._answers: OrderedDict[str, Mapping[str, Any]] = OrderedDict()

    # --- start-up -----------------------------------------------------------------------------

    @property
    def is_attached(self) -> bool:
        return self._runner is not None

    @property
    def _queried_layers(self) -> list[int]:
        """Layers whose queries, and the keys of text before the chunks, are wanted."""
        return sorted(layers_to_probe(self._layers).union(self._session.profile_layers))

    def attach(self, runner: Any) -> None:
        """Find the model's layers and start watching them.

        Raises:
            InternalError: the model has a layer whose KV cannot be captured or moved.
        """
        if self.is_attached:
            return
        layers = compat.discover_layers(runner)
        chosen = np.linspace(0, len(layers) - 1, self._num_profile_layers + 2)[1:-1].round()
        profiled = {int(layer): place for place, layer in enumerate(sorted(set(chosen.tolist())))}
        self._session = CaptureSession(layers, profiled)
        jobs = JobRunner(
            runner,
            layers,
            layers_to_probe(layers),
            self._records,
            self._leads,
            self._block_size,
            self._tensor_parallel_size,
        )
        self._layers, self._runner, self._job_runner = layers, runner, jobs
        gathering = [index for index, layer in enumerate(layers) if layer.has_plain_softmax]
        if gathering and all(compat.has_plain_kv(layers[index], self._block_size) for index in gathering):
            compat.offer_attention(layers, gathering, jobs.attend)
            jobs.gathers = True
        self._queue = JobQueue(jobs.work, jobs.run_pass, compat.pass_limits(runner), len(layers))
        compat.watch_layers(layers, self._on_update, self._queried_layers, self._on_query)

    # --- one engine step ----------------------------------------------------------------------

    def bind(self, orders: StepOrders) -> None:
        self._num_work_tokens = orders.num_work_tokens
        self._take_jobs(orders)
        for record_id in orders.freed:
            self._records.pop(record_id, None)
            self._open.pop(record_id, None)
            if self._cold is not None:
                self._cold.forget(record_id)
        if orders.forget_leads:
            self._leads.clear()
        for name, answer in (*orders.reports, *orders.replies):
            self._file_answer(name, answer)
        if self.is_attached:
            self._open_records(orders)
            self._arm(orders.captures)
            self._order_cold(orders)

    def _take_jobs(self, orders: StepOrders) -> None:
        if self._queue is None:  # not attached yet: there are no layers to load into
            self._unserved.update(job.engine_request_id for job in orders.jobs)
            self._unserved.update(orders.failed)
            return
        for name in orders.dropped:
            self._queue.drop(name)
        for name in orders.failed:
            self._queue.fail(name)
        for job in orders.jobs:
            self._queue.add(job)

    def run_jobs(self) -> None:
        """Do this step's piece of the load jobs."""
        if self._queue is None:
            return
        num_tokens, self._num_work_tokens = self._num_work_tokens, 0
        self._arm(self._queue.captures())
        self._queue.run(num_tokens)

    def take_answered(self) -> tuple[set[str], set[str]]:
        """vLLM's names of requests whose jobs have ended, and those among them that failed."""
        if self._queue is None:
            unserved, self._unserved = self._unserved, set()
            return unserved, unserved
        return self._queue.take_answered()

    def collect(self) -> StepFacts | None:
        """Facts of the step that just ran; None if there is nothing to tell."""
        completed: dict[int, AttentionProfile | None] = {}
        for record_id, sink in list(self._open.items()):
            if sink.is_complete:
                completed[record_id] = self._finish(sink)
                self._records[record_id] = self._open.pop(record_id)
        self._session.disarm()
        jobs = self._queue.take_facts() if self._queue is not None else {}
        facts = StepFacts(completed, frozenset(self._broken), jobs, self._take_cold())
        self._broken = set()
        return facts if facts else None

    def take_answer(self, name: str) -> Mapping[str, Any] | None:
        return self._answers.pop(name, None)

    def stats(self) -> dict[str, int]:
        """Payload held by this rank, for `check()` against the scheduler side's books."""
        return {
            "num_records": len(self._records),
            "num_open": len(self._open),
            "num_bytes": sum(sink.kv.nbytes for sink in self._records.values()),
        }

    def close(self) -> None:
        if self._cold is not None:
            self._cold.close()

    # --- cold records -------------------------------------------------------------------------

    def _order_cold(self, orders: StepOrders) -> None:
        if self._cold is None:
            return
        for meta in orders.cold_writes:
            sink = self._records.get(meta.record_id)
            if sink is not None:
                self._cold.write(meta, sink.kv)
            else:  # evicted in the step in which it was completed
                self._cold.refuse_write(meta.record_id)
        for order in orders.cold_reads:
            meta = order.variant.meta
            shape = self._record_shape(len(self._layers), meta.num_tokens + len(meta.separator))
            self._cold.read(order, shape, self._runner.model_config.dtype)

    def _take_cold(self) -> Mapping[int, ColdFacts]:
        """Records that were read go on the shelf in the same step in which the scheduler side hears of it."""
        if self._cold is None:
            return {}
        loaded, facts = self._cold.take_done()
        layers = {index: index for index in range(len(self._layers))}
        for record_id, (start, kv) in loaded.items():
            sink = Sink(kv, layers, np.ones(kv.shape[2], dtype=bool))
            sink.start = start
            self._records[record_id] = sink
        return {self._cold.rank: facts} if facts else {}

    # --- captures -----------------------------------------------------------------------------

    def _open_records(self, orders: StepOrders) -> None:
        try:
            for record in orders.new_records:
                self._open[record.record_id] = self._new_record_sink(record)
        except Exception:
            logger.exception("records could not be opened")
            self._broken.update(record.record_id for record in orders.new_records)
            for record in orders.new_records:
                self._open.pop(record.record_id, None)

    def _arm(self, captures: Iterable[CaptureTarget]) -> None:
        """Copy these rows of what is computed from here on."""
        try:
            self._session.arm(
                [
                    (self._sink_of(target), target)
                    for target in captures
                    if isinstance(target.sink, str) or target.sink in self._open
                ]
            )
        except Exception:
            logger.exception("nothing is captured")
            self._session.disarm()

    def _new_record_sink(self, record: NewRecord) -> Sink:
        layers = {index: index for index in range(len(self._layers))}
        sink = self._new_sink(record.num_tokens + record.num_separator_tokens, layers)
        sink.start = record.start
        if record.is_scratch or not self._session.profile_layers:
            return sink
        head = self._layers[0]
        shape = (len(self._session.profile_layers), len(sink.filled), head.num_heads, head.head_size)
        sink.queries = torch.empty(shape, dtype=sink.kv.dtype, device=self._runner.device)
        sink.spec = record
        return sink

    def _new_sink(self, num_tokens: int, layers: dict[int, int]) -> Sink:
        shape = self._record_shape(len(layers), num_tokens)
        kv = torch.empty(shape, dtype=self._runner.model_config.dtype)
        return Sink(kv, layers, np.zeros(num_tokens, dtype=bool))

    def _record_shape(self, num_layers: int, num_tokens: int) -> tuple[int, ...]:
        head = self._layers[0]
        return (num_layers, 2, num_tokens, head.num_kv_heads, head.head_size)

    def _sink_of(self, target: CaptureTarget) -> Sink:
        if isinstance(target.sink, int):
            return self._open[target.sink]
        if target.sink not in self._leads:
            places = {layer: place for place, layer in enumerate(self._queried_layers)}
            lead = self._new_sink(target.num_sink_tokens, places)
            self._leads[target.sink] = lead
            while len(self._leads) > MAX_LEADS:
                self._leads.popitem(last=False)
        self._leads.move_to_end(target.sink)
        return self._leads[target.sink]

    def _finish(self, sink: Sink) -> AttentionProfile | None:
        try:
            return self._measure(sink)
        except Exception:
            # A record without a profile is still right; the planner trusts it less.
            logger.exception("attention profile failed")
            return None
        finally:
            sink.queries, sink.spec = None, None

    def _measure(self, sink: Sink) -> AttentionProfile | None:
        spec, queries = sink.spec, sink.queries
        if spec is None or queries is None:
            return None
        before = [
            (index, chunk)
            for index, chunk in zip(spec.prefix_index, spec.context, strict=True)
            if self._holder(chunk.record_id) is not None
        ]
        lead = self._leads.get(spec.lead)
        lead = lead if lead is not None and lead.is_complete else None
        num_lead = len(lead.filled) if lead else 0
        bounds, position = [], num_lead
        for _, chunk in before:
            bounds.append((position, position + len(chunk.span)))
            position += len(chunk.span)
        own = Span(spec.start, spec.start + spec.num_tokens)
        device = queries.device
        spans = [Span(0, num_lead), *(chunk.span for _, chunk in before), own]
        key_positions = torch.from_numpy(positions_of(spans)).to(device)
        inputs = []
        for layer, place in self._session.profile_layers.items():
            keys = [lead.kv[lead.layers[layer], 0]] if lead else []
            keys += [self._keys_at(chunk.record_id, chunk.span, layer) for _, chunk in before]
            keys.append(sink.kv[layer, 0, : spec.num_tokens])
            inputs.append(
                LayerInputs(
                    self._layers[layer],
                    queries[place, : spec.num_tokens],
                    torch.cat(keys).to(device),
                    key_positions,
                )
            )
        return measure_profile(inputs, bounds, [index for index, _ in before], spec.num_prefix_chunks)

    def _holder(self, record_id: int) -> Sink | None:
        return self._records.get(record_id) or self._open.get(record_id)

    def _keys_at(self, record_id: int, span: Span, layer: int) -> torch.Tensor:
        """A record's keys on one layer, moved to `span`."""
        sink = self._holder(record_id)
        assert sink is not None
        start, keys = sink.start, sink.kv[layer, 0, : len(span)]
        if start == span.start:
            return keys
        table = self._layers[layer].rotary
        old = torch.arange(start, start + len(span), device=table.cos_sin.device)
        turn = turn_between(table, old, old + (span.start - start))
        return move_keys(table, keys.to(old.device), turn).to(keys.device)

    # --- called by the layers -----------------------------------------------------------------

    def _on_update(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        under_way = self._job_runner.under_way if self._job_runner is not None else None
        if under_way is not None:
            under_way.on_update(layer, key, value)
            slot_mapping = under_way.final_slots
        self._session.on_update(layer, key, value, slot_mapping)

    def _on_query(self, layer: int, query: torch.Tensor) -> None:
        if self._job_runner is not None and self._job_runner.under_way is not None:
            self._job_runner.under_way.on_query(layer, query)
        if layer in self._session.profile_layers:
            self._session.on_query(layer, query)

    def _file_answer(self, name: str, answer: Mapping[str, Any]) -> None:
        self._answers[name] = answer
        while len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)
