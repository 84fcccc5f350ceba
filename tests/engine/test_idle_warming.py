"""Warming in idle time on a scripted engine: what is counted, what is computed, and when it stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from cachecraft_rag.chunks import SHARED_TENANT, Chunk
from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.engine import CacheCraftEngine
from cachecraft_rag.engine.backend import BackendOutput, BackendRequest
from cachecraft_rag.engine.calls import Call
from cachecraft_rag.engine.options import CallOptions
from cachecraft_rag.errors import ConfigurationError

CONFIG = CacheCraftConfig(self_test=False, feedback_share=0.0, idle_warming=True)
RIVER = Chunk("The river flows from the hills to the sea.", doc_id="river", version="1")
QUEEN = Chunk("Who wrote the letter to the queen, and when?", doc_id="queen")
SYSTEM = {"role": "system", "content": "Be brief."}


class Store:
    """What a scheduler side says that misses the keys in `missing`, and stores what it is offered."""

    def __init__(self, backend: Any, spec_of: Callable[[BackendRequest], Any]) -> None:
        self.missing: set[str] = set()
        self.stores = True
        self._backend = backend
        self._spec_of = spec_of
        self._plain_report = backend._report
        self._plain_reply = backend._reply

    def reply(self, control_id: str) -> Any:
        message = next(m for m in self._backend.controls if m.control_id == control_id)
        if message.action != "worth_computing":
            return self._plain_reply(control_id)
        self._backend.replies["worth_computing"] = None
        return {"result": [chunk[0] for chunk in message.arguments["chunks"] if chunk[0] in self.missing]}

    def report(self, request: BackendRequest) -> dict[str, Any]:
        report: dict[str, Any] = self._plain_report(request)
        last = self._spec_of(request).chunks[-1:]
        report["chunks"] = [{**chunk, "cached_start": 0} for chunk in report["chunks"]]
        if last and last[0].key in self.missing:
            report |= {"num_reused_tokens": 0, "chunks": ()}
            if self.stores:
                self.missing.discard(last[0].key)
                report["num_stored_tokens"] = len(last[0].span)
        return report


@pytest.fixture
def store(backend: Any, spec_of: Any, monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store(backend, spec_of)
    monkeypatch.setattr(backend, "_reply", store.reply)
    monkeypatch.setattr(backend, "_report", store.report)
    return store


@pytest.fixture
def engine(make_engine: Any, store: Store) -> CacheCraftEngine:
    engine: CacheCraftEngine = make_engine(CONFIG)
    return engine


def ask(engine: CacheCraftEngine, *chunks: Chunk, **options: Any) -> Any:
    text = "\n\n".join([*(chunk.text for chunk in chunks), "Who?"])
    return engine.chat([SYSTEM, {"role": "user", "content": text}], chunks=chunks, **options)


def drain(engine: CacheCraftEngine) -> dict[str, Any]:
    """All warming done; the figures."""
    assert engine._running is not None and engine._running.warmer is not None
    engine._live.loop.run(engine._running.warmer.drain())
    figures: dict[str, Any] = engine.stats()["idle_warming"]
    return figures


def keys_of(engine: CacheCraftEngine, *chunks: Chunk, tenant: str = "default") -> list[str]:
    assert engine._running is not None
    return list(engine._running.chunk_keys(tenant, chunks))


def test_missing_chunk_is_computed_and_its_use_counted(engine, backend, store, spec_of, tokenizer) -> None:
    """By one request for one token, behind the system prompt it stood behind, apart from vLLM's prefix
    cache; it is no request of a user."""
    ask(engine, RIVER, QUEEN)
    store.missing = set(keys_of(engine, QUEEN))
    del backend.requests[:]
    figures = drain(engine)
    (request,) = backend.requests
    spec = spec_of(request)
    assert [ref.key for ref in spec.chunks] == keys_of(engine, QUEEN) and spec.exact_only and spec.store
    assert request.sampling.max_tokens == 1
    text = tokenizer.decode(request.token_ids)
    assert text.index(SYSTEM["content"]) < text.index(QUEEN.text) and RIVER.text not in text
    assert (figures["num_warmed"], figures["num_warmed_tokens"]) == (1, len(spec.chunks[0].span))
    assert figures["num_hits"] == 0 and engine.stats()["engine"]["num_requests"] == 1
    ask(engine, QUEEN, RIVER)
    assert drain(engine)["num_hits"] == 1
    assert engine.stats()["idle_warming"]["num_hit_tokens"] == len(spec.chunks[0].span)


def test_most_wanted_comes_first(engine, backend, store, spec_of) -> None:
    """By how often it was asked for, not by when."""
    ask(engine, QUEEN), ask(engine, QUEEN), ask(engine, RIVER)
    store.missing = set(keys_of(engine, RIVER, QUEEN))
    del backend.requests[:]
    assert drain(engine)["num_warmed"] == 2
    assert [spec_of(r).chunks[-1].key for r in backend.requests] == keys_of(engine, QUEEN, RIVER)


def test_finished_prompt_is_warmed_behind_its_head(engine, backend, store, tokenizer) -> None:
    """Without a chat template around it."""
    engine.complete(f"Read this.\n\n{RIVER.text}\n\nWho?", chunks=[RIVER])
    store.missing = set(keys_of(engine, RIVER))
    del backend.requests[:]
    assert drain(engine)["num_warmed"] == 1
    assert tokenizer.decode(backend.requests[0].token_ids) == f"Read this.\n\n{RIVER.text}"


@pytest.mark.parametrize("options", [{"store": False}, {"reuse": "off"}])
def test_requests_that_leave_nothing_are_not_counted(engine, backend, store, options) -> None:
    """Nor those that want no reuse."""
    ask(engine, RIVER, **options)
    assert drain(engine)["num_counted"] == 0


def test_shared_chunks_are_left_to_warm(engine, store) -> None:
    """A tenant's system prompt must not stand before what every tenant reads."""
    engine.warm([RIVER], tenant=SHARED_TENANT)
    ask(engine, Chunk(RIVER.text, is_shared=True), QUEEN, tenant="a")
    assert drain(engine)["num_counted"] == 1


