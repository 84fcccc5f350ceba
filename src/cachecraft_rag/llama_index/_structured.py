"""Predictions of pydantic models: decoding is bound to the model's schema, whether tools are supported or
not."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping
from typing import Any

from llama_index.core.base.llms.types import ChatResponse, TextBlock
from llama_index.core.bridge.pydantic import BaseModel, ValidationError
from llama_index.core.instrumentation.events.llm import (
    LLMStructuredPredictEndEvent,
    LLMStructuredPredictStartEvent,
)
from llama_index.core.output_parsers import PydanticOutputParser
from llama_index.core.program.utils import FlexibleModel, create_flexible_model
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.types import Model
from llama_index_instrumentation import get_dispatcher
from pydantic_core import from_json

from cachecraft_rag.engine import StructuredOutput
from cachecraft_rag.errors import AnswerFormError
from cachecraft_rag.llama_index._base import EngineBackedLLM

# What LlamaIndex adds for programs that predict by calling a tool.
_TOOL_OPTIONS = frozenset({"tool_required", "tool_choice", "allow_parallel_tool_calls"})

_dispatcher = get_dispatcher(__name__)


class SchemaBoundLLM(EngineBackedLLM):
    """Base of `CacheCraftLLM`: `structured_predict`, its three twins, and what LlamaIndex builds on them.

    `pydantic_program_mode` is not used. The schema is also shown to the model, behind the last message:
    before it, it would change what chunks stand behind.
    """

    def structured_predict(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """The answer to a prompt as an object of `output_cls`.

        Args:
            llm_kwargs: options of the call, e.g. `max_tokens`.
            prompt_args: variables of the prompt.

        Raises:
            AnswerFormError: the answer was cut at `max_tokens`, or breaks a rule that a JSON schema
                cannot express.
        """
        _tell_start(output_cls, prompt, prompt_args)
        response = self.chat(**self._bound_call(output_cls, prompt, llm_kwargs, prompt_args))
        return _tell_end(_validated(response, output_cls))

    async def astructured_predict(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """As `structured_predict`."""
        _tell_start(output_cls, prompt, prompt_args)
        response = await self.achat(**self._bound_call(output_cls, prompt, llm_kwargs, prompt_args))
        return _tell_end(_validated(response, output_cls))

    # The hooks of `stream_structured_predict` and `astream_structured_predict`, which tell of each object.
    def _structured_stream_call(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Model | FlexibleModel, None, None]:
        for piece in self.stream_chat(**self._bound_call(output_cls, prompt, llm_kwargs, prompt_args)):
            yield _so_far(piece, output_cls)

    async def _structured_astream_call(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Model | FlexibleModel, None]:
        pieces = await self.astream_chat(**self._bound_call(output_cls, prompt, llm_kwargs, prompt_args))

        async def objects() -> AsyncGenerator[Model | FlexibleModel, None]:
            async for piece in pieces:
                yield _so_far(piece, output_cls)

        return objects()

    def _bound_call(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: Mapping[str, Any] | None,
        prompt_args: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Arguments of the chat that predicts."""
        messages = self._extend_messages(prompt.format_messages(llm=self, **prompt_args))
        schema_shown = TextBlock(text=PydanticOutputParser(output_cls).get_format_string(escape_json=False))
        *before, last = messages
        last = last.model_copy(update={"blocks": [*last.blocks, schema_shown]})
        options = {name: value for name, value in (llm_kwargs or {}).items() if name not in _TOOL_OPTIONS}
        structured = StructuredOutput(json_schema=output_cls.model_json_schema())
        return {**options, "messages": [*before, last], "structured": structured}


def _tell_start(output_cls: type[BaseModel], prompt: BasePromptTemplate, args: dict[str, Any]) -> None:
    event = LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=args)
    _dispatcher.event(event)


def _tell_end(output: Model) -> Model:
    _dispatcher.event(LLMStructuredPredictEndEvent(output=output))
    return output


def _validated(response: ChatResponse, output_cls: type[Model]) -> Model:
    try:
        return output_cls.model_validate_json(response.message.content or "")
    except ValidationError as error:
        name, raw = output_cls.__name__, response.raw or {}
        if raw.get("finish_reason") == "length":
            num_tokens = raw["usage"]["completion_tokens"]
            raise AnswerFormError(
                f"the answer was cut after {num_tokens} tokens, before its {name} was whole: raise max_tokens"
            ) from error
        raise AnswerFormError(f"the answer is no valid {name}: {error}") from error


def _so_far(piece: ChatResponse, output_cls: type[Model]) -> Model | FlexibleModel:
    """What a stream has given up to this piece: of `output_cls` as soon as that is possible, and whole
    with the last piece."""
    if piece.raw is not None:
        return _validated(piece, output_cls)
    read = _read_so_far(piece.message.content or "")
    try:
        return output_cls.model_validate(read)
    except ValidationError:
        fields = read if isinstance(read, dict) else {"root": read}
        return create_flexible_model(output_cls).model_validate(fields)


def _read_so_far(text: str) -> Any:
    # Not LlamaIndex's own repair of unfinished JSON: between two fields it finds nothing, so fields that
    # were there already would vanish again.
    try:
        return from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return {}  # nothing yet; what is no JSON at all is an error with the last piece
