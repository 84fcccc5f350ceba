"""`CacheCraftLLM`: the embedded engine as a LlamaIndex language model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import ToolSelection
from llama_index_instrumentation.span import active_span_id

from cachecraft_rag.engine import Completion, CompletionDelta, Message
from cachecraft_rag.errors import AnswerFormError, InvalidRequestError
from cachecraft_rag.llama_index._convert import chat_response, completion_response, to_engine_messages
from cachecraft_rag.llama_index._events import tell_reuse
from cachecraft_rag.llama_index._structured import SchemaBoundLLM
from cachecraft_rag.llama_index._tools import to_openai_tools, to_selections, to_tool_choice, with_question

if TYPE_CHECKING:
    from llama_index.core.tools.types import BaseTool

R = TypeVar("R")
Respond = Callable[[str, str | None, Completion | None, str], R]
"""(text so far, new piece or None, the completion when it is there, model name) → response."""
Make = Callable[[str, str | None, Completion | None], R]
"""As `Respond`, for one call of one model."""


class CacheCraftLLM(SchemaBoundLLM):
    """A chat model on the embedded engine, which reuses the KV of chunks it knows.

    Chunks become known by `CacheCraftRetriever`, or by `chunks=` of one call. All eight endpoints
    stream and await truly, and use the model's own chat template; `messages_to_prompt` and
    `completion_to_prompt` are not used. `complete` sends its prompt as one user message, unless
    `formatted=True`. Tools are called where the model has a tool parser, or where a call is forced by
    `tool_required=True` or `tool_choice=`. Copies share the engine.

    Reading `metadata` starts the engine, unless it has nothing to ask: the window is given by
    `context_window` or `engine_args={"max_model_len": ...}`, and whether functions are called by
    `is_function_calling_model` or `engine_args={"tool_parser": ...}`. LlamaIndex's agents read it in their
    event loop, so start the engine before (`llm.metadata` does) or give both.

    Args:
        model: a model folder or name, or `cachecraft_rag.default_model()`.
        engine: an engine in place of `model`; it stays the caller's to close.
        config: settings of reuse, with `model` only.
        temperature: 0 is greedy.
        max_tokens: most tokens of an answer; LlamaIndex keeps that much of the window free.
        context_window: tokens of prompt and answer; None is the engine's.
        is_function_calling_model: whether LlamaIndex may rely on tool calls; None: where the engine has a
            tool parser for the model.
        reuse: "auto", "off", "exact" or the name of a strategy.
        recompute_ratio: share of each reused chunk to recompute; None leaves it to `config`.
        tenant: no KV crosses it.
        engine_args: keyword arguments of `CacheCraftEngine`, with `model` only.
        additional_kwargs: further options of every call, e.g. `{"top_p": 0.9, "stop": ["\\n"]}`; those of
            a call take their place and are not added to them, so `stop=[]` means none.
        fields: fields of LlamaIndex's `LLM`, e.g. `system_prompt` or `callback_manager`.

    Raises:
        ConfigurationError: an unknown keyword, or not exactly one of `model` and `engine`.
        InvalidRequestError: an option breaks its rule; by the endpoints also for unknown ones.
        EngineError: by the endpoints: the engine does not start, is closed, or fails the request.

    Example:
        llm = CacheCraftLLM(default_model())
        answer = llm.complete("Who wrote Faust?")
        print(answer.text, llm.last_report.why)
    """

    @classmethod
    def class_name(cls) -> str:
        return "CacheCraftLLM"

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        completion = self.engine.chat(to_engine_messages(messages), **self._options(kwargs))
        return _whole(completion, self._answering(chat_response))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        completion = await self.engine.achat(to_engine_messages(messages), **self._options(kwargs))
        return _whole(completion, self._answering(chat_response))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        deltas = self.engine.stream_chat(to_engine_messages(messages), **self._options(kwargs))
        return _pieces(deltas, self._answering(chat_response))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        deltas = self.engine.astream_chat(to_engine_messages(messages), **self._options(kwargs))
        return _apieces(deltas, self._answering(chat_response))

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        options, make = self._text_options(kwargs), self._answering(completion_response)
        if formatted:
            return _whole(self.engine.complete(prompt, **options), make)
        return _whole(self.engine.chat(_as_user(prompt), **options), make)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        options, make = self._text_options(kwargs), self._answering(completion_response)
        if formatted:
            return _whole(await self.engine.acomplete(prompt, **options), make)
        return _whole(await self.engine.achat(_as_user(prompt), **options), make)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        options, make = self._text_options(kwargs), self._answering(completion_response)
        if formatted:
            return _pieces(self.engine.stream_complete(prompt, **options), make)
        return _pieces(self.engine.stream_chat(_as_user(prompt), **options), make)

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        options, make = self._text_options(kwargs), self._answering(completion_response)
        if formatted:
            return _apieces(self.engine.astream_complete(prompt, **options), make)
        return _apieces(self.engine.astream_chat(_as_user(prompt), **options), make)

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **_: Any
    ) -> list[ToolSelection]:
        """The tools that an answer asks to be run.

        Raises:
            AnswerFormError: there are none, and `error_on_no_tool_call`.
        """
        selections = to_selections(response.message)
        if error_on_no_tool_call and not selections:
            raise AnswerFormError(
                f"the answer calls no tool, but says {response.message.content!r}: {_what_to_do(response)}"
            )
        return selections

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: str | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        return {
            "messages": with_question(chat_history, user_msg),
            "tools": to_openai_tools(tools),
            "tool_choice": to_tool_choice(tool_choice, tool_required),
            "parallel_tool_calls": allow_parallel_tool_calls,
            **kwargs,
        }

    def _text_options(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """As `_options`; a completion has no place for tool calls."""
        options = self._options(call)
        if options.get("tools"):
            raise InvalidRequestError("complete answers text only: pass tools= to chat")
        return options

    def _answering(self, respond: Respond[R]) -> Make[R]:
        """What makes the responses of one call, and tells of the request once its completion is there."""
        # Taken now: when a stream ends, its reader may be in another span.
        name, span_id = self._model_name(), active_span_id.get()

        def make(text: str, delta: str | None, completion: Completion | None) -> R:
            if completion is not None:
                self._last_report = completion.report
                tell_reuse(completion.report, name, span_id)
            return respond(text, delta, completion, name)

        return make


def _whole(completion: Completion, make: Make[R]) -> R:
    return make(completion.text, None, completion)


def _pieces(deltas: Iterator[CompletionDelta], make: Make[R]) -> Generator[R, None, None]:
    text = ""
    for delta in deltas:
        text += delta.text
        yield make(text, delta.text, delta.completion)


async def _apieces(deltas: AsyncIterator[CompletionDelta], make: Make[R]) -> AsyncGenerator[R, None]:
    text = ""
    async for delta in deltas:
        text += delta.text
        yield make(text, delta.text, delta.completion)


def _as_user(prompt: str) -> list[Message]:
    return [{"role": "user", "content": prompt}]


def _what_to_do(response: ChatResponse) -> str:
    if isinstance(response.raw, dict) and response.raw.get("finish_reason") == "length":
        return "max_tokens cut it, so allow more"
    return "pass tool_required=True or tool_choice= to force a call"
