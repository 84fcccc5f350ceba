"""Settings and engine of `CacheCraftLLM`: everything but its endpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from llama_index.core.base.llms.types import LLMMetadata
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.indices.prompt_helper import ChatPromptHelper, PromptHelper
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.schema import BaseNode, NodeWithScore
from llama_index.core.settings import Settings

from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.engine import CallOptions, ChatEngine
from cachecraft_rag.errors import ConfigurationError
from cachecraft_rag.events import ReuseReport
from cachecraft_rag.llama_index._convert import nodes_of, to_chunks
from cachecraft_rag.llama_index._handle import EngineHandle

if TYPE_CHECKING:
    from llama_index.core.indices.base import BaseIndex


# Not a CustomLLM: its chat joins messages as plain text, and its async methods block the loop.
class EngineBackedLLM(FunctionCallingLLM):
    """Base of `CacheCraftLLM`, where the arguments are described."""

    model: str = Field(default="", description="Model folder or name; empty with an engine of the caller's.")
    config: CacheCraftConfig = Field(default_factory=CacheCraftConfig, description="Settings of reuse.")
    engine_args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the engine.")
    temperature: float = Field(default=0.0, description="0 is greedy.")
    max_tokens: int = Field(default=256, description="Most tokens of an answer.")
    context_window: int | None = Field(default=None, description="Tokens of prompt and answer.")
    is_function_calling_model: bool | None = Field(default=None, description="None asks the engine.")
    reuse: str = Field(default="auto", description="Reuse mode or name of a strategy.")
    recompute_ratio: float | None = Field(default=None, description="Share of reused chunks to recompute.")
    tenant: str | None = Field(default=None, description="No KV crosses it.")
    additional_kwargs: dict[str, Any] = Field(default_factory=dict, description="Options of every call.")

    _handle: EngineHandle = PrivateAttr()
    _last_report: ReuseReport | None = PrivateAttr(default=None)

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        engine: ChatEngine | None = None,
        config: CacheCraftConfig | None = None,
        temperature: float = 0.0,
        max_tokens: int = 256,
        context_window: int | None = None,
        is_function_calling_model: bool | None = None,
        reuse: str = "auto",
        recompute_ratio: float | None = None,
        tenant: str | None = None,
        engine_args: Mapping[str, Any] | None = None,
        additional_kwargs: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        _refuse_unknown(fields, type(self))
        _check_source(model, engine, config, engine_args)
        settings: dict[str, Any] = {
            "model": str(model or ""),
            "config": config or CacheCraftConfig(),
            "temperature": temperature,
            "max_tokens": max_tokens,
            "context_window": context_window,
            "is_function_calling_model": is_function_calling_model,
            "reuse": reuse,
            "recompute_ratio": recompute_ratio,
            "tenant": tenant,
            "engine_args": dict(engine_args or {}),
            "additional_kwargs": dict(additional_kwargs or {}),
        }
        super().__init__(**settings, **fields)
        CallOptions.from_kwargs(self._options({}))
        if engine is not None:
            self._handle = EngineHandle(engine)
        else:
            self._handle = EngineHandle.shared(self.model, self.config, self.engine_args)

    @property
    def engine(self) -> ChatEngine:
        """The engine behind this model; made, but not started, by the first use."""
        return self._handle.get()

    @property
    def last_report(self) -> ReuseReport | None:
        """What reuse did for the answer that was finished last. With several calls at once, read
        `additional_kwargs["cachecraft"]` of each response instead."""
        return self._last_report

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(
            context_window=self._window(),
            num_output=self.max_tokens,
            is_chat_model=True,
            is_function_calling_model=self._calls_functions(),
            model_name=self._model_name(),
        )

    def to_payload(self) -> dict[str, Any]:
        """What tracing gets to see. Without `engine_args`, which may hold secrets, and without the
        window, which would start the engine inside an async call."""
        return {
            "class_name": self.class_name(),
            "model_name": self._model_name(),
            "temperature": self.temperature,
            "num_output": self.max_tokens,
            "reuse": self.reuse,
            "is_chat_model": True,
        }

    def warm(
        self,
        nodes: Sequence[BaseNode | NodeWithScore] | BaseIndex[Any],
        *,
        system: str | None = None,
        is_shared: bool = False,
        neighbours: bool = False,
        show_progress: bool = False,
    ) -> int:
        """Compute and store the KV of nodes ahead of the first question.

        Args:
            nodes: nodes, documents, or an index, of which those in its document store are taken. Their
                texts are as response synthesizers show them to the model, metadata included.
            system: the system prompt that will stand before them.
            is_shared: they are public: stored once, for retrievers with `is_shared=True` of any tenant.
            neighbours: compute each behind its nearest neighbours; see `CacheCraftEngine.warm`.

        Returns:
            The number of distinct texts that are in the store afterwards.

        Raises:
            InvalidRequestError: `nodes` is none of these, or the index keeps no nodes.
            PromptTooLongError: a node does not fit the model's window.
            EngineError: the engine does not start, is closed, or fails the request.
        """
        options: dict[str, Any] = {"neighbours": neighbours, "show_progress": show_progress}
        chunks = to_chunks(nodes_of(nodes), is_shared=is_shared)
        return self.engine.warm(chunks, system=system, tenant=self.tenant, **options)

    def configure_settings(self) -> Self:
        """Make this the model of LlamaIndex's `Settings`, which are global: they hold for all code of this
        process that names no model of its own. Also sets the tokenizer, and prompt helpers that count with
        it, so that what LlamaIndex packs into a prompt fits the window. Starts the engine.

        A node parser that `Settings` has already keeps the tokenizer it was made with.
        """
        Settings.llm = self
        Settings.tokenizer = self.engine.encode
        Settings.prompt_helper = PromptHelper.from_llm_metadata(self.metadata)
        Settings.chat_prompt_helper = ChatPromptHelper.from_llm_metadata(self.metadata)
        return self

    def close(self) -> None:
        """Let go of the engine. One made here ends when its last user let go of it, for models with
        equal settings share one (`llm.engine.close()` ends it at once); one passed as `engine=` stays
        open. Calls after this raise EngineClosedError, in copies too."""
        self._handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        if not self.model:
            raise ConfigurationError(
                "a CacheCraftLLM made with engine= cannot be pickled, because the engine lives in "
                "this process: make it with model="
            )
        return super().__getstate__()

    def _options(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Options of one call: its own, over `additional_kwargs`, over the fields."""
        own = {
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "reuse": self.reuse,
            "recompute_ratio": self.recompute_ratio,
            "tenant": self.tenant,
        }
        return {**own, **self.additional_kwargs, **call}

    def _window(self) -> int:
        given = self.context_window or self.engine_args.get("max_model_len")
        return given if isinstance(given, int) and given > 0 else self.engine.max_model_len

    def _calls_functions(self) -> bool:
        given = self.is_function_calling_model
        return self.engine.has_tool_parser if given is None else given

    def _model_name(self) -> str:
        return self.model or self.engine.model_name


def _refuse_unknown(fields: Mapping[str, Any], llm_class: type[EngineBackedLLM]) -> None:
    unknown = sorted(set(fields) - set(llm_class.model_fields))
    if unknown:
        raise ConfigurationError(
            f"unknown argument {', '.join(map(repr, unknown))} of CacheCraftLLM: known are engine, "
            f"{', '.join(sorted(llm_class.model_fields))}; options of vLLM go into engine_args, "
            "options of every call into additional_kwargs"
        )


def _check_source(
    model: str | Path | None,
    engine: ChatEngine | None,
    config: CacheCraftConfig | None,
    engine_args: Mapping[str, Any] | None,
) -> None:
    if bool(model) == (engine is not None):
        raise ConfigurationError(
            "CacheCraftLLM needs either model= or engine=: pass a model folder or name, such as "
            "cachecraft_rag.default_model(), or an engine of your own"
        )
    if engine is not None and (config is not None or engine_args):
        raise ConfigurationError(
            "config and engine_args are settings of a new engine: with engine=, give them to that engine"
        )
