"""A run: one model, one set, some ways. It can be stopped at any time and started again."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.quality.caches import fill
from benchmarks.quality.forced import NUM_STEPS, ForcedDecoding
from benchmarks.quality.items import SETS, EvalSet, Item, load_items, of_half, pieces
from benchmarks.quality.loss import LossMeter, save
from benchmarks.quality.measure import Meter
from benchmarks.quality.models import MODELS, QaModel
from benchmarks.quality.results import ResultFile, commit
from benchmarks.quality.ways import FULL, REGIMES, Way
from tqdm import tqdm

from cachecraft_rag import CacheCraftConfig, CacheCraftEngine

_MAX_AT_ONCE = 16
_STORE_BYTES = 6 << 30
_ENGINE_ARGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 8192,
    "max_num_batched_tokens": 8192,
    "kv_cache_memory_bytes": 1 << 30,
    "seed": 0,
}


@dataclass(frozen=True)
class Run:
    """What is asked for, and what of it is not in the result file yet.

    Attributes:
        items: in the set's fixed order, both halves.
        past: items whose prompts are the past traffic; empty where items share no chunks.
        ways: to be measured.
    """

    model: QaModel
    eval_set: EvalSet
    items: Sequence[Item]
    past: Sequence[Item]
    half: str
    ways: Sequence[Way]
    results: ResultFile

    def missing(self) -> dict[str, list[str]]:
        """item id → names of what is still to be measured, full prefill included."""
        done = self.results.done()
        wanted = [FULL, *(way.name for way in self.ways)]
        names = {
            item.item_id: [name for name in wanted if (item.item_id, name) not in done]
            for item in of_half(self.items, self.half)
        }
        return {item_id: missing for item_id, missing in names.items() if missing}

    def meta(self) -> dict[str, Any]:
        pool = len(self.items) if self.eval_set.shares_chunks else "piece"
        facts = {"model": self.model.label, "set": self.eval_set.name, "pool": pool, "steps": NUM_STEPS}
        return {**facts, **_ENGINE_ARGS, "commit": commit()}


def execute(run: Run) -> None:
    """Measure what is missing, a piece of items at a time, and append it to the result file."""
    missing = run.missing()
    if not missing:
        print(f"{run.results.path.name}: nothing to do, all is there")
        return
    run.results.begin(run.meta())
    with (
        make_engine(run.model) as engine,
        tqdm(total=len(missing), desc=run.results.path.stem, unit="item") as progress,
    ):
        _Session(run, engine, missing, progress).measure_all()


def execute_loss(model: QaModel, eval_set: EvalSet, num_items: int, data: Path) -> Path:
    """Measure where reuse loses, on the first items of the even half."""
    items = of_half(load_items(eval_set, data)[: 2 * num_items], "even")
    found: list[dict[str, Any]] = []
    with make_engine(model) as engine, tqdm(total=len(items), desc="loss", unit="item") as progress:
        meter = Meter(engine, model, eval_set, asyncio.Semaphore(_MAX_AT_ONCE))
        loss = LossMeter(engine, model, meter)
        for piece in pieces(items):
            loss.fill(piece)
            for item in piece:
                found.append(asyncio.run(loss.measure(item)))
                progress.update()
            loss.forget()
    return save(model.name, eval_set.name, found)


def make_engine(model: QaModel) -> CacheCraftEngine:
    return CacheCraftEngine(
        model.folder(),
        config=CacheCraftConfig(max_variants_per_chunk=4, host_store_bytes=_STORE_BYTES),
        in_process=True,
        logits_processors=[ForcedDecoding],
        **_ENGINE_ARGS,
    )


@dataclass(frozen=True)
class _Session:
    run: Run
    engine: CacheCraftEngine
    missing: dict[str, list[str]]
    progress: Any

    def measure_all(self) -> None:
        # A shared pool is cached as a whole: then a chunk's neighbours do not depend on what was
        # measured before the run was stopped.
        if self.run.eval_set.shares_chunks:
            self._fill(self.run.items, self.run.past, self._names(self.missing))
        for piece in pieces(self.run.items):
            pending = [item for item in piece if item.item_id in self.missing]
            if not pending:
                continue
            names = self._names([item.item_id for item in pending])
            if not self.run.eval_set.shares_chunks:
                self._fill(piece, (), names)
            asyncio.run(self._measure(pending))
            if not self.run.eval_set.shares_chunks:
                for regime in self._regimes(names):
                    self.engine.purge(regime)

    def _names(self, item_ids: Any) -> set[str]:
        return {name for item_id in item_ids for name in self.missing[item_id]}

    def _regimes(self, names: set[str]) -> list[str]:
        used = {way.regime for way in self.run.ways if way.name in names}
        return [regime for regime in REGIMES if regime in used]

    def _fill(self, items: Sequence[Item], past: Sequence[Item], names: set[str]) -> None:
        for regime in self._regimes(names):
            started_s = time.perf_counter()
            fill(self.engine, self.run.model, regime, items, past)
            seconds = time.perf_counter() - started_s
            self.progress.write(f"cached {regime!r} of {len(items)} items in {seconds:.1f} s")

    async def _measure(self, items: Sequence[Item]) -> None:
        slots = asyncio.Semaphore(_MAX_AT_ONCE)
        meter = Meter(self.engine, self.run.model, self.run.eval_set, slots)

        async def one(item: Item) -> None:
            names = self.missing[item.item_id]
            ways = [way for way in self.run.ways if way.name in names]
            self.run.results.append(await meter.measure(item, ways, with_full=FULL in names))
            self.progress.update()

        await asyncio.gather(*map(one, items))


def make_run(args: argparse.Namespace) -> Run:
    eval_set = SETS[args.set]
    all_items = load_items(eval_set, args.data)
    num_items = min(args.items or eval_set.num_items, len(all_items))
    items, rest = all_items[:num_items], all_items[num_items:]
    return Run(
        model=MODELS[args.model],
        eval_set=eval_set,
        items=items,
        past=rest if eval_set.shares_chunks else (),
        half=args.half,
        ways=args.ways,
        results=ResultFile(args.model, eval_set.name, Path(args.out)),
    )
