"""`ChatCacheCraft`: the embedded engine as a LangChain chat model."""

from __future__ import annotations

import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import aclosing, closing
from pathlib import Path
from typing import Annotated, Any, Self, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from pydantic import Field, InstanceOf, PrivateAttr, SkipValidation

from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.engine import CallOptions, ChatEngine, Completion, CompletionDelta, shared_engine
from cachecraft_rag.errors import ConfigurationError
from cachecraft_rag.events import ReuseReport
from cachecraft_rag.langchain._capture import start_capture
from cachecraft_rag.langchain._convert import chat_result, engine_messages, merge_stop, stream_chunk

_REMOTE_SETTINGS = ("api_key", "max_retries", "timeout")


class ChatCacheCraft(BaseChatModel):
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

    model: str | Path | None = None
    # Not validated: a protocol check would read `max_model_len`, which starts the engine.
    engine: Annotated[ChatEngine | None, SkipValidation] = Field(default=None, exclude=True, repr=False)
    config: InstanceOf[CacheCraftConfig] | None = None
    engine_args: dict[str, Any] = Field(default_factory=dict)
    temperature: float | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    reuse: str | None = None
    recompute_ratio: float | None = None
    tenant: str | None = None
    # Not False: LangChain takes an explicit False, as `configurable_fields` passes on, for a ban.
    streaming: bool | None = None

    _shared_engine: ChatEngine | None = PrivateAttr(default=None)
    _last_report: ReuseReport | None = PrivateAttr(default=None)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**_checked(settings, set(type(self).model_fields)))
        if (self.model is None) == (self.engine is None):
            raise ConfigurationError("give either model= or engine=: one of them answers")
        if self.engine is not None and (self.config is not None or self.engine_args):
            raise ConfigurationError(
                "config and engine_args belong to the engine: set them where engine= is made"
            )
        # Both check their arguments here, where they are written, instead of at the first call.
        CallOptions.from_kwargs(self._options(None, {}))
        _ = self.chat_engine
        start_capture(self)

    @property
    def chat_engine(self) -> ChatEngine:
        """The engine that answers. Looking at it does not start it."""
        if self.engine is not None:
            return self.engine
        if self._shared_engine is None:
            assert self.model is not None  # checked by __init__
            self._shared_engine = shared_engine(self.model, self.config, **self.engine_args)
        return self._shared_engine

    @property
    def model_name(self) -> str:
        return self.chat_engine.model_name

    @property
    def last_report(self) -> ReuseReport | None:
        """Report of the answer that was finished last by any thread; None before the first."""
        return self._last_report

    def close(self) -> None:
        """End the engine, also for others who share it."""
        self.chat_engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        # A copy uses the same engine: a second one would find no memory left.
        memo = {} if memo is None else memo
        memo[id(self.chat_engine)] = self.chat_engine
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[Any, Any]:
        # The engine stays behind; `chat_engine` finds or makes it again from the settings.
        state = super().__getstate__()
        private = state["__pydantic_private__"] or {}
        return {**state, "__pydantic_private__": {**private, "_shared_engine": None}}

    @property
    def _llm_type(self) -> str:
        return "cachecraft"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Everything that changes answers: LangChain's answer caches take this as their key."""
        return {
            "model_name": self.model_name,
            "config": repr(getattr(self.chat_engine, "config", None)),
            "engine_args": self.engine_args,
            **self._options(None, {}),
        }

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=merge_stop(self.stop, stop), **kwargs)
        params["ls_provider"] = "cachecraft"
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
        self._last_report = completion.report
        return chat_result(completion, self.model_name)

    def _chunk(self, delta: CompletionDelta) -> ChatGenerationChunk:
        if delta.completion is not None:
            self._last_report = delta.completion.report
        return stream_chunk(delta, self.model_name)

    def _options(self, stop: list[str] | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The engine's options: this call's over the constructor's; None means not given."""
        own = ("temperature", "max_tokens", "reuse", "recompute_ratio", "tenant")
        options = {**{name: getattr(self, name) for name in own}, **kwargs}
        options["stop"] = merge_stop(self.stop, stop) or None
        # LangChain's own switch between `_generate` and `_stream`.
        options.pop("stream", None)
        return {name: value for name, value in options.items() if value is not None}


def _checked(settings: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """The settings without those of remote models; unknown ones are refused.

    LangChain's default is to ignore unknown arguments, which hides a misspelt setting.
    """
    unknown = sorted(set(settings) - known - set(_REMOTE_SETTINGS))
    if unknown:
        raise ConfigurationError(
            f"ChatCacheCraft has no setting {', '.join(map(repr, unknown))}: known are "
            f"{', '.join(sorted(known))}; vLLM's go into engine_args"
        )
    dropped = [name for name in _REMOTE_SETTINGS if settings.get(name) is not None]
    if dropped:
        warnings.warn(
            f"{', '.join(dropped)} has no effect: the model is embedded in this process", stacklevel=3
        )
    return {name: value for name, value in settings.items() if name in known}
