"""What both halves of the connector see of vLLM: a scheduler of one step, a model of noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from cachecraft_rag.chunks import Span
from cachecraft_rag.events import ReuseReport
from cachecraft_rag.planner.live import Candidate, LiveMethod, LiveSelection
from cachecraft_rag.planner.selection import positions_of
from cachecraft_rag.store.cold import ColdStore
from cachecraft_rag.store.host import HostChunkStore
from cachecraft_rag.store.quotas import NO_QUOTAS, Quotas
from cachecraft_rag.store.tiers import MemoryTier
from cachecraft_rag.vllm_connector.cold_side import ColdSide, Orphans
from cachecraft_rag.vllm_connector.compat import KVLayer
from cachecraft_rag.vllm_connector.live_choice import (
    Choice,
    LiveChooser,
    LoadedRows,
)
from cachecraft_rag.vllm_connector.messages import PARAMS_KEY, ChunkRef, ControlMessage, RequestSpec
from cachecraft_rag.vllm_connector.passes import PassEnded, PassWatch
from cachecraft_rag.vllm_connector.recompute import take_runs
from cachecraft_rag.vllm_connector.rotary import RotaryTable
from cachecraft_rag.vllm_connector.scheduler_side import SchedulerSide
from cachecraft_rag.vllm_connector.steps import JobFacts, StepFacts, StepOrders

BLOCK = 4
NUM_TOKENS = 40
NUM_BLOCKS = NUM_TOKENS // BLOCK
STEP_TOKENS = 64
TENANT = "t"

HEAD_SIZE = 8
PASS_TOKENS = 5


class Scheduler:
    """The part of vLLM's scheduler that drives the connector: one step after another."""

    def __init__(
        self,
        cold: ColdStore | None = None,
        executor: Executor | None = None,
        num_tokens: int = NUM_TOKENS,
        quotas: Quotas = NO_QUOTAS,
    ) -> None:
        orphans = Orphans()
        self.num_tokens = num_tokens
        self.num_blocks = -(-num_tokens // BLOCK)
        self.store = HostChunkStore(1 << 20, 2, orphans.add, quotas=quotas)
        self.cold = cold and ColdSide(
            cold, self.store, 1, 1.0, orphans, lambda: 0.0, lambda _: executor or ThreadPoolExecutor(1)
        )
        self.side = SchedulerSide(
            self.store,
            block_size=BLOCK,
            max_step_tokens=STEP_TOKENS,
            bytes_per_token=8,
            min_chunk_tokens=2,
            num_ranks=1,
            cold=self.cold,
        )
        self.evicted: set[int] = set()
        self.side.bind_block_pool(
            SimpleNamespace(evict_blocks=self.evicted.update, get_num_free_blocks=lambda: 0)
        )
        self.num_requests = 0

    def request(self, chunks: Sequence[ChunkRef], **options: Any) -> Any:
        self.num_requests += 1
        name = f"r{self.num_requests}"
        options = {"tenant": TENANT, "strategy": "naive", **options}
        spec = RequestSpec(name, chunks=tuple(chunks), **options)
        return SimpleNamespace(
            request_id=f"vllm-{name}",
            kv_transfer_params=spec.to_params(),
            num_prompt_tokens=self.num_tokens,
            prompt_token_ids=list(range(self.num_tokens)),
            skip_reading_prefix_cache=False,
            block_hashes=[index.to_bytes(4, "big") for index in range(self.num_blocks)],
            status=SimpleNamespace(name="FINISHED_STOPPED"),
        )

    def schedule(self, request: Any, local: int = 0) -> StepOrders:
        """Look up and admit: the request waits for what it was promised, or runs in this step."""
        promised = self.side.look_up(request, local)
        self.side.admit(request, promised)
        return self.orders() if promised else self.orders((request, local))

    def orders(self, *running: tuple[Any, int]) -> StepOrders:
        """Orders of a step in which each request runs from a position to its end."""
        num_scheduled = {r.request_id: self.num_tokens - start for r, start in running}
        new = [SimpleNamespace(req_id=r.request_id, num_computed_tokens=start) for r, start in running]
        return self.side.build_orders(
            SimpleNamespace(
                num_scheduled_tokens=num_scheduled,
                total_num_scheduled_tokens=sum(num_scheduled.values()),
                scheduled_new_reqs=new,
                scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
                kv_connector_block_state=SimpleNamespace(
                    resolve_block_ids=lambda request_id: (list(range(self.num_blocks)),)
                ),
            )
        )

    def fill(self, orders: StepOrders) -> None:
        """The workers have filled all that was opened."""
        self.side.take_facts(StepFacts({record.record_id: None for record in orders.new_records}))

    def answer(self, chunks: Sequence[ChunkRef], **options: Any) -> ReuseReport:
        """A whole request; the workers carry out what they are told."""
        request = self.request(chunks, **options)
        orders = self.schedule(request)
        self.fill(orders)
        jobs = {job.request_id: JobFacts(0.0, 0.0, 0) for job in orders.jobs}
        self.side.take_facts(StepFacts(jobs=jobs))
        report = self.side.finish(request, [])
        self.orders()
        assert report is not None
        return ReuseReport.from_dict(report[PARAMS_KEY])

    def store_chunk(self, chunk: ChunkRef, **options: Any) -> None:
        """A whole request that computes and stores one chunk."""
        request = self.request([chunk], **options)
        self.fill(self.schedule(request))
        self.side.finish(request, [])
        self.orders()

    def control(self, action: str, **arguments: Any) -> Any:
        message = ControlMessage("c", action, {"tenant": TENANT, **arguments})
        self.side.on_new_request(SimpleNamespace(kv_transfer_params=message.to_params()))
        return dict(self.orders().replies)["c"]


class Inline(Executor):
    """Runs what is submitted at once, or when it is told to."""

    def __init__(self) -> None:
        self.is_held = False
        self._held: list[Callable[[], None]] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)

        self._held.append(run)
        if not self.is_held:
            self.release()
        return future

    def release(self) -> None:
        held, self._held = self._held, []
        for run in held:
            run()


