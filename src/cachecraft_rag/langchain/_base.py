"""Settings and engine of the LangChain models: everything but their calls."""

from __future__ import annotations

import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from contextlib import aclosing, closing
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.base import LangSmithParams
from langchain_core.outputs import ChatGenerationChunk, GenerationChunk
from pydantic import BaseModel, ConfigDict, Field, InstanceOf, PrivateAttr, SkipValidation

from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.engine import CallOptions, ChatEngine, Completion, CompletionDelta, shared_engine
from cachecraft_rag.errors import ConfigurationError
from cachecraft_rag.events import ReuseReport
from cachecraft_rag.langchain._capture import start_capture
from cachecraft_rag.langchain._convert import merge_stop

PROVIDER = "cachecraft"
"""Our name in LangChain's tracing parameters."""
_REMOTE_SETTINGS = ("api_key", "max_retries", "timeout")

Piece = TypeVar("Piece", ChatGenerationChunk, GenerationChunk)
"""A piece of a streamed answer, as LangChain has it."""


class EngineBacked(BaseModel):
    """What `ChatCacheCraft` and `CacheCraftCompletion` share; the arguments are described there.

    To be named before LangChain's class among the bases, so that its constructor runs first.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

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

    _shared_engine: ChatEngine | None = PrivateAttr(default=None)
    _last_report: ReuseReport | None = PrivateAttr(default=None)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**_checked(settings, type(self)))
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
        if self.engine is not None:
            raise ConfigurationError(
                f"a {type(self).__name__} made with engine= cannot be pickled, because the engine lives in "
                "this process: make it with model="
            )
        # The engine stays behind; `chat_engine` finds or makes it again from the settings.
        state = super().__getstate__()
        private = state["__pydantic_private__"] or {}
        return {**state, "__pydantic_private__": {**private, "_shared_engine": None}}

    @property
    def _llm_type(self) -> str:
        return PROVIDER

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
        # Of LangChain's class, which stands behind this one among the bases.
        params: LangSmithParams = super()._get_ls_params(  # type: ignore[misc]
            stop=merge_stop(self.stop, stop), **kwargs
        )
        params["ls_provider"] = PROVIDER
        return params

    def _options(self, stop: list[str] | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The engine's options: this call's over the constructor's; None means not given."""
        own = ("temperature", "max_tokens", "reuse", "recompute_ratio", "tenant")
        options = {**{name: getattr(self, name) for name in own}, **kwargs}
        options["stop"] = merge_stop(self.stop, stop) or None
        # LangChain's own switch between whole and streamed answers.
        options.pop("stream", None)
        return given(options)

    def _pieces(
        self,
        deltas: Iterator[CompletionDelta],
        to_piece: Callable[[CompletionDelta, str], Piece],
        run_manager: CallbackManagerForLLMRun | None,
    ) -> Iterator[Piece]:
        """The pieces of an answer, each after callbacks were told of it."""
        # Closed with this iterator, which aborts the request.
        with closing(cast(Generator[CompletionDelta, None, None], deltas)):
            for delta in deltas:
                self._note(delta)
                piece = to_piece(delta, self.model_name)
                if run_manager is not None:
                    run_manager.on_llm_new_token(delta.text, chunk=piece)
                yield piece

    async def _apieces(
        self,
        deltas: AsyncIterator[CompletionDelta],
        to_piece: Callable[[CompletionDelta, str], Piece],
        run_manager: AsyncCallbackManagerForLLMRun | None,
    ) -> AsyncIterator[Piece]:
        """`_pieces`, awaited."""
        async with aclosing(cast(AsyncGenerator[CompletionDelta, None], deltas)):
            async for delta in deltas:
                self._note(delta)
                piece = to_piece(delta, self.model_name)
                if run_manager is not None:
                    await run_manager.on_llm_new_token(delta.text, chunk=piece)
                yield piece

    def _note(self, answer: Completion | CompletionDelta) -> None:
        """Remember the report of a finished answer."""
        completion = answer.completion if isinstance(answer, CompletionDelta) else answer
        if completion is not None:
            self._last_report = completion.report


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options without those that are None, which means not given."""
    return {name: value for name, value in options.items() if value is not None}


def _checked(settings: dict[str, Any], model_class: type[EngineBacked]) -> dict[str, Any]:
    """The settings without those of remote models; unknown ones are refused.

    LangChain's default is to ignore unknown arguments, which hides a misspelt setting.
    """
    known = set(model_class.model_fields)
    unknown = sorted(set(settings) - known - set(_REMOTE_SETTINGS))
    if unknown:
        raise ConfigurationError(
            f"{model_class.__name__} has no setting {', '.join(map(repr, unknown))}: known are "
            f"{', '.join(sorted(known))}; vLLM's go into engine_args"
        )
    dropped = [name for name in _REMOTE_SETTINGS if settings.get(name) is not None]
    if dropped:
        warnings.warn(
            f"{', '.join(dropped)} has no effect: the model is embedded in this process", stacklevel=3
        )
    return {name: value for name, value in settings.items() if name in known}
