"""`CacheCraftEngine`: vLLM with chunk-level KV reuse, inside the user's program."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cachecraft_rag.chunks import Chunk
from cachecraft_rag.engine.api import Completion, CompletionDelta, Message
from cachecraft_rag.engine.calibrate import CalibrationRun
from cachecraft_rag.engine.calibration import (
    BUDGETS,
    Calibration,
    CalibrationQuestion,
    Setup,
    check_budgets,
    check_questions,
    check_target,
)
from cachecraft_rag.engine.calibration_files import AnswerFile, save_calibration
from cachecraft_rag.engine.calls import Call
from cachecraft_rag.engine.documents import EngineDocuments
from cachecraft_rag.engine.options import (
    CallOptions,
    check_chunks,
    check_messages,
    check_no_tools,
    check_prompt,
    check_tenant,
)
from cachecraft_rag.engine.router import FullCompute
from cachecraft_rag.engine.running import RunningEngine
from cachecraft_rag.engine.self_test import SelfTestResult, load_result, run_self_test, save_result
from cachecraft_rag.engine.warm import by_owner, check_count, first_that_fits, run_calls, warm_calls
from cachecraft_rag.errors import CacheCraftError
from cachecraft_rag.events import Reason

if TYPE_CHECKING:
    from cachecraft_rag.retrieval import Encoder

logger = logging.getLogger(__name__)


class CacheCraftEngine(EngineDocuments):
    """vLLM embedded in this program, reusing the KV of retrieved chunks wherever they stand.

    Making one is cheap and checks its arguments; vLLM starts with `start()` or the first call. All
    methods may be called from any thread. Options of the calls: see `CallOptions` (`reuse`,
    `recompute_ratio`, `tenant`, `store`, `precision_critical`, `read_prefix_cache`) and
    `SamplingOptions` (`max_tokens`, `temperature`, ...). `max_tokens` is clipped to what the
    prompt leaves of `max_model_len`.

    Args:
        model: a model folder or name, or `cachecraft_rag.default_model()`.
        config: settings of reuse.
        tokenizer: folder or name of another tokenizer than the model's own.
        in_process: run vLLM in this process, for tests and debuggers: slower, one engine a process.
        tool_parser: name of vLLM's parser for the model's own way of calling tools, e.g. "hermes" for
            Qwen 2.5. None reads only the calls that the engine itself asks a model for in words,
            where its chat template does not show tools. Forced calls need no parser. See docs/tools.md.
        vllm_engine_args: fields of `vllm.AsyncEngineArgs`, e.g. `max_model_len`. Where they are not
            given: structured outputs by xgrammar, without white space; and on CPU `enforce_eager=True`,
            `block_size=32`, `kv_cache_memory_bytes` of 2 GiB.

    Raises:
        ConfigurationError: an argument breaks its rule. The names of `vllm_engine_args` are checked
            at start, for that needs vLLM.

    Example:
        with CacheCraftEngine(default_model()) as engine:
            out = engine.chat([{"role": "user", "content": f"{passage}\\n\\nWho?"}],
                              chunks=[Chunk(passage, doc_id="a")])
            print(out.text, out.report.why)
    """

    def chat(
        self, messages: Sequence[Message], *, chunks: Sequence[Chunk] = (), **options: Any
    ) -> Completion:
        """Answer chat messages. `chunks` are found in them by their text.

        Raises:
            InvalidRequestError: an argument breaks its rule, or the prompt is too long.
            EngineError: the engine does not start, is closed, or fails the request.
        """
        return self._answer(_chat_call(messages, chunks, options))

    async def achat(
        self, messages: Sequence[Message], *, chunks: Sequence[Chunk] = (), **options: Any
    ) -> Completion:
        """`chat`, without blocking the caller's loop; cancelling it aborts the request."""
        return await self._aanswer(_chat_call(messages, chunks, options))

    def stream_chat(
        self, messages: Sequence[Message], *, chunks: Sequence[Chunk] = (), **options: Any
    ) -> Iterator[CompletionDelta]:
        """`chat` in pieces; closing the iterator aborts the request."""
        return self._stream(_chat_call(messages, chunks, options))

    def astream_chat(
        self, messages: Sequence[Message], *, chunks: Sequence[Chunk] = (), **options: Any
    ) -> AsyncIterator[CompletionDelta]:
        """`stream_chat`, without blocking the caller's loop."""
        return self._astream(_chat_call(messages, chunks, options))

    def complete(self, prompt: str, *, chunks: Sequence[Chunk] = (), **options: Any) -> Completion:
        """Continue a finished prompt; no chat template is applied. Raises as `chat`."""
        return self._answer(_complete_call(prompt, chunks, options))

    async def acomplete(self, prompt: str, *, chunks: Sequence[Chunk] = (), **options: Any) -> Completion:
        """`complete`, without blocking the caller's loop; cancelling it aborts the request."""
        return await self._aanswer(_complete_call(prompt, chunks, options))

    def stream_complete(
        self, prompt: str, *, chunks: Sequence[Chunk] = (), **options: Any
    ) -> Iterator[CompletionDelta]:
        """`complete` in pieces; closing the iterator aborts the request."""
        return self._stream(_complete_call(prompt, chunks, options))

    def astream_complete(
        self, prompt: str, *, chunks: Sequence[Chunk] = (), **options: Any
    ) -> AsyncIterator[CompletionDelta]:
        """`stream_complete`, without blocking the caller's loop."""
        return self._astream(_complete_call(prompt, chunks, options))

    def prefetch(self, chunks: Sequence[Chunk], *, tenant: str | None = None) -> None:
        """Say which chunks are coming: later prompts are searched for their text, and what disk or Redis
        hold of them is read ahead. Computes nothing and waits for nothing."""
        tenant = self._tenant(tenant)
        coming = by_owner(tenant, check_chunks(chunks))
        for owner, group in coming.items():
            self._known.add(tenant, group)
            if self._running is not None and self._running.is_attached:
                keys = self._running.chunk_keys(tenant, group)
                self._live.loop.run(self._running.send("prefetch", tenant=owner, keys=keys))

    def warm(
        self,
        chunks: Sequence[Chunk],
        *,
        system: str | None = None,
        tenant: str | None = None,
        neighbours: bool | int = False,
        encoder: Encoder | None = None,
        show_progress: bool = False,
    ) -> int:
        """Compute and store chunks ahead of the first question, each behind the system prompt.

        Shared chunks (`Chunk.is_shared`, or all of them with `tenant=SHARED_TENANT`) are stored once, for
        every tenant to read, behind nothing but other shared chunks and the system prompt: so give one
        that is no secret.

        Args:
            neighbours: also put each chunk behind so many of its nearest neighbours among `chunks`
                (True: the default number): KV that saw such context needs less repair later, for
                the price of computing the neighbours too.
            encoder: embeds texts to find neighbours; None takes the embedded default model (English).

        Returns:
            The number of distinct texts that are in the store afterwards.

        Raises:
            InvalidRequestError: an argument breaks its rule.
            MissingDependencyError: `neighbours` needs faiss and an embedding model.
            PromptTooLongError: a chunk does not fit the model's window.
            EngineError: as `chat`.
        """
        from tqdm import tqdm

        check_tenant(tenant)
        chosen, num_neighbours = check_chunks(chunks), check_count(neighbours)
        running = self._started()
        calls = [
            call
            for owner, group in by_owner(tenant, chosen).items()
            for call in warm_calls(
                group,
                system=system,
                tenant=owner,
                has_chat_template=running.has_chat_template,
                num_neighbours=num_neighbours,
                encoder=encoder,
            )
        ]
        prepared = [first_that_fits(running.prepare, each) for each in calls]
        with tqdm(total=len(prepared), desc="Warming chunks", disable=not show_progress) as progress:
            return self._live.loop.run(run_calls(prepared, running.answer, progress.update))

    def stats(self) -> dict[str, Any]:
        """The store's figures, of all tenants: they are for the operator; under "engine" what this engine
        counted, under "feedback" what its samples showed and led to, under "calibration" what its budget
        was calibrated to, None if it was not, under "idle_warming" what was warmed in idle time and how often
        that was used, if it is on, and under "audit" what became of the audit log."""
        figures: dict[str, Any] = {**(self._control("stats") or {})}
        counters = dict(self._running.counters) if self._running else {}
        figures["engine"] = {**counters, "num_known_chunks": len(self._known)}
        if (audit := self._audit_log.stats()) is not None:
            figures["audit"] = audit
        if self._running is not None:
            figures["feedback"] = self._running.feedback.stats()
            if (warmer := self._running.warmer) is not None:
                figures["idle_warming"] = warmer.stats()
            found = self._running.calibration
            figures["calibration"] = None if found is None else found.to_dict()
        return figures

    def calibrate(
        self,
        questions: Sequence[CalibrationQuestion],
        target_agreement: float = 0.9,
        *,
        budgets: Sequence[float] = BUDGETS,
        confidence: float = 0.9,
        system: str | None = None,
        neighbours: bool | int = False,
        max_tokens: int = 32,
        show_progress: bool = True,
    ) -> Calibration:
        """Find the smallest share of reused tokens to recompute with which answers stay those of full
        compute, and use it from now on: here and in later engines of this model, for requests of
        `reuse="auto"` where the configuration has no `recompute_ratio` and preset "balanced".

        Every answer is remembered at once in the cache folder, so a run that was stopped goes on where
        it was. Chunks are cached in a tenant of their own, which is purged at the end.

        Args:
            target_agreement: share of questions whose greedy answer is to be the same text, in (0, 1].
            budgets: shares to choose from; 1.0 is always one of them.
            confidence: of the intervals in the result, which say how far the questions carry.
            system: system prompt of the questions; chunks are cached behind it, as by `warm`.
            neighbours: as in `warm`; calibrate with what you use.
            max_tokens: answers are compared up to this length. Shorter answers agree more.

        Raises:
            InvalidRequestError: no questions, a question without chunks, or a number out of its range.
            EngineError: as `chat`.
        """
        from tqdm import tqdm

        check_target(target_agreement, confidence)
        chosen, shares = check_questions(questions), check_budgets(budgets)
        config, running = self._config, self._started()
        setup = Setup(config.strategy, config.granularity, system, neighbours, max_tokens)
        total = len(chosen) * math.ceil(math.log2(len(shares)) + 1)
        with tqdm(total=total, desc="Calibrating", disable=not show_progress) as progress:
            answers = AnswerFile(running.namespace)
            run = CalibrationRun(self, chosen, setup, answers, progress.update)
            found = run.run(shares, target_agreement, confidence)
        save_calibration(running.namespace, found)
        running.calibration = found
        return found

    def drain_feedback(self) -> None:
        """Examine all samples that wait for idle time now: at the end of a batch, or before `stats()`."""
        if self._running is not None:
            self._live.loop.run(self._running.feedback.drain())

    def self_test(self) -> SelfTestResult:
        """Measure reuse against full compute on this model; switches reuse off if it fails."""
        running = self._started()
        if running.off is not None and running.off.reason is not Reason.SELF_TEST_FAILED:
            return SelfTestResult(True, detail=f"skipped: {running.off.detail}")
        running.off = None
        result = run_self_test(self, running.dtype, self._config.min_chunk_tokens)
        save_result(running.self_test_key, result)
        _apply(result, running)
        return result

    def _test_once(self, running: RunningEngine) -> None:
        if not self._config.self_test or self._config.host_store_bytes == 0 or running.off is not None:
            return
        remembered = load_result(running.self_test_key)
        if remembered is not None:
            _apply(remembered, running)
            return
        try:
            self.self_test()
        except CacheCraftError as error:
            _apply(SelfTestResult(False, detail=f"it did not finish: {error}"), running)

    def _answer(self, call: Call) -> Completion:
        running = self._started()
        return self._live.loop.run(running.answer(running.prepare(call)))

    async def _aanswer(self, call: Call) -> Completion:
        running = await self._astarted()
        # In a thread: rendering and tokenising a long prompt takes milliseconds of the caller's loop.
        prepared = await asyncio.to_thread(running.prepare, call)
        return await self._live.loop.arun(running.answer(prepared))

    def _stream(self, call: Call) -> Iterator[CompletionDelta]:
        running = self._started()
        prepared = running.prepare(call)
        yield from self._live.loop.stream(lambda: running.stream(prepared))

    async def _astream(self, call: Call) -> AsyncIterator[CompletionDelta]:
        running = await self._astarted()
        prepared = await asyncio.to_thread(running.prepare, call)
        async for delta in self._live.loop.astream(lambda: running.stream(prepared)):
            yield delta


def _chat_call(messages: Sequence[Message], chunks: Sequence[Chunk], options: Mapping[str, Any]) -> Call:
    return Call(check_messages(messages), check_chunks(chunks), CallOptions.from_kwargs(options))


def _complete_call(prompt: str, chunks: Sequence[Chunk], options: Mapping[str, Any]) -> Call:
    checked = check_no_tools(CallOptions.from_kwargs(options))
    return Call(check_prompt(prompt), check_chunks(chunks), checked)


def _apply(result: SelfTestResult, running: RunningEngine) -> None:
    if not result.passed:
        logger.error("self-test failed, KV reuse is off: %s", result.detail)
        running.off = FullCompute(Reason.SELF_TEST_FAILED, result.detail)
