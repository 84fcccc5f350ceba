"""LangChain messages → what the engine takes, and the engine's answers → LangChain messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from cachecraft_rag.engine import Completion, CompletionDelta, Message
from cachecraft_rag.errors import InvalidRequestError
from cachecraft_rag.events import ReuseReport

_ROLES: Mapping[type[BaseMessage], str] = {
    SystemMessage: "system",
    HumanMessage: "user",
    AIMessage: "assistant",
    ToolMessage: "tool",
}
_TEXT_BLOCKS = ("text", "text-plain")


def engine_messages(messages: Sequence[BaseMessage]) -> list[Message]:
    """The messages as role and content, in the same order; `name` and ids are left out.

    Messages of one role in a row are not merged: whether that is allowed is the chat template's to
    say, and merging would move chunk boundaries.

    Raises:
        InvalidRequestError: a role, a content block or a tool call that cannot be rendered.
    """
    return [_engine_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def merge_stop(*groups: str | Sequence[str] | None) -> list[str]:
    """All stop texts, each once, in the order in which they were first named."""
    texts = (text for group in groups for text in ([group] if isinstance(group, str) else group or ()))
    return list(dict.fromkeys(texts))


def chat_result(completion: Completion, model_name: str) -> ChatResult:
    message = AIMessage(
        content=completion.text,
        usage_metadata=_usage(completion),
        response_metadata=_response_metadata(completion, model_name),
    )
    info = {"finish_reason": completion.finish_reason}
    return ChatResult(
        generations=[ChatGeneration(message=message, generation_info=info)],
        llm_output={"model_name": model_name},
    )


def stream_chunk(delta: CompletionDelta, model_name: str) -> ChatGenerationChunk:
    """One piece of a streamed answer; the last one carries usage and report."""
    completion = delta.completion
    if completion is None:
        return ChatGenerationChunk(message=AIMessageChunk(content=delta.text))
    message = AIMessageChunk(
        content=delta.text,
        usage_metadata=_usage(completion),
        response_metadata=_response_metadata(completion, model_name),
        chunk_position="last",
    )
    return ChatGenerationChunk(message=message, generation_info={"finish_reason": completion.finish_reason})


def _engine_message(where: str, message: BaseMessage) -> Message:
    calls = [*getattr(message, "tool_calls", ()), *getattr(message, "invalid_tool_calls", ())]
    if calls:
        raise InvalidRequestError(
            f"{where} holds {len(calls)} tool call(s): ChatCacheCraft does not render tool calls; send "
            "the conversation without them"
        )
    return {"role": _role(where, message), "content": _content(where, message.content)}


def _role(where: str, message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    for kind, role in _ROLES.items():
        if isinstance(message, kind):
            return role
    raise InvalidRequestError(
        f"{where} is a {type(message).__name__}: use a system, human, AI, tool or chat message"
    )


def _content(where: str, content: str | list[str | dict[str, Any]]) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    return [_text_block(f"{where}.content[{i}]", block) for i, block in enumerate(content)]


def _text_block(where: str, block: str | dict[str, Any]) -> dict[str, str]:
    if isinstance(block, str):
        return {"type": "text", "text": block}
    kind, text = block.get("type"), block.get("text")
    if kind not in _TEXT_BLOCKS:
        raise InvalidRequestError(
            f"{where} is of type {kind!r}: the model reads text only, in blocks of type "
            f"{' or '.join(map(repr, _TEXT_BLOCKS))}"
        )
    if not isinstance(text, str):
        raise InvalidRequestError(
            f"{where} has the text {text!r}: a {kind!r} block needs its text as a string; files and "
            "addresses are not read"
        )
    return {"type": "text", "text": text}


def _usage(completion: Completion) -> UsageMetadata:
    """Token counts; `cache_read` is what was taken over, recomputed tokens not included."""
    num_prompt, num_answer = completion.num_prompt_tokens, completion.num_completion_tokens
    num_read = min(completion.report.num_reused_tokens, num_prompt)
    # A token may be both reused and stored again; LangChain's details must not exceed the total.
    num_stored = min(completion.report.num_stored_tokens, num_prompt - num_read)
    return UsageMetadata(
        input_tokens=num_prompt,
        output_tokens=num_answer,
        total_tokens=num_prompt + num_answer,
        input_token_details=InputTokenDetails(cache_read=num_read, cache_creation=num_stored),
    )


def _response_metadata(completion: Completion, model_name: str) -> dict[str, Any]:
    return {
        "model_name": model_name,
        "finish_reason": completion.finish_reason,
        "cachecraft": _plain(completion.report),
    }


def _plain(report: ReuseReport) -> dict[str, Any]:
    """The report without enums and tuples, which checkpointers and caches bring back changed."""
    plain: dict[str, Any] = json.loads(json.dumps(report.to_dict()))
    return plain
