"""LangChain's tools as the engine's options, and tool calls both ways."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import AIMessage, InvalidToolCall, ToolCall
from langchain_core.messages.tool import ToolCallChunk, tool_call, tool_call_chunk
from langchain_core.utils.function_calling import convert_to_openai_tool

from cachecraft_rag.engine import Tool
from cachecraft_rag.engine import ToolCall as EngineToolCall
from cachecraft_rag.engine.tools import ToolOptions
from cachecraft_rag.errors import InvalidRequestError

ToolChoice = str | bool | Mapping[str, Any] | None
"""As LangChain's models take it; see `engine_tool_choice`."""
_ANY_TOOL = ("any", "required")


def engine_tools(tools: Sequence[Any], strict: bool | None = None) -> list[Tool]:
    """The tools in OpenAI's form.

    Args:
        tools: functions, pydantic or TypedDict classes, LangChain tools, or mappings.
        strict: True closes their schemas, so that decoding bound to them allows no further arguments.

    Raises:
        InvalidRequestError: something has no form that LangChain can convert.
    """
    return [_engine_tool(f"tools[{i}]", tool, strict) for i, tool in enumerate(tools)]


def engine_tool_choice(choice: ToolChoice) -> str | None:
    """The engine's choice, None where LangChain leaves it open.

    Args:
        choice: "any", "required" or True (some tool), "auto", "none", the name of a tool, OpenAI's
            `{"type": "function", "function": {"name": ...}}`; None or False leave it open.

    Raises:
        InvalidRequestError: none of these.
    """
    if choice is None or choice is False:
        return None
    if choice is True or choice in _ANY_TOOL:
        return "required"
    if isinstance(choice, str):
        return choice
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise InvalidRequestError(
            f"tool_choice is {choice!r}: use 'any', 'auto', 'none', the name of a tool, or "
            '{"type": "function", "function": {"name": ...}}'
        )
    return name


def check_tools(tools: Sequence[Tool], choice: str | None) -> None:
    """Raise InvalidRequestError for what the engine would refuse, but for two tools of one name: those
    LangChain's conformance suite binds, and calls refuse them."""
    by_name = {tool.get("function", {}).get("name"): tool for tool in tools}
    ToolOptions(tuple(by_name.values()), choice or "auto")


def calls_in_openai_form(message: AIMessage) -> list[dict[str, Any]]:
    """The message's tool calls, those with broken arguments among them, as the history holds them."""
    valid = [_openai_call(call, json.dumps(call["args"], ensure_ascii=False)) for call in message.tool_calls]
    return valid + [_openai_call(call, call["args"] or "") for call in message.invalid_tool_calls]


def tool_calls(calls: Sequence[EngineToolCall]) -> list[ToolCall]:
    return [tool_call(name=call.name, args=dict(call.arguments), id=call.id) for call in calls]


def tool_call_chunks(calls: Sequence[EngineToolCall]) -> list[ToolCallChunk]:
    """Each call whole in one chunk, for the engine hands them out at the end."""
    return [
        tool_call_chunk(name=call.name, args=json.dumps(dict(call.arguments)), id=call.id, index=index)
        for index, call in enumerate(calls)
    ]


def _engine_tool(where: str, tool: Any, strict: bool | None) -> Tool:
    try:
        converted: Tool = convert_to_openai_tool(tool, strict=strict)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"{where} is {tool!r}: pass a function, a pydantic or TypedDict class, a LangChain tool or "
            f"OpenAI's form ({error})"
        ) from error
    return converted


def _openai_call(call: ToolCall | InvalidToolCall, arguments: str) -> dict[str, Any]:
    function = {"name": call["name"], "arguments": arguments}
    return {"id": call["id"], "type": "function", "function": function}
