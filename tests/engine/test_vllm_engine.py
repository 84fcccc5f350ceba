"""The engine on a real vLLM with a tiny random model: what only the whole can show."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from cachecraft_rag.chunks import Chunk
from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.engine import CacheCraftEngine, Completion
from cachecraft_rag.errors import ConfigurationError, EngineError, EngineStartError, InvalidRequestError
from cachecraft_rag.events import ChunkDecision, Reason, RequestDecision

pytestmark = pytest.mark.engine

# Small enough for two engines beside each other on a laptop.
SETTINGS = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 128 * 1024**2}
CONFIG = CacheCraftConfig(host_store_bytes=64 * 1024**2)
RIVER = Chunk("The river flows from the hills through three towns to the sea.", doc_id="river")
QUEEN = Chunk("The queen answered the letter of the captain in June.", doc_id="queen")
MESSAGES = [{"role": "user", "content": f"{RIVER.text}\n\n{QUEEN.text}\n\nWho wrote it?"}]
SWAPPED = [{"role": "user", "content": f"{QUEEN.text}\n\n{RIVER.text}\n\nWho wrote it?"}]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CACHECRAFT_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def vllm_engine(tiny_model: Path, cache: Path) -> Iterator[CacheCraftEngine]:
    with CacheCraftEngine(tiny_model, config=CONFIG, **SETTINGS) as engine:
        engine.start()
        yield engine


def ask(engine: CacheCraftEngine, messages=MESSAGES, **options) -> Completion:
    options = {"chunks": [RIVER, QUEEN], "max_tokens": 8, "ignore_eos": True, **options}
    return engine.chat(messages, **options)


def decisions(completion: Completion) -> list[ChunkDecision]:
    return [chunk.decision for chunk in completion.report.chunks]


def test_first_start_proves_reuse_on_the_model(vllm_engine: CacheCraftEngine, cache: Path) -> None:
    """The self-test ran, passed, was remembered, and left nothing in the store."""
    assert len(list((cache / "self_test").iterdir())) == 1
    assert vllm_engine.self_test().passed
    assert vllm_engine.stats()["num_records"] == 0
    assert vllm_engine.check() == []


def test_chunks_are_computed_then_reused(vllm_engine: CacheCraftEngine) -> None:
    """The first sight computes and stores, the next is exact, another order is reuse."""
    cold, again = ask(vllm_engine), ask(vllm_engine, read_prefix_cache=False)
    moved = ask(vllm_engine, SWAPPED)
    assert decisions(cold) == [ChunkDecision.COMPUTED] * 2
    assert decisions(again) == [ChunkDecision.EXACT] * 2
    assert moved.report.decision is RequestDecision.REUSE
    assert again.token_ids == cold.token_ids
    assert moved.report.ttft_s > 0
    vllm_engine.purge()


def test_chunks_are_reused_without_a_profile(tiny_model: Path) -> None:
    """With no layer profiled, KV is stored and reused all the same, and repaired where it moved."""
    config = replace(CONFIG, num_profile_layers=0, strategy="cachecraft", self_test=False)
    with CacheCraftEngine(tiny_model, config=config, **SETTINGS) as engine:
        ask(engine)
        assert decisions(ask(engine, read_prefix_cache=False)) == [ChunkDecision.EXACT] * 2
        assert ChunkDecision.REPAIRED in decisions(ask(engine, SWAPPED, reuse="cachecraft"))


def test_async_stream_and_batch_agree(vllm_engine: CacheCraftEngine) -> None:
    """The same question has the same answer one by one, side by side, and in pieces."""
    questions = [[{"role": "user", "content": f"Who wrote letter {index}?"}] for index in range(8)]
    alone = [ask(vllm_engine, question).text for question in questions]

    async def side_by_side() -> list[Completion]:
        calls = [vllm_engine.achat(q, max_tokens=8, ignore_eos=True) for q in questions]
        return list(await asyncio.gather(*calls))

    assert [completion.text for completion in asyncio.run(side_by_side())] == alone
    pieces = vllm_engine.stream_chat(questions[0], max_tokens=8, ignore_eos=True)
    assert "".join(delta.text for delta in pieces) == alone[0]


def test_abandoned_requests_stop_running(vllm_engine: CacheCraftEngine) -> None:
    """Neither a closed stream nor a cancelled call goes on in vLLM."""

    async def abandon() -> None:
        async for _ in vllm_engine.astream_chat(MESSAGES, max_tokens=800, ignore_eos=True):
            break
        task = asyncio.create_task(vllm_engine.achat(MESSAGES, max_tokens=800, ignore_eos=True))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(abandon())
    ask(vllm_engine)
    assert vllm_engine.stats()["num_running"] == 0


def test_stop_text_and_logprobs(vllm_engine: CacheCraftEngine) -> None:
    """An answer ends before a stop text, and has a log-probability for every token."""
    whole = ask(vllm_engine, logprobs=2)
    assert whole.logprobs is not None
    assert all(token in step for token, step in zip(whole.token_ids, whole.logprobs, strict=True))
    stop = whole.text[2:4]
    stopped = ask(vllm_engine, stop=stop)
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert stopped.finish_reason == "stop"
    assert stopped.report.reason is not Reason.REPORT_LOST


def test_warm_chunks_are_reused_behind_the_same_system_prompt(vllm_engine: CacheCraftEngine) -> None:
    """A warmed chunk is exact for the first question that shows it first."""
    vllm_engine.purge()
    assert vllm_engine.warm([RIVER, QUEEN], system="Be brief.") == 2
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"{RIVER.text}\n\nWhere?"},
    ]
    assert decisions(ask(vllm_engine, messages, chunks=[])) == [ChunkDecision.EXACT]


def test_replaced_document_is_computed_again(vllm_engine: CacheCraftEngine) -> None:
    """After `replace` the old text is not reused, even when it is passed again."""
    ask(vllm_engine)
    new = Chunk("The river was dammed last year.")
    assert vllm_engine.replace("river", "2", [new]) >= 1
    river, queen = ask(vllm_engine, SWAPPED).report.chunks[::-1]
    assert river.decision is ChunkDecision.COMPUTED
    assert queen.decision is not ChunkDecision.COMPUTED
    assert vllm_engine.check() == []


def test_vllm_s_own_refusal_is_an_invalid_request(vllm_engine: CacheCraftEngine) -> None:
    """What only vLLM can refuse names the value, and the engine goes on."""
    with pytest.raises(InvalidRequestError, match="1000"):
        ask(vllm_engine, logprobs=1000)
    assert ask(vllm_engine).text


def test_in_process_engine_gives_the_same_answer(vllm_engine: CacheCraftEngine, tiny_model: Path) -> None:
    """The engine for debuggers answers and reports as the product does."""
    vllm_engine.purge()
    with CacheCraftEngine(tiny_model, config=CONFIG, in_process=True, **SETTINGS) as other:
        for messages in (MESSAGES, SWAPPED):
            ours, theirs = ask(vllm_engine, messages), ask(other, messages)
            assert theirs.token_ids == ours.token_ids
            assert decisions(theirs) == decisions(ours)
        assert other.check() == []


def test_unknown_engine_argument_is_named(tiny_model: Path) -> None:
    """A misspelt vLLM argument is an error of configuration, found before vLLM starts."""
    with pytest.raises(ConfigurationError, match="max_modellen"):
        CacheCraftEngine(tiny_model, max_modellen=64).start()


def test_impossible_setting_is_a_start_error(tiny_model: Path) -> None:
    """What vLLM cannot do ends in an error with advice and its own cause."""
    with pytest.raises(EngineStartError, match="max_model_len"):
        CacheCraftEngine(tiny_model, **{**SETTINGS, "max_model_len": 1_000_000}).start()


def run_script(folder: Path, model: Path, *, has_guard: bool) -> subprocess.CompletedProcess[str]:
    body = f"""
        from cachecraft_rag.config import CacheCraftConfig
        from cachecraft_rag.engine import CacheCraftEngine

        def main():
            config = CacheCraftConfig(self_test=False)
            engine = CacheCraftEngine({str(model)!r}, config=config, **{SETTINGS!r})
            print("answer:", len(engine.complete("Hello", max_tokens=2).token_ids))

        {'if __name__ == "__main__": main()' if has_guard else "main()"}
    """
    script = folder / "script.py"
    script.write_text(textwrap.dedent(body))
    return subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False
    )


def vllm_processes() -> set[psutil.Process]:
    """Those of every engine of this program."""
    return {each for each in psutil.Process().children(recursive=True) if "VLLM::" in each.name()}


def test_dead_vllm_is_an_engine_error_for_every_call(tiny_model: Path, caplog) -> None:
    """When vLLM's processes are killed each call says so, and the engine can still be closed."""
    others = vllm_processes()
    engine = CacheCraftEngine(tiny_model, config=replace(CONFIG, self_test=False), **SETTINGS)
    engine.start()
    ours = vllm_processes() - others
    assert ours
    for process in ours:
        process.kill()  # as the kernel does when memory is out
    psutil.wait_procs(ours)
    calls: list[Callable[[], object]] = [
        lambda: ask(engine),
        lambda: list(engine.stream_complete("Hello")),
        engine.stats,
        engine.check,
        lambda: engine.invalidate("river"),
        lambda: engine.replace("river", "2", [QUEEN]),
        lambda: engine.warm([RIVER]),
        lambda: engine.prefetch([RIVER]),
    ]
    for call in calls:
        with pytest.raises(EngineError, match=r"process died.* make a new one"):
            call()
    engine.close()
    assert "closed before all was written" in caplog.text