def test_context_of_warmed_chunks_is_not_counted(engine, backend, store, spec_of) -> None:
    """What `warm` puts before a chunk was asked for by nobody."""
    engine.warm([QUEEN, RIVER], system=QUEEN.text)
    assert [len(spec_of(request).chunks) for request in backend.requests] == [2, 2]
    assert drain(engine)["num_counted"] == 2
    counts = engine._running.warmer._counts
    now_s = engine._running.warmer._clock()
    assert [counts.count(owned, now_s) for owned in counts] == pytest.approx([1.0, 1.0], abs=0.01)


def test_tenants_are_counted_and_warmed_apart(engine, backend, store, spec_of) -> None:
    """The text of one is computed for that one alone."""
    ask(engine, RIVER, tenant="a"), ask(engine, QUEEN, tenant="b")
    store.missing = {*keys_of(engine, RIVER, QUEEN, tenant="a"), *keys_of(engine, RIVER, QUEEN, tenant="b")}
    del backend.requests[:]
    drain(engine)
    warmed = {(spec_of(r).tenant, spec_of(r).chunks[-1].key) for r in backend.requests}
    a, b = keys_of(engine, RIVER, tenant="a")[0], keys_of(engine, QUEEN, tenant="b")[0]
    assert warmed == {("a", a), ("b", b)}


@pytest.mark.parametrize(
    "change",
    [
        lambda engine: engine.invalidate("river"),
        lambda engine: engine.replace("river", "2", [Chunk("The river is dry.")]),
        lambda engine: engine.invalidate_chunk(RIVER),
        lambda engine: engine.purge(),
    ],
    ids=["invalidate", "replace", "invalidate_chunk", "purge"],
)
def test_what_was_dropped_is_not_warmed(engine, backend, store, spec_of, change) -> None:
    """Until it is asked for again; a purge takes all of the tenant."""
    ask(engine, RIVER, QUEEN)
    store.missing = set(keys_of(engine, RIVER))
    change(engine)
    del backend.requests[:]
    assert drain(engine)["num_warmed"] == 0 and backend.requests == []
    ask(engine, RIVER, tenant="default")
    store.missing = set(keys_of(engine, RIVER))
    assert drain(engine)["num_warmed"] == 1


def test_invalidating_ends_the_warming_under_way(engine, backend, store) -> None:
    """Before the store is told: what is on its way could else be stored after it."""
    ask(engine, RIVER)
    store.missing = set(keys_of(engine, RIVER))
    del backend.requests[:]
    aborted_at_control: list[int] = []
    plain = backend.send_control

    async def send_control(message: Any) -> None:
        if message.action == "invalidate":
            aborted_at_control.append(backend.num_aborted)
        await plain(message)

    backend.send_control = send_control
    backend.gate = asyncio.Event()  # from here on no answer ends
    begin_work(engine)
    while not backend.requests:
        pass
    engine.invalidate("river")
    assert aborted_at_control == [1]
    assert drain(engine)["num_warmed"] == 0


