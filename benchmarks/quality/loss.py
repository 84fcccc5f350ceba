"""Where reuse loses: in which chunks, and in which layers.

Chunks: with nothing repaired, the chunks that hold the evidence are computed in full, or as many others.
What that takes off the KL sat in them. Layers: values of chunks cached behind their neighbours against
values of the same chunks in full prefill of the item's own prompt, as a relative distance
sqrt(sum |v - v'|^2 / sum |v'|^2). Keys would first have to be moved to one position.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.quality.items import Item, distinct_chunks, shuffled
from benchmarks.quality.loss_tables import COMPUTED, EVIDENCE, LOSS, NOTHING, OTHERS
from benchmarks.quality.measure import Meter
from benchmarks.quality.models import QaModel
from benchmarks.quality.ways import Way

from cachecraft_rag import CacheCraftEngine, Chunk

_IN_PROMPT = "in prompt"
"""Tenant whose chunks were captured in full prefill of their item's prompt."""


@dataclass(frozen=True)
class LossMeter:
    engine: CacheCraftEngine
    model: QaModel
    meter: Meter

    def fill(self, items: Sequence[Item]) -> None:
        """Cache the items' chunks behind their neighbours, for each tenant without what it is to compute."""
        for tenant in COMPUTED:
            self.engine.warm(
                distinct_chunks(items), system=self.model.preamble, tenant=tenant, neighbours=True
            )
        for tenant, pick in ((EVIDENCE, evidence_of), (OTHERS, others_of)):
            keys = self._running.chunk_keys(tenant, [chunk for item in items for chunk in pick(item)])
            self.engine._control("drop_chunks", tenant=tenant, keys=keys)

    def forget(self) -> None:
        for tenant in (*COMPUTED, _IN_PROMPT):
            self.engine.purge(tenant)

    async def measure(self, item: Item) -> dict[str, Any]:
        """KL by what was computed in full, and the distance of values by layer and role of the chunk."""
        ways = [Way("naive", None, tenant) for tenant in COMPUTED]
        rows = await self.meter.measure(item, ways, with_full=False)
        await self.model.ask(
            self.engine, item.chunks, item.question, reuse="off", tenant=_IN_PROMPT, max_tokens=1
        )
        evidence = evidence_of(item)
        rest = [chunk for chunk in item.chunks if chunk not in evidence]
        return {
            "item": item.item_id,
            "kl": {way.regime: row.kl for way, row in zip(ways, rows, strict=True)},
            "distance": {
                EVIDENCE: await asyncio.to_thread(self._distances, evidence),
                OTHERS: await asyncio.to_thread(self._distances, rest),
            },
        }

    def _distances(self, chunks: Sequence[Chunk]) -> list[float]:
        """Mean over the chunks, for each layer."""
        found = [self._distance(chunk) for chunk in chunks]
        return np.mean(found, axis=0).round(5).tolist() if found else []

    def _distance(self, chunk: Chunk) -> np.ndarray:
        cached, true = (self._values(tenant, chunk) for tenant in (NOTHING, _IN_PROMPT))
        squares = np.square(cached - true).sum(axis=(1, 2, 3)) / np.square(true).sum(axis=(1, 2, 3))
        return np.sqrt(squares)

    def _values(self, tenant: str, chunk: Chunk) -> np.ndarray:
        """float32 (num_layers, num_tokens, num_kv_heads, head_size) of the chunk's newest variant."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        core = self._running._backend._llm.engine_core.engine_core
        (key,) = self._running.chunk_keys(tenant, [chunk])
        record = core.scheduler.connector.scheduler_side._store.variants(tenant, key)[0]
        kv = get_kv_transfer_group().worker_side._records[record.record_id].kv
        return kv[:, 1, : record.num_tokens].float().numpy()

    @property
    def _running(self) -> Any:
        return self.engine._running


def evidence_of(item: Item) -> list[Chunk]:
    return [item.chunks[place] for place in item.evidence]


def others_of(item: Item) -> list[Chunk]:
    """As many chunks without evidence, drawn by a fixed seed."""
    places = [place for place in range(len(item.chunks)) if place not in item.evidence]
    return [item.chunks[place] for place in shuffled(places, item.item_id)[: len(item.evidence)]]


def save(model: str, set_name: str, found: Sequence[dict[str, Any]]) -> Path:
    LOSS.mkdir(exist_ok=True)
    path = LOSS / f"{model}-{set_name}.json"
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return path
