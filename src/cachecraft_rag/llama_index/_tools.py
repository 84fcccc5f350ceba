"""LlamaIndex's tools and tool calls ↔ OpenAI's form, which the engine takes; no state, no engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole, ToolCallBlock
from llama_index.core.llms.llm import ToolSelection
from pydantic_core import from_json

from cachecraft_rag.engine.tools import Tool, ToolCall

if TYPE_CHECKING:
    from llama_index.core.tools.types import BaseTool

LEGACY_CALLS_KEY = "tool_calls"
"""Where `additional_kwargs` of a message holds its tool calls too: `FunctionCallingProgram` looks nowhere
else while it streams."""


def to_openai_tools(tools: Sequence[BaseTool]) -> list[Tool]:
    # The limit on a description's length is one of OpenAI's service.
    return [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools]


def to_tool_choice(choice: str | Mapping[str, Any] | None, is_required: bool) -> str:
    """The engine's `tool_choice`. `choice` is one already, or OpenAI's `{"function": {"name": ...}}`;
    None leaves it to `is_required`."""
    if choice is None:
        return "required" if is_required else "auto"
    if isinstance(choice, Mapping):
        return str(choice.get("function", {}).get("name"))
    return choice


def with_question(
    history: Sequence[ChatMessage] | None, question: str | ChatMessage | None
) -> list[ChatMessage]:
    """The chat so far and what is asked now, if anything."""
    if isinstance(question, str):
        question = ChatMessage(question, role=MessageRole.USER)
    return [*(history or ()), *([question] if question is not None else ())]


def to_blocks(calls: Sequence[ToolCall]) -> list[ToolCallBlock]:
    return [
        ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=dict(call.arguments))
        for call in calls
    ]


def to_openai_call(block: ToolCallBlock) -> dict[str, Any]:
    """A call in OpenAI's form, where arguments are JSON text."""
    given = block.tool_kwargs
    arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return {
        "id": block.tool_call_id or "",
        "type": "function",
        "function": {"name": block.tool_name, "arguments": arguments},
    }


def to_selections(message: ChatMessage) -> list[ToolSelection]:
    """The tool calls of an answer, as LlamaIndex runs them."""
    return [
        ToolSelection(
            tool_id=block.tool_call_id or "",
            tool_name=block.tool_name,
            tool_kwargs=_arguments(block.tool_kwargs),
        )
        for block in message.blocks
        if isinstance(block, ToolCallBlock)
    ]


def _arguments(given: dict[str, Any] | str) -> Any:
    # Ours are mappings; another model's answer may hold them as text. `ToolSelection` turns what is no
    # mapping into an empty one.
    if not isinstance(given, str):
        return given
    try:
        return from_json(given)
    except ValueError:
        return {}
