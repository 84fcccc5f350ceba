"""One rank's reads and writes of cold records, on side threads: the worker's own thread never waits.

The scheduler side orders, this obeys: what is done is handed over at the end of a step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import torch

from cachecraft_rag.chunks import RecordMeta
from cachecraft_rag.store.cold import ColdStore, with_scores
from cachecraft_rag.store.cold_record import ColdRecord
from cachecraft_rag.store.record_format import KV, ArrayForm, BlobEntry
from cachecraft_rag.vllm_connector.steps import ColdFacts, ColdRead, LoadedPart, WrittenPart

logger = logging.getLogger(__name__)

NUM_READERS = 2
MAX_WAITING_WRITE_BYTES = 256 << 20
"""Records are kept alive while they wait to be written; beyond this they are not written at all."""

Put = Callable[[], tuple[BlobEntry, tuple[str, ...]]]
"""Writes one rank's share; answers as `ColdStore.put_part` does."""


class ColdIO:
    """Side threads of one rank over a cold store of its own."""

    def __init__(self, cold: ColdStore, rank: int) -> None:
        self.rank = rank
        self._cold = cold
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="cachecraft-cold-write")
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="cachecraft-cold-read")
        self._lock = threading.Lock()
        self._written: dict[int, WrittenPart] = {}
        self._loaded: dict[int, LoadedPart] = {}
        self._read_kv: dict[int, tuple[int, torch.Tensor]] = {}
        self._wanted: set[int] = set()
        self._num_waiting_bytes = 0

    def write(self, meta: RecordMeta, kv: torch.Tensor) -> None:
        """Write a record behind; it is left out where too many wait already."""
        scores = meta.profile.token_scores if meta.profile else None
        self._write_behind(
            meta.record_id,
            kv.nbytes,
            lambda: self._cold.put_part(meta, self.rank, as_array(kv), scores),
        )

    def refuse_write(self, record_id: int) -> None:
        self._note_written(record_id, WrittenPart(None))

    def read(self, order: ColdRead, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._wanted.add(order.record_id)
        self._readers.submit(self._read, order, ArrayForm(_name(dtype), shape))

    def forget(self, record_id: int) -> None:
        """The record is no longer wanted; what is still read for it is thrown away."""
        self._wanted.discard(record_id)

    def take_done(self) -> tuple[Mapping[int, tuple[int, torch.Tensor]], ColdFacts]:
        """What was finished since the last call: the start and KV of records that are still wanted, and the
        facts about them."""
        with self._lock:
            read, self._read_kv = self._read_kv, {}
            facts = ColdFacts(self._written, self._loaded)
            self._written, self._loaded = {}, {}
        kept = {record_id: each for record_id, each in read.items() if record_id in self._wanted}
        self._wanted -= facts.loaded.keys()
        return kept, facts

    def close(self) -> None:
        self._writer.shutdown(wait=True)
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._cold.close()

    def _write_behind(self, record_id: int, num_bytes: int, put: Put) -> None:
        with self._lock:
            is_room = self._num_waiting_bytes + num_bytes <= MAX_WAITING_WRITE_BYTES
            self._num_waiting_bytes += num_bytes * is_room
        if is_room:
            self._writer.submit(self._write, record_id, num_bytes, put)
        else:
            self.refuse_write(record_id)

    def _write(self, record_id: int, num_bytes: int, put: Put) -> None:
        part = WrittenPart(None)
        try:
            part = WrittenPart(*put())
        except Exception:
            logger.exception("record %d was not written", record_id)
        with self._lock:
            self._num_waiting_bytes -= num_bytes
        self._note_written(record_id, part)

    def _read(self, order: ColdRead, form: ArrayForm) -> None:
        part, kv, record = LoadedPart(False), None, None
        try:
            record = self._cold.load(order.variant, self.rank, {KV: form})
            if record is not None:
                # A copy: the array is a view of bytes that may not be written and are not aligned for it.
                kv = as_tensor(np.array(record.kv))
                part = LoadedPart(True, with_scores(order.variant.meta, record.token_scores))
        except Exception:
            logger.exception("record %d was not read", order.record_id)
        with self._lock:
            self._loaded[order.record_id] = part
            if kv is not None:
                self._read_kv[order.record_id] = (order.variant.meta.start, kv)
        if order.copy_to:
            self._copy(order, record)

    def _copy(self, order: ColdRead, record: ColdRecord | None) -> None:
        """Write what was read to faster tiers, behind."""
        if record is None:
            self.refuse_write(order.record_id)
            return
        variant, copy_to = order.variant, order.copy_to
        self._write_behind(
            order.record_id,
            len(record.blob),
            lambda: self._cold.copy_part(variant, self.rank, record, copy_to),
        )

    def _note_written(self, record_id: int, part: WrittenPart) -> None:
        with self._lock:
            self._written[record_id] = part


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's memory as an array; NumPy itself has no bfloat16."""
    tensor = tensor.contiguous().cpu()
    if tensor.dtype is torch.bfloat16:
        bits: np.ndarray = tensor.view(torch.uint16).numpy()
        return bits.view(ml_dtypes.bfloat16)
    array: np.ndarray = tensor.numpy()
    return array


def as_tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
