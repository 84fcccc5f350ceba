"""LangChain messages → what the engine takes, and the engine's answers → LangChain messages."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
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
from langchain_core.outputs import (
    ChatGeneration,
    ChatGenerationChunk,
    ChatResult,
    Generation,
    GenerationChunk,
    LLMResult,
)

from cachecraft_rag.engine import Completion, CompletionDelta, Message
from cachecraft_rag.errors import InvalidRequestError
from cachecraft_rag.events import ReuseReport
from cachecraft_rag.langchain._tools import calls_in_openai_form, tool_call_chunks, tool_calls

_ROLES: Mapping[type[BaseMessage], str] = {
    SystemMessage: "system",
    HumanMessage: "user",
    AIMessage: "assistant",
    ToolMessage: "tool",
}
_TEXT_BLOCKS = ("text", "text-plain")


def engine_messages(messages: Sequence[BaseMessage]) -> list[Message]:
    """The messages in OpenAI's form and in the same order; names of people and ids of messages are left
    out.

    Messages of one role in a row are not merged: whether that is allowed is the chat template's to
    say, and merging would move chunk boundaries.

    Raises:
        InvalidRequestError: a role or a content block that cannot be rendered.
    """
    return [_engine_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def merge_stop(*groups: str | Sequence[str] | None) -> list[str]:
    """All stop texts, each once, in the order in which they were first named."""
    texts = (text for group in groups for text in ([group] if isinstance(group, str) else group or ()))
    return list(dict.fromkeys(texts))


def chat_result(completion: Completion, model_name: str) -> ChatResult:
    message = AIMessage(
        content=completion.text,
        tool_calls=tool_calls(completion.tool_calls),
        usage_metadata=_usage(completion),
        response_metadata=_response_metadata(completion, model_name),
    )
    info = {"finish_reason": completion.finish_reason}
    return ChatResult(
        generations=[ChatGeneration(message=message, generation_info=info)],
        llm_output={"model_name": model_name},
    )


def stream_chunk(delta: CompletionDelta, model_name: str) -> ChatGenerationChunk:
    """One piece of a streamed answer; the last one carries tool calls, usage and report."""
    completion = delta.completion
    if completion is None:
        return ChatGenerationChunk(message=AIMessageChunk(content=delta.text))
    message = AIMessageChunk(
        content=delta.text,
        tool_call_chunks=tool_call_chunks(completion.tool_calls),
        usage_metadata=_usage(completion),
        response_metadata=_response_metadata(completion, model_name),
        chunk_position="last",
    )
    return ChatGenerationChunk(message=message, generation_info={"finish_reason": completion.finish_reason})


def llm_result(completions: Sequence[Completion], model_name: str) -> LLMResult:
    """The answers to one batch of plain prompts, in its order."""
    num_prompt = sum(completion.num_prompt_tokens for completion in completions)
    num_answer = sum(completion.num_completion_tokens for completion in completions)
    usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_answer,
        "total_tokens": num_prompt + num_answer,
    }
    return LLMResult(
        generations=[
            [Generation(text=completion.text, generation_info=_generation_info(completion, model_name))]
            for completion in completions
        ],
        llm_output={"model_name": model_name, "token_usage": usage},
    )


def text_chunk(delta: CompletionDelta, model_name: str) -> GenerationChunk:
    """One piece of a streamed answer to a plain prompt; the last one carries usage and report."""
    completion = delta.completion
    info = None if completion is None else _generation_info(completion, model_name)
    return GenerationChunk(text=delta.text, generation_info=info)


def _generation_info(completion: Completion, model_name: str) -> dict[str, Any]:
    return {**_response_metadata(completion, model_name), "usage_metadata": _usage(completion)}


def _engine_message(where: str, message: BaseMessage) -> Message:
    calls = calls_in_openai_form(message) if isinstance(message, AIMessage) else []
    content = _content(where, message.content, {call["id"] for call in calls if call["id"]})
    rendered: dict[str, Any] = {"role": _role(where, message), "content": content}
    if calls:
        rendered["tool_calls"] = calls
    if isinstance(message, ToolMessage):
        rendered["tool_call_id"] = message.tool_call_id
        if message.name:
            rendered["name"] = message.name
    return rendered


def _role(where: str, message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    for kind, role in _ROLES.items():
        if isinstance(message, kind):
            return role
    raise InvalidRequestError(
        f"{where} is a {type(message).__name__}: use a system, human, AI, tool or chat message"
    )


def _content(
    where: str, content: str | list[str | dict[str, Any]], call_ids: Collection[str]
) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    blocks = [(i, block) for i, block in enumerate(content) if not _repeats_call(block, call_ids)]
    return [_text_block(f"{where}.content[{i}]", block) for i, block in blocks] or ""


def _repeats_call(block: str | dict[str, Any], call_ids: Collection[str]) -> bool:
    """Whether a block only repeats one of the message's tool calls, as those of some models do."""
    return isinstance(block, dict) and block.get("type") not in _TEXT_BLOCKS and block.get("id") in call_ids


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
    details = InputTokenDetails(
        cache_read=completion.num_cache_read_tokens, cache_creation=completion.num_cache_creation_tokens
    )
    return UsageMetadata(
        input_tokens=completion.num_prompt_tokens,
        output_tokens=completion.num_completion_tokens,
        total_tokens=completion.num_prompt_tokens + completion.num_completion_tokens,
        input_token_details=details,
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