@pytest.fixture
def executor() -> Inline:
    return Inline()


@pytest.fixture
def cold_scheduler(executor: Inline) -> Scheduler:
    """A scheduler with a cold tier in memory, whose threads run at once or when they are released."""
    return Scheduler(ColdStore({"disk": MemoryTier(1 << 20)}, "model", 1), executor)


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


@pytest.fixture
def make_scheduler() -> Callable[..., Scheduler]:
    return Scheduler


@pytest.fixture
def long_scheduler() -> Scheduler:
    """A scheduler for prompts of 20,000 tokens."""
    return Scheduler(num_tokens=20_000)


def make_layer(
    num_heads: int = 4, num_kv_heads: int = 2, window: int | None = None, cap: float = 0.0
) -> KVLayer:
    return KVLayer(
        name="layer",
        attention=None,
        rotary=RotaryTable(torch.ones(1, HEAD_SIZE), True),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=HEAD_SIZE,
        scale=1 / math.sqrt(HEAD_SIZE),
        sliding_window=window,
        logits_soft_cap=cap,
    )


@dataclass
class NoiseModel:
    """Random fresh KV and queries for every position of a prompt, other loaded keys and equal values.

    The prompt: lead text, a candidate, text, another candidate, an exact chunk, a missing one, the question.

    Attributes:
        passes: spans of each pass that was run.
        num_layers_run: layers that computed to their end in the latest pass.
        measured: what this rank handed to the others.
    """

    LEAD: ClassVar = Span(0, 6)
    CANDIDATES: ClassVar = (Span(6, 20), Span(23, 40))
    LOADED: ClassVar = (*CANDIDATES, Span(40, 46))
    RUNS: ClassVar = (Span(20, 23), Span(46, 50))
    PROBE: ClassVar = Span(50, 57)
    NUM_TOKENS: ClassVar = 57

    layer: KVLayer = field(default_factory=make_layer)
    num_layers: int = 6
    passes: list[tuple[Span, ...]] = field(default_factory=list)
    num_layers_run: int = 0
    measured: list[np.ndarray | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(3)
        shape = (self.num_layers, self.NUM_TOKENS, self.layer.num_kv_heads, HEAD_SIZE)
        self.keys, self.values, self.loaded_keys = torch.randn(3, *shape, generator=random)
        self.loaded_values = self.values.clone()
        width = self.layer.num_heads * HEAD_SIZE
        self.queries = 3 * torch.randn(self.num_layers, self.NUM_TOKENS, width, generator=random)

    def run_pass(self, runs: Sequence[Span], watch: PassWatch) -> None:
        """In pieces, and with buffers that the next layer overwrites, as a runner does it."""
        self.passes.append(tuple(runs))
        left: Sequence[Span] = runs
        while left:
            piece, left = take_runs(left, PASS_TOKENS, 2)
            rows = torch.from_numpy(positions_of(piece))
            buffers = [tensor[0, rows].clone() for tensor in (self.keys, self.values, self.queries)]
            with suppress(PassEnded):
                for index in range(self.num_layers):
                    for buffer, tensor in zip(buffers, (self.keys, self.values, self.queries), strict=True):
                        buffer.copy_(tensor[index, rows])
                    watch.on_update(index, buffers[0], buffers[1])
                    watch.on_query(index, buffers[2])
                    self.num_layers_run = index + 1

    def loaded_rows(self, layers: Sequence[int]) -> LoadedRows:
        positions = positions_of(self.LOADED)
        rows = torch.from_numpy(positions)
        return LoadedRows(
            positions,
            {index: self.loaded_keys[index, rows] for index in layers},
            {index: self.loaded_values[index, rows] for index in layers},
        )

    def choose(
        self,
        live: LiveSelection,
        *,
        probe_layers: Sequence[int] = (3, 5),
        lead_keys: torch.Tensor | None = None,
        runs: tuple[Span, ...] = RUNS,
        probe: Span = PROBE,
        others_failed: bool = False,
    ) -> Choice:
        def on_all_ranks(own: np.ndarray | None, length: int) -> np.ndarray | None:
            assert own is None or own.shape == (length,)
            self.measured.append(own)
            return None if others_failed else own

        chooser = LiveChooser(
            [self.layer] * self.num_layers,
            frozenset(probe_layers),
            on_all_ranks,
            lambda index: None if lead_keys is None else lead_keys[index],
        )
        kept = [1] if live.method is LiveMethod.DEVIATION else probe_layers
        choosing = chooser.choose(live, self.loaded_rows(kept), runs, probe)
        try:
            while True:
                wanted = next(choosing)
                assert wanted.watch is not None
                self.run_pass(wanted.runs, wanted.watch)
        except StopIteration as ended:
            choice: Choice = ended.value
            return choice

    def selection(self, method: LiveMethod, num_tokens: int, need_at: Sequence[int] = ()) -> LiveSelection:
        """Both candidates; stored need at the given positions, none elsewhere."""
        needs = [np.array([float(p in need_at) for p in span.positions()]) for span in self.CANDIDATES]
        return LiveSelection(method, num_tokens, 1, tuple(map(Candidate, self.CANDIDATES, needs)))

    def assert_measured(self, expected: np.ndarray) -> None:
        (found,) = self.measured
        assert found is not None
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)

    def attention_of_question(
        self, probe_layers: Sequence[int], lead_keys: torch.Tensor | None, runs: Sequence[Span]
    ) -> np.ndarray:
        """Softmax in float64, one query and head at a time, over every known position once."""
        key_at: dict[int, tuple[torch.Tensor, int]] = {}
        key_at |= {p: (lead_keys, p) for p in (self.LEAD.positions() if lead_keys is not None else ())}
        key_at |= {int(p): (self.loaded_keys, int(p)) for p in positions_of(self.LOADED)}
        key_at |= {int(p): (self.keys, int(p)) for p in positions_of([*runs, self.PROBE])}
        group, total = self.layer.num_heads // self.layer.num_kv_heads, np.zeros(self.NUM_TOKENS)
        for index in probe_layers:
            for query_at in self.PROBE.positions():
                seen = [p for p in key_at if 0 <= query_at - p < (self.layer.sliding_window or math.inf)]
                keys = torch.stack([key_at[p][0][index, key_at[p][1]] for p in seen]).double()
                heads = self.queries[index, query_at].view(-1, HEAD_SIZE).double()
                for head, query in enumerate(heads):
                    scores = keys[:, head // group] @ query * self.layer.scale
                    if cap := self.layer.logits_soft_cap:
                        scores = cap * torch.tanh(scores / cap)
                    total[seen] += scores.softmax(0).numpy() / len(heads)
        return total[positions_of(self.CANDIDATES)]


@pytest.fixture(scope="session")
def noise_layer() -> Callable[..., KVLayer]:
    return make_layer


@pytest.fixture(scope="session")
def noise_model() -> type[NoiseModel]:
    return NoiseModel
