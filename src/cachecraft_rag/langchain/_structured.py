"""Answers in a form: LangChain's schemas as the engine's options, and answers parsed into them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from operator import itemgetter
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import (
    BaseGenerationOutputParser,
    BaseOutputParser,
    JsonOutputParser,
    PydanticOutputParser,
)
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableGenerator, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass

from cachecraft_rag.engine import StructuredOutput
from cachecraft_rag.errors import InvalidRequestError

Schema = dict[str, Any] | type
Parser = BaseOutputParser[Any] | BaseGenerationOutputParser[Any]
METHODS = ("json_schema", "function_calling", "json_mode")


def check_method(method: str) -> None:
    """Raise InvalidRequestError unless `with_structured_output` knows the method."""
    if method not in METHODS:
        raise InvalidRequestError(f"method is {method!r}: use one of {', '.join(map(repr, METHODS))}")


def json_schema(schema: Schema, strict: bool | None = None) -> dict[str, Any]:
    """Its JSON schema; `strict=True` closes it against further properties.

    Raises:
        InvalidRequestError: LangChain cannot convert it.
    """
    try:
        converted: dict[str, Any] = convert_to_json_schema(schema, strict=strict)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"schema is {schema!r}: pass a pydantic or TypedDict class, or a JSON schema with a title "
            f"({error})"
        ) from error
    return converted


def response_format(schema: dict[str, Any], method: str) -> dict[str, Any]:
    """The form in OpenAI's words, which tracers and answer caches take as plain data."""
    if method == "json_mode":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": schema["title"], "schema": schema}}


def engine_form(response_format: Mapping[str, Any]) -> StructuredOutput | None:
    """OpenAI's `response_format` as the form that decoding is bound to; None for plain text.

    Raises:
        InvalidRequestError: it is none of the types json_schema, json_object and text.
    """
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutput(json_object=True)
    described = response_format.get("json_schema") if kind == "json_schema" else None
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(schema, Mapping):
        raise InvalidRequestError(
            f"response_format is {response_format!r}: use "
            '{"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}, {"type": "json_object"} '
            "or with_structured_output"
        )
    return StructuredOutput(json_schema=schema)


def parser_of(schema: Any, name: str, method: str) -> Parser:
    """Into an instance where the schema is a pydantic class, else into a mapping."""
    is_model = isinstance(schema, type) and is_basemodel_subclass(schema)
    if method == "function_calling":
        if is_model:
            return PydanticToolsParser(tools=[schema], first_tool_only=True)
        return JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
    return PydanticOutputParser(pydantic_object=schema) if is_model else JsonOutputParser()


def parsed(
    model: Runnable[LanguageModelInput, AIMessage], parser: Parser, include_raw: bool
) -> Runnable[LanguageModelInput, Any]:
    """The model with its answers parsed, in the forms of LangChain's `with_structured_output`."""
    parse = RunnableGenerator(_whole, _awhole, name="WholeAnswer") | parser
    if not include_raw:
        return model | parse
    assign = RunnablePassthrough.assign(parsed=itemgetter("raw") | parse, parsing_error=lambda _: None)
    nothing = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | assign.with_fallbacks([nothing], exception_key="parsing_error")


# LangChain's JSON parser completes a cut answer, which would pass for a whole one; its tool parsers
# return None.
def _whole(messages: Iterator[AIMessage]) -> Iterator[AIMessage]:
    for message in messages:
        yield _refuse_cut(message)


async def _awhole(messages: AsyncIterator[AIMessage]) -> AsyncIterator[AIMessage]:
    async for message in messages:
        yield _refuse_cut(message)


def _refuse_cut(message: AIMessage) -> AIMessage:
    if message.response_metadata.get("finish_reason") == "length":
        raise OutputParserException(
            "the answer reached max_tokens before its form was complete: give more max_tokens",
            llm_output=message.text,
        )
    return message
