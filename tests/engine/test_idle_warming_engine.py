"""Warming in idle time on a real vLLM with a tiny random model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cachecraft_rag.chunks import Chunk
from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.engine import CacheCraftEngine, Completion
from cachecraft_rag.engine.calls import Prepared
from cachecraft_rag.events import ChunkDecision, Reason

pytestmark = pytest.mark.engine

SETTINGS = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 128 * 1024**2}
CONFIG = CacheCraftConfig(
    host_store_bytes=64 * 1024**2, self_test=False, feedback_share=0.0, idle_warming=True
)
RIVER = Chunk("The river flows from the hills through three towns to the sea.", doc_id="river")
QUEEN = Chunk("The queen answered the letter of the captain in June.", doc_id="queen")
FAR_S = 60.0


@pytest.fixture(scope="module")
def vllm_engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CacheCraftEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CACHECRAFT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        with CacheCraftEngine(tiny_model, config=CONFIG, **SETTINGS) as engine:
            engine.start()
            yield engine


def ask(engine: CacheCraftEngine, *chunks: Chunk, **options: Any) -> Completion:
    text = "\n\n".join([*(chunk.text for chunk in chunks), "Who wrote it?"])
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    options = {"chunks": chunks, "max_tokens": 8, "ignore_eos": True, "read_prefix_cache": False, **options}
    return engine.chat(messages, **options)


def drop_records(engine: CacheCraftEngine, *chunks: Chunk) -> None:
    """As feedback does with a chunk that went wrong: the KV goes, the document stays."""
    assert engine._running is not None
    keys = engine._running.chunk_keys("default", chunks)
    assert engine._control("drop_chunks", tenant="default", keys=keys) == len(chunks)


def assert_answers_alike(reused: Completion, full: Completion) -> None:
    assert reused.token_ids == full.token_ids
    assert full.report.reason is Reason.REUSE_OFF


def test_popular_chunk_is_stored_again_while_nobody_asks(vllm_engine: CacheCraftEngine) -> None:
    """The next request finds it: exact behind the same head, repaired elsewhere, with the answers of full
    compute."""
    assert vllm_engine._running is not None and vllm_engine._running.warmer is not None
    warmer = vllm_engine._running.warmer
    is_warmed, plain_ask = threading.Event(), warmer._ask

    async def watched_ask(prepared: Prepared) -> Completion:
        completion = await plain_ask(prepared)
        is_warmed.set()
        return completion

    ask(vllm_engine, RIVER)
    drop_records(vllm_engine, RIVER)
    warmer._ask = watched_ask
    try:
        ask(vllm_engine, QUEEN)  # the last request for now
        assert is_warmed.wait(FAR_S)
    finally:
        warmer._ask = plain_ask
    exact, moved = ask(vllm_engine, RIVER), ask(vllm_engine, QUEEN, RIVER, reuse="recompute_all")
    assert [chunk.decision for chunk in exact.report.chunks] == [ChunkDecision.EXACT]
    assert moved.report.chunks[1].decision is ChunkDecision.REPAIRED
    assert_answers_alike(exact, ask(vllm_engine, RIVER, reuse="off"))
    assert_answers_alike(moved, ask(vllm_engine, QUEEN, RIVER, reuse="off"))
    figures = vllm_engine.stats()["idle_warming"]
    assert (figures["num_warmed"], figures["num_not_stored"], figures["num_failed"]) == (1, 0, 0)
    assert figures["num_hits"] == 2 and figures["num_hit_tokens"] == exact.report.chunks[0].num_reused_tokens
    assert vllm_engine.check() == []
    vllm_engine.purge()


def test_invalidated_document_is_not_warmed(vllm_engine: CacheCraftEngine) -> None:
    """What was dropped beside it is."""
    assert vllm_engine._running is not None and vllm_engine._running.warmer is not None
    before = vllm_engine.stats()["idle_warming"]["num_warmed"]
    ask(vllm_engine, RIVER, QUEEN)
    drop_records(vllm_engine, RIVER, QUEEN)
    vllm_engine.invalidate("river")
    vllm_engine._live.loop.run(vllm_engine._running.warmer.drain())
    assert vllm_engine.stats()["idle_warming"]["num_warmed"] == before + 1
    river, queen = ask(vllm_engine, RIVER, QUEEN, reuse="recompute_all").report.chunks
    assert river.decision is ChunkDecision.COMPUTED and queen.decision is ChunkDecision.REPAIRED
