"""`ChatCacheCraft`: the embedded engine as a LangChain chat model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import aclosing, closing
from typing import Any, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult

from cachecraft_rag.engine import Completion, CompletionDelta
from cachecraft_rag.langchain._base import PROVIDER, EngineBacked
from cachecraft_rag.langchain._convert import chat_result, engine_messages, merge_stop, stream_chunk


class ChatCacheCraft(EngineBacked, BaseChatModel):
    """A chat model that runs in this process and reuses the KV of retrieved chunks.

    Each answer carries its report in `response_metadata["cachecraft"]` (`ReuseReport.from_dict`
    reads it) and its token counts in `usage_metadata`. Every option of the engine's calls can be
    given per call or with `bind`: `llm.invoke(messages, reuse="off", top_p=0.9)`. Stop texts of the
    constructor always apply; those of a call are added to them. Tools are not supported.

    Args:
        model: a model folder or name, e.g. `cachecraft_rag.default_model()`. Models with equal
            `model`, `config` and `engine_args` share one engine.
        engine: an engine to use instead.
        config: settings of reuse.
        engine_args: fields of `vllm.AsyncEngineArgs`, e.g. `{"max_model_len": 4096}`.
        temperature, max_tokens: None leaves them to the engine.
        stop: texts that end the answer.
        reuse, recompute_ratio, tenant: as of `CacheCraftEngine.chat`; None leaves them to the engine.
        streaming: True streams inside `invoke` too, so that callbacks see tokens; False never streams.
        api_key, max_retries, timeout: accepted from code that sets them on every chat model, and
            dropped with a warning: an embedded model has no connection.

    Raises:
        ConfigurationError: an unknown argument, or one that breaks its rule.
        InvalidRequestError: a sampling or reuse option breaks its rule.

    Example:
        llm = ChatCacheCraft(model=default_model(), max_tokens=64)
        retriever = CacheCraftRetriever.from_texts(passages, llm=llm)
    """

    # Not False: LangChain takes an explicit False, as `configurable_fields` passes on, for a ban.
    streaming: bool | None = None

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=merge_stop(self.stop, stop), **kwargs)
        params["ls_provider"] = PROVIDER
        return params

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        options = self._options(stop, kwargs)
        return self._result(self.chat_engine.chat(engine_messages(messages), **options))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        options = self._options(stop, kwargs)
        return self._result(await self.chat_engine.achat(engine_messages(messages), **options))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        options = self._options(stop, kwargs)
        deltas = self.chat_engine.stream_chat(engine_messages(messages), **options)
        # Closed with this iterator, which aborts the request.
        with closing(cast(Generator[CompletionDelta, None, None], deltas)):
            for delta in deltas:
                chunk = self._chunk(delta)
                if run_manager is not None:
                    run_manager.on_llm_new_token(delta.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        options = self._options(stop, kwargs)
        deltas = self.chat_engine.astream_chat(engine_messages(messages), **options)
        async with aclosing(cast(AsyncGenerator[CompletionDelta, None], deltas)):
            async for delta in deltas:
                chunk = self._chunk(delta)
                if run_manager is not None:
                    await run_manager.on_llm_new_token(delta.text, chunk=chunk)
                yield chunk

    def _result(self, completion: Completion) -> ChatResult:
        self._note(completion)
        return chat_result(completion, self.model_name)

    def _chunk(self, delta: CompletionDelta) -> ChatGenerationChunk:
        self._note(delta)
        return stream_chunk(delta, self.model_name)
