"""A started engine: from one prepared call to its answer and report."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from cachecraft_rag.chunks import SHARED_TENANT, Chunk, ChunkKey, PromptLayout, chunk_key
from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.engine.answer_reader import Reading, TextGate, ToolParser, bound_sampling, make_reader
from cachecraft_rag.engine.api import Completion, CompletionDelta, SamplingOptions
from cachecraft_rag.engine.audit_log import AuditLog
from cachecraft_rag.engine.backend import Backend, BackendRequest
from cachecraft_rag.engine.calibration import Calibration
from cachecraft_rag.engine.calibration_files import load_calibration
from cachecraft_rag.engine.calls import Answer, Call, Prepared
from cachecraft_rag.engine.feedback import Feedback
from cachecraft_rag.engine.idle import IdleWork
from cachecraft_rag.engine.idle_warming import IdleWarmer
from cachecraft_rag.engine.namespace import tenant_cache_salt, tenant_namespace
from cachecraft_rag.engine.options import CallOptions
from cachecraft_rag.engine.reports import absent_chunks, complete_report, full_report
from cachecraft_rag.engine.router import FullCompute, make_spec, route, route_engine, without_reuse
from cachecraft_rag.errors import EngineError, GenerationError, PromptTooLongError
from cachecraft_rag.events import Reason, RequestDecision, ReuseReport
from cachecraft_rag.segments.known import KnownChunks
from cachecraft_rag.segments.layout import build_layout
from cachecraft_rag.segments.prompt import PromptText
from cachecraft_rag.segments.render import render_chat
from cachecraft_rag.segments.tokenize import SegmentTokenizer
from cachecraft_rag.vllm_connector.messages import PARAMS_KEY, ControlMessage, RequestSpec

logger = logging.getLogger(__name__)

_REPORT_DEADLINE_S = 0.25
_CONTROL_DEADLINE_S = 30.0
_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.1


class RunningEngine:
    """A live vLLM with its tokenizer, its namespace and the chunks known so far.

    `prepare` may be called from any thread; the coroutines belong to the engine's loop.

    Attributes:
        namespace: of all its tenants together.
        self_test_key: names what a self-test's result holds for.
        off: why nothing is reused by any request, None if reuse works.
        is_attached: whether our connector is inside vLLM.
        feedback: samples of its own answers, and what they led to.
        warmer: computes popular chunks in idle time; None where that is switched off.
        audit_log: told of every answer; the engine's own, whose life is longer.
    """

    def __init__(
        self,
        backend: Backend,
        config: CacheCraftConfig,
        known: KnownChunks,
        namespace: str,
        *,
        self_test_key: str,
        is_attached: bool,
        off: FullCompute | None,
        tool_parser: ToolParser | None = None,
    ) -> None:
        self.off = off or route_engine(config)
        self.is_attached = is_attached
        self.namespace = namespace
        self.self_test_key = self_test_key
        self.counters: Counter[str] = Counter()
        self._epochs: Counter[str] = Counter()
        self._backend = backend
        self._config = config
        self._known = known
        self._tool_parser = tool_parser
        self._tokenizer = backend.tokenizer
        self.segment_tokenizer = SegmentTokenizer(self._tokenizer)
        self.audit_log = AuditLog(None)
        self._calibration = load_calibration(namespace)
        self._idle = IdleWork()
        self.feedback = Feedback(config, self._answer_once, self.control, self.forget_prefixes, self._idle)
        self.warmer: IdleWarmer | None = None
        if config.idle_warming and is_attached:
            self.warmer = IdleWarmer(self._idle, self.prepare, self._warm_once, self.control)

    @property
    def max_model_len(self) -> int:
        return int(self._backend.vllm_config.model_config.max_model_len)

    @property
    def dtype(self) -> str:
        return str(self._backend.vllm_config.model_config.dtype).removeprefix("torch.")

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @property
    def has_tool_parser(self) -> bool:
        return self._tool_parser is not None

    @property
    def calibration(self) -> Calibration | None:
        """What this model was calibrated to, where the configuration leaves the budget to it."""
        found, config = self._calibration, self._config
        if found is None or config.recompute_ratio is not None or config.preset != "balanced":
            return None
        return found if found.setup.get("strategy") == config.strategy else None

    @calibration.setter
    def calibration(self, found: Calibration) -> None:
        self._calibration = found

    def tenant_namespace(self, tenant: str) -> str:
        return tenant_namespace(self.namespace, tenant)

    def chunk_keys(self, tenant: str, chunks: Sequence[Chunk]) -> list[ChunkKey]:
        """Keys of the chunks as they would stand in a prompt; blank ones have none."""
        return [self._key_of(tenant, chunk) for chunk in chunks if chunk.text.strip()]

    def _key_of(self, tenant: str, chunk: Chunk, *, remember: bool = True) -> ChunkKey:
        token_ids = self.segment_tokenizer.encode_chunk(chunk.text.strip(), remember=remember)
        return chunk_key(self.tenant_namespace(SHARED_TENANT if chunk.is_shared else tenant), token_ids)

    def forget_prefixes(self, tenant: str) -> None:
        """Make what vLLM's own prefix cache holds of `tenant` unreachable: it cannot be searched for
        one document, so the price is one full prefill of each later prompt's head. Of the shared
        tenant's text every tenant's part may hold some."""
        self._epochs[tenant] += 1

    def _cache_part(self, tenant: str) -> str:
        """Name of the part of vLLM's prefix cache that the tenant's requests share now."""
        return f"{self._epochs[SHARED_TENANT]}.{self._epochs[tenant]}"

    def prepare(self, call: Call) -> Prepared:
        """Render, find the chunks, tokenise and route.

        Raises:
            InvalidRequestError: the messages cannot be rendered.
            PromptTooLongError: the prompt leaves no room for one generated token.
        """
        options = call.options
        tenant = options.tenant or self._config.default_tenant
        prompt = self._text_of(call)
        if options.store:
            self._known.add(tenant, call.chunks)
        matches = self._known.find(tenant, prompt, call.chunks)
        layout = build_layout(
            prompt.text,
            matches,
            self.segment_tokenizer,
            self.tenant_namespace(tenant),
            shared_namespace=self.tenant_namespace(SHARED_TENANT),
            remember=options.store,
        )
        reader = make_reader(options, self._tool_parser)
        sampling = self._fit(layout.num_tokens, bound_sampling(options))
        full = self.off or route(call, layout, sampling.max_tokens, self._config)
        spec = make_spec(_new_id(), tenant, layout, options, self._config, full)
        spec = self.feedback.steer(self._calibrated(spec, options), options)
        request = self._request(spec, layout, sampling, options)
        return Prepared(
            call=call,
            layout=layout,
            spec=spec,
            request=replace(request, keeps_special_tokens=reader.keeps_special_tokens),
            absent=absent_chunks(call.chunks, layout, partial(self._key_of, tenant, remember=options.store)),
            reader=reader,
        )

    async def answer(self, prepared: Prepared) -> Completion:
        """The whole answer.

        Raises:
            GenerationError: vLLM failed the request, with reuse off as well.
            EngineError: the engine is dead.
        """
        with self._traffic(prepared):
            try:
                completion = await self._answer_once(prepared)
            except GenerationError as fault:
                completion = await self._answer_once(self._again(prepared, fault))
            return await self._note(prepared, completion)

    async def stream(self, prepared: Prepared) -> AsyncGenerator[CompletionDelta, None]:
        """The answer in pieces; the last one carries the whole `Completion`.

        A request that fails with reuse on is only sent again as long as no piece was handed out.
        """
        is_begun = is_noted = False
        with self._traffic(prepared):
            try:
                async with aclosing(self._stream(prepared)) as deltas:
                    async for delta in deltas:
                        if delta.completion is not None:
                            is_noted = True
                            await self._note(prepared, delta.completion)
                        is_begun = True
                        yield delta
            finally:
                if is_begun and not is_noted:
                    self.audit_log.interrupted(prepared.spec)

    @contextmanager
    def _traffic(self, prepared: Prepared) -> Iterator[None]:
        """Around every request of a user: idle work gives way to it."""
        with self._idle.traffic():
            if self.warmer is not None:
                self.warmer.count(prepared)
            yield

    async def send(self, action: str, **arguments: Any) -> None:
        """Send a command to the scheduler side whose result nobody waits for."""
        await self._backend.send_control(ControlMessage(_new_id(), action, arguments))

    async def control(self, action: str, **arguments: Any) -> Any:
        """Send a command to the scheduler side and wait for its result.

        Raises:
            EngineError: it failed, or no answer came in time.
        """
        end_s, pause_s = time.monotonic() + _CONTROL_DEADLINE_S, 0.0
        reply = await self._ask(ControlMessage(_new_id(), action, arguments), end_s)
        while "awaits" in reply and time.monotonic() < end_s:
            await asyncio.sleep(pause_s)
            pause_s = min(max(2 * pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            awaited = {"control_id": reply["awaits"]}
            reply = await self._ask(ControlMessage(_new_id(), "await", awaited), end_s)
        if not reply or "awaits" in reply:
            raise EngineError(f"no answer to {action!r} within {_CONTROL_DEADLINE_S:.0f} s")
        if "error" in reply:
            raise EngineError(f"{action!r} failed: {reply['error']}")
        return reply["result"]

    async def _ask(self, message: ControlMessage, end_s: float) -> Mapping[str, Any]:
        """The reply to a command; empty if none comes until `end_s`."""
        await self._backend.send_control(message)
        left_s = max(0.0, end_s - time.monotonic())
        return dict(await self._poll("cachecraft_take_reply", message.control_id, left_s) or {})

    def _calibrated(self, spec: RequestSpec, options: CallOptions) -> RequestSpec:
        if options.reuse != "auto" or spec.recompute_ratio is not None or self.calibration is None:
            return spec
        return replace(spec, recompute_ratio=self.calibration.budget)

    def _text_of(self, call: Call) -> PromptText:
        if isinstance(call.prompt, str):
            return PromptText.plain(call.prompt)
        return render_chat(self._tokenizer, call.prompt, tools=call.options.tools.shown)

    def _request(
        self, spec: RequestSpec, layout: PromptLayout, sampling: SamplingOptions, options: CallOptions
    ) -> BackendRequest:
        # A salt of its own keeps the request apart from vLLM's prefix cache, both ways. vLLM's
        # `skip_reading_prefix_cache` would still leave its blocks there for others.
        is_shared = options.store and options.read_prefix_cache
        part = self._cache_part(spec.tenant) if is_shared else spec.request_id
        return BackendRequest(
            request_id=spec.request_id,
            token_ids=layout.token_ids,
            sampling=sampling,
            cache_salt=tenant_cache_salt(spec.tenant, part),
            params=spec.to_params() if self.is_attached else None,
        )

    def _fit(self, num_prompt_tokens: int, sampling: SamplingOptions) -> SamplingOptions:
        """Clip `max_tokens` to what the window leaves; refuse a prompt that leaves nothing."""
        room = self.max_model_len - num_prompt_tokens
        if room < 1:
            raise PromptTooLongError(
                f"the prompt has {num_prompt_tokens} tokens and needs at least 1 more for the answer, "
                f"but max_model_len is {self.max_model_len}: pass fewer or shorter chunks, or start "
                "the engine with a larger max_model_len"
            )
        if sampling.max_tokens <= room:
            return sampling
        return replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))

    def _again(self, prepared: Prepared, fault: GenerationError) -> Prepared:
        """The request with reuse off; raises `fault` if it was off already."""
        if prepared.spec.full_reason is not None or not self.is_attached:
            raise fault
        self.counters["num_faults"] += 1
        logger.warning("request failed with reuse on, sent again without: %s", fault)
        full = FullCompute(Reason.ENGINE_FAULT, str(fault))
        return prepared.with_spec(without_reuse(prepared.spec, full, _new_id()))

    async def shutdown(self) -> None:
        """End idle work, then vLLM."""
        if self.warmer is not None:
            self.warmer.stop()
        await self._idle.stop()
        await self.feedback.stop()
        await self._backend.shutdown()

    async def _answer_once(self, prepared: Prepared) -> Completion:
        answer = Answer(prepared.call.started_s)
        async with aclosing(self._backend.generate(prepared.request)) as outputs:
            async for output in outputs:
                answer.add(output)
        return await self._complete(prepared, answer)

    async def _warm_once(self, prepared: Prepared) -> Completion:
        completion = await self._answer_once(prepared)
        self.feedback.note_restored(completion)
        return completion

    async def _stream(self, prepared: Prepared) -> AsyncGenerator[CompletionDelta, None]:
        has_begun = False
        try:
            async with aclosing(self._stream_once(prepared)) as deltas:
                async for delta in deltas:
                    has_begun = True
                    yield delta
            return
        except GenerationError as error:
            if has_begun:
                raise
            fault = error
        async with aclosing(self._stream_once(self._again(prepared, fault))) as deltas:
            async for delta in deltas:
                yield delta

    async def _stream_once(self, prepared: Prepared) -> AsyncGenerator[CompletionDelta, None]:
        answer, gate = Answer(prepared.call.started_s), TextGate(prepared.reader.held_from)
        async with aclosing(self._backend.generate(prepared.request)) as outputs:
            async for output in outputs:
                answer.add(output)
                if output.token_ids or output.text:
                    yield CompletionDelta(gate.add(output.text), output.token_ids)
        completion = await self._complete(prepared, answer)
        if rest := gate.rest(completion.text):
            yield CompletionDelta(rest)
        yield CompletionDelta("", (), completion)

    async def _complete(self, prepared: Prepared, answer: Answer) -> Completion:
        if answer.finish_reason == "error":
            raise GenerationError("vLLM ended the request with an error of its own")
        report = await self._report(prepared, answer)
        reading = prepared.reader.read("".join(answer.text))
        return Completion(
            text=reading.text,
            tool_calls=reading.tool_calls,
            token_ids=tuple(answer.token_ids),
            finish_reason=_finish_reason(reading, answer),
            report=complete_report(report, prepared.layout, ttft_s=answer.ttft_s, absent=prepared.absent),
            prompt_token_ids=prepared.layout.token_ids,
            logprobs=tuple(answer.logprobs) if prepared.request.sampling.logprobs is not None else None,
        )

    async def _report(self, prepared: Prepared, answer: Answer) -> ReuseReport:
        spec, layout = prepared.spec, prepared.layout
        if not self.is_attached:
            reason = spec.full_reason or Reason.UNSUPPORTED_MODEL
            return full_report(spec.request_id, layout, reason, spec.full_detail)
        # A good answer must not be lost with its report.
        try:
            data = (answer.params or {}).get(PARAMS_KEY)
            if data is None:
                data = await self._poll("cachecraft_take_report", spec.request_id, _REPORT_DEADLINE_S)
            if data is not None:
                return ReuseReport.from_dict(data)
        except Exception as error:
            logger.warning("the report of request %s was lost: %r", spec.request_id, error)
        return full_report(spec.request_id, layout, Reason.REPORT_LOST)

    async def _note(self, prepared: Prepared, completion: Completion) -> Completion:
        self._count(completion.report)
        self.feedback.offer(prepared, completion)
        if self.warmer is not None:
            self.warmer.note_hits(prepared, completion)
        await self.audit_log.answered(prepared.spec.tenant, completion.report)
        return completion

    def _count(self, report: ReuseReport) -> None:
        self.counters["num_requests"] += 1
        self.counters["num_requests_with_reuse"] += report.decision is RequestDecision.REUSE
        self.counters["num_reports_lost"] += report.reason is Reason.REPORT_LOST
        for name in ("prompt", "reused", "recomputed", "computed"):
            self.counters[f"num_{name}_tokens"] += getattr(report, f"num_{name}_tokens")

    async def _poll(self, method: str, key: str, deadline_s: float) -> Any:
        """Ask rank 0 until it has an answer; each question lets vLLM's engine run a step.

        None if there is none by the deadline.
        """
        end_s, pause_s = time.monotonic() + deadline_s, 0.0
        while (reply := (await self._backend.collective_rpc(method, key))[0]) is None:
            if time.monotonic() >= end_s:
                return None
            await asyncio.sleep(pause_s)
            pause_s = min(max(2 * pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        return reply


def _finish_reason(reading: Reading, answer: Answer) -> str | None:
    return "tool_calls" if reading.tool_calls and answer.finish_reason != "abort" else answer.finish_reason


def _new_id() -> str:
    return uuid.uuid4().hex