def test_what_is_asked_for_during_a_change_is_not_warmed_after_it(engine, backend, store) -> None:
    """A request that comes while the store is told may have come before: nothing is warmed meanwhile, and
    its count does not stay."""
    ask(engine, QUEEN)
    store.missing = set(keys_of(engine, RIVER, QUEEN))
    plain = backend.send_control

    async def send_control(message: Any) -> None:
        if message.action == "invalidate":
            backend.send_control = plain
            prepared = engine._running.prepare(river_call())
            await engine._running.answer(prepared)
            store.missing = set(keys_of(engine, RIVER, QUEEN))
            del backend.requests[:]
            await engine._running.warmer.drain()
            assert backend.requests == []
        await plain(message)

    backend.send_control = send_control
    engine.invalidate("river")
    assert drain(engine)["num_warmed"] == 1 and store.missing == set(keys_of(engine, RIVER))


def river_call() -> Call:
    return Call(f"{RIVER.text}\n\nWho?", (RIVER,), CallOptions())


def begin_work(engine: CacheCraftEngine) -> Any:
    assert engine._running is not None and engine._running.warmer is not None
    return engine._live.loop.submit(engine._running.warmer.drain())


def test_request_ends_the_warming_under_way(engine, backend, store, spec_of) -> None:
    """It waits for no chunk; the chunk is warmed after it."""
    ask(engine, RIVER)
    store.missing = set(keys_of(engine, RIVER))
    del backend.requests[:]
    backend.gate = asyncio.Event()
    work = begin_work(engine)
    while not backend.requests:
        pass
    backend.gate = None
    ask(engine, QUEEN)
    assert backend.num_aborted == 1
    work.result()
    drain(engine)
    specs = list(map(spec_of, backend.requests))
    assert [spec.exact_only for spec in specs] == [True, False, True]
    assert store.missing == set()


def test_closing_ends_the_warming_under_way(engine, backend, store) -> None:
    """And waits for no chunk."""
    ask(engine, RIVER)
    store.missing = set(keys_of(engine, RIVER))
    del backend.requests[:]
    backend.gate = asyncio.Event()
    begin_work(engine)
    while not backend.requests:
        pass
    engine.close()
    assert backend.num_aborted == 1 and backend.is_shut_down


def test_chunk_that_is_refused_is_not_computed_again(engine, backend, store) -> None:
    """Or every idle second would go to it; when it is asked for again it gets another chance."""
    ask(engine, RIVER)
    store.missing, store.stores = set(keys_of(engine, RIVER)), False
    assert drain(engine)["num_not_stored"] == 1
    num_requests = len(backend.requests)
    assert drain(engine)["num_not_stored"] == 1 and len(backend.requests) == num_requests
    ask(engine, RIVER)
    assert drain(engine)["num_not_stored"] == 2


@pytest.mark.parametrize("fault", [RuntimeError("planted"), BackendOutput("", (), "error")])
def test_faults_cost_one_chunk(engine, backend, store, fault) -> None:
    """The next one is warmed, and requests go on as ever."""
    ask(engine, QUEEN), ask(engine, QUEEN), ask(engine, RIVER)
    store.missing = set(keys_of(engine, RIVER, QUEEN))
    backend.scripts.append(fault)
    figures = drain(engine)
    assert (figures["num_failed"], figures["num_warmed"]) == (1, 1)
    assert ask(engine, QUEEN).text == "one two"


def test_scheduler_side_that_fails_ends_the_round(engine, backend, store, monkeypatch) -> None:
    """Nothing is computed on a guess."""
    ask(engine, RIVER)
    with monkeypatch.context() as patch:
        patch.setattr(backend, "_reply", lambda control_id: {"error": "planted"})
        del backend.requests[:]
        begin_work(engine).result()
    assert engine.stats()["idle_warming"]["num_failed"] == 1 and backend.requests == []


def test_without_the_setting_nothing_is_counted(make_engine, store) -> None:
    """Off by default."""
    engine = make_engine()
    ask(engine, RIVER)
    assert engine._running.warmer is None and "idle_warming" not in engine.stats()


@pytest.mark.parametrize("tier", [{"disk_store_bytes": 1 << 26}, {"redis_url": "redis://host:6379/0"}])
def test_cold_tiers_rule_it_out(tier: dict[str, Any]) -> None:
    """What leaves host memory is read from there."""
    with pytest.raises(ConfigurationError, match="idle_warming"):
        CacheCraftConfig(idle_warming=True, **tier)


def test_number_of_counted_chunks_is_bounded(engine, store) -> None:
    """The chunk asked for longest ago goes, with all that was kept of it."""
    warmer = engine_warmer(engine, 3)
    for index in range(5):
        ask(engine, Chunk(f"{RIVER.text} Part {index}."))
    assert drain(engine)["num_counted"] == 3 == len(warmer._popular)


def engine_warmer(engine: CacheCraftEngine, max_counted: int) -> Any:
    """The engine's warmer, made to count so few."""
    from cachecraft_rag.engine.demand import DecayedCounts

    engine.start()
    assert engine._running is not None and engine._running.warmer is not None
    engine._running.warmer._counts = DecayedCounts(60.0, max_counted)
    return engine._running.warmer