def test_program_that_never_closes_its_engine_ends(tmp_path: Path, tiny_model: Path) -> None:
    """Leaving the program is enough: no process stays and no traceback is shown."""
    finished = run_script(tmp_path, tiny_model, has_guard=True)
    assert "answer: 2" in finished.stdout
    assert finished.returncode == 0
    assert "Traceback" not in finished.stderr


def test_script_without_main_guard_is_told(tmp_path: Path, tiny_model: Path) -> None:
    """A script whose import starts an engine fails with the line it lacks."""
    finished = run_script(tmp_path, tiny_model, has_guard=False)
    assert finished.returncode != 0
    assert 'if __name__ == "__main__":' in finished.stderr


def test_model_whose_keys_cannot_be_moved_is_computed_in_full(
    tmp_path: Path, tokenizer, save_tiny_llama: Callable[..., Path]
) -> None:
    """A dynamic rope rules reuse out: the engine answers all the same and the report says why."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    model = save_tiny_llama(tmp_path, tokenizer, rope_parameters=rope)
    with CacheCraftEngine(model, config=CONFIG, **SETTINGS) as engine:
        ask(engine)
        report = ask(engine, SWAPPED).report
    assert report.decision is RequestDecision.FULL
    assert report.reason is Reason.UNSUPPORTED_MODEL
    assert "dynamic" in report.why
    assert {chunk.decision for chunk in report.chunks} == {ChunkDecision.COMPUTED}
