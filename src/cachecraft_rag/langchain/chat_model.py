"""`ChatCacheCraft`: the embedded engine as a LangChain chat model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput, ModelProfile
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from pydantic import BaseModel

from cachecraft_rag.engine import Completion
from cachecraft_rag.errors import InvalidRequestError
from cachecraft_rag.langchain._base import EngineBacked, given
from cachecraft_rag.langchain._convert import chat_result, engine_messages, stream_chunk
from cachecraft_rag.langchain._structured import (
    Schema,
    check_method,
    engine_form,
    json_schema,
    parsed,
    parser_of,
    response_format,
)
from cachecraft_rag.langchain._tools import ToolChoice, check_tools, engine_tool_choice, engine_tools


class ChatCacheCraft(EngineBacked, BaseChatModel):
    """A chat model that runs in this process and reuses the KV of retrieved chunks.

    Each answer carries its report in `response_metadata["cachecraft"]` (`ReuseReport.from_dict`
    reads it) and its token counts in `usage_metadata`. Every option of the engine's calls can be
    given per call or with `bind`: `llm.invoke(messages, reuse="off", top_p=0.9)`. Stop texts of the
    constructor always apply; those of a call are added to them.

    Where a tool is forced (`bind_tools(..., tool_choice="any")` or its name) and in
    `with_structured_output`, decoding is bound to the schema, so any model keeps it; that it calls a
    tool of its own accord takes a model that was trained to. OpenAI's `response_format` can be given
    per call, too.

    Chunks are found by their text, so a prompt must hold it as it is: documents put straight into a
    prompt template come out as Python's `repr` of them, in which nothing is found. Join their
    `page_content`.

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

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: ToolChoice = None,
        parallel_tool_calls: bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with tools that it may call; the calls come in `AIMessage.tool_calls`.

        Args:
            tools: functions, pydantic or TypedDict classes, LangChain tools, or OpenAI's form.
            tool_choice: "any", "required" or True: at least one call; the name of a tool or OpenAI's
                mapping: that tool; "auto" or None: the model decides; "none": no call.
            parallel_tool_calls: False allows one call in an answer; None leaves it to the engine.
            strict: True closes the schemas of the tools against further arguments.
            kwargs: options of every call.

        Raises:
            InvalidRequestError: a tool has no form that can be converted, or `tool_choice` names none of
                them; by the calls: two have one name.
        """
        converted = engine_tools(tools, strict)
        choice = engine_tool_choice(tool_choice)
        check_tools(converted, choice)
        options = {"tools": converted, "tool_choice": choice, "parallel_tool_calls": parallel_tool_calls}
        return self.bind(**given(options), **kwargs)

    def with_structured_output(
        self,
        schema: Schema,
        *,
        method: str = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """The model with its answers parsed into `schema`.

        Args:
            schema: a pydantic class (answers are its instances), a TypedDict class, or a JSON schema
                with a title (answers are mappings).
            method: "json_schema": decoding is bound to the schema, which the prompt does not show;
                "function_calling": the schema is a tool that must be called, and shown as one;
                "json_mode": decoding is bound to JSON only, and the prompt must ask for the keys.
            include_raw: True returns `{"raw": message, "parsed": ..., "parsing_error": ...}`.
            strict: True closes the schema against further properties.
            kwargs: options of every call.

        Raises:
            InvalidRequestError: an unknown method, or a schema that cannot be converted.
            OutputParserException: by the calls: an answer does not fit, or was cut by `max_tokens`.
        """
        check_method(method)
        described = json_schema(schema, strict)
        traced = {"kwargs": {"method": method, "strict": strict}, "schema": schema}
        options = {"ls_structured_output_format": traced, **kwargs}
        if method == "function_calling":
            # One call is read, and a list of calls is what weak models do not end.
            model = self.bind_tools(
                [schema], tool_choice="any", parallel_tool_calls=False, strict=strict, **options
            )
        else:
            model = self.bind(response_format=response_format(described, method), **options)
        return parsed(model, parser_of(schema, described["title"], method), include_raw)

    def _resolve_model_profile(self) -> ModelProfile:
        # Without `structured_output`, for which an agent binds decoding to its schema from the first answer
        # on, so that no tool can be called. As it is, agents offer the schema as one more tool.
        profile = ModelProfile(text_inputs=True, text_outputs=True, tool_calling=True)
        window = self.engine_args.get("max_model_len")
        if self.engine is not None and self.engine.is_started:
            window = self.engine.max_model_len
        # Else it is the model's, which only a started engine knows.
        if window is not None:
            profile["max_input_tokens"] = window
        return profile

    def _options(self, stop: list[str] | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        options = super()._options(stop, kwargs)
        choice, form = options.pop("tool_choice", None), options.pop("response_format", None)
        if form is not None and "structured" in options:
            raise InvalidRequestError("response_format and structured are both given: leave one of them out")
        translated = {
            "tool_choice": engine_tool_choice(choice),
            "structured": None if form is None else engine_form(form),
        }
        return {**options, **given(translated)}

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
        return self._pieces(deltas, stream_chunk, run_manager)

    def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        options = self._options(stop, kwargs)
        deltas = self.chat_engine.astream_chat(engine_messages(messages), **options)
        return self._apieces(deltas, stream_chunk, run_manager)

    def _result(self, completion: Completion) -> ChatResult:
        self._note(completion)
        return chat_result(completion, self.model_name)
