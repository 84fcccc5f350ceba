"""LlamaIndex's messages, responses and nodes ↔ the engine's; no state, no engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    MessageRole,
    TextBlock,
    ToolCallBlock,
)
from llama_index.core.indices.base import BaseIndex
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore

from cachecraft_rag.chunks import Chunk
from cachecraft_rag.engine.api import Completion, Message
from cachecraft_rag.errors import InvalidRequestError
from cachecraft_rag.llama_index._tools import LEGACY_CALLS_KEY, to_blocks, to_openai_call

REPORT_KEY = "cachecraft"
"""Where `additional_kwargs` of a response holds `ReuseReport.to_dict()`."""

# Names other providers use for the three roles that chat templates know.
_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.FUNCTION: "tool",
}


def to_engine_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """Messages as the engine takes them. Text blocks stay apart; the engine joins them by a newline,
    as `ChatMessage.content` does. Of `additional_kwargs`, a tool's `tool_call_id` and `name` are read.

    Raises:
        InvalidRequestError: a message holds a block that is neither text nor a tool call of the assistant's.
    """
    return [_to_engine_message(index, message) for index, message in enumerate(messages)]


def _to_engine_message(index: int, message: ChatMessage) -> Message:
    role = _ROLES.get(message.role, message.role.value)
    texts = [block.text for block in message.blocks if isinstance(block, TextBlock)]
    calls = [to_openai_call(block) for block in message.blocks if isinstance(block, ToolCallBlock)]
    _check_blocks(index, role, message)
    # One text as a plain string, the form that every engine and test double reads.
    blocks = [{"type": "text", "text": text} for text in texts]
    content = blocks if len(blocks) > 1 else "".join(texts)
    tool_calls = {"tool_calls": calls} if calls else {}
    return {"role": role, "content": content, **tool_calls, **_tool_fields(role, message)}


def _check_blocks(index: int, role: str, message: ChatMessage) -> None:
    for block in message.blocks:
        if isinstance(block, ToolCallBlock):
            if role != "assistant":
                raise InvalidRequestError(
                    f"messages[{index}] of role {role!r} holds a ToolCallBlock: only an assistant calls tools"
                )
        elif not isinstance(block, TextBlock):
            raise InvalidRequestError(
                f"messages[{index}] holds a {type(block).__name__}: this model reads text only, "
                "so pass TextBlock or a plain string"
            )


def _tool_fields(role: str, message: ChatMessage) -> dict[str, Any]:
    """Which call a tool's message answers."""
    given = message.additional_kwargs if role == "tool" else {}
    return {name: given[name] for name in ("tool_call_id", "name") if given.get(name)}


def chat_response(text: str, delta: str | None, completion: Completion | None, model: str) -> ChatResponse:
    """A whole answer (`delta` None) or a streamed piece: `text` is all of it so far. Its tool calls and
    what it cost are known with the last piece only, when `completion` is there."""
    calls = to_blocks(completion.tool_calls) if completion else []
    texts = [TextBlock(text=text)] if text or not calls else []
    extra = {LEGACY_CALLS_KEY: [to_openai_call(call) for call in calls]} if calls else {}
    message = ChatMessage(role=MessageRole.ASSISTANT, blocks=[*texts, *calls], additional_kwargs=extra)
    return ChatResponse(message=message, delta=delta, **_account(completion, model))


def completion_response(
    text: str, delta: str | None, completion: Completion | None, model: str
) -> CompletionResponse:
    """As `chat_response`."""
    return CompletionResponse(text=text, delta=delta, **_account(completion, model))


def _account(completion: Completion | None, model: str) -> dict[str, Any]:
    if completion is None:
        return {}
    num_prompt, num_answer = completion.num_prompt_tokens, completion.num_completion_tokens
    raw = {
        "model": model,
        "finish_reason": completion.finish_reason,
        "token_ids": list(completion.token_ids),
        "logprobs": completion.logprobs,
        # The names that LlamaIndex's TokenCountingHandler looks for.
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_answer,
            "total_tokens": num_prompt + num_answer,
            "prompt_tokens_details": {
                "cached_tokens": completion.num_cache_read_tokens,
                "cache_creation_tokens": completion.num_cache_creation_tokens,
            },
        },
    }
    return {"raw": raw, "additional_kwargs": {REPORT_KEY: completion.report.to_dict()}}


def to_chunks(nodes: Iterable[NodeWithScore | BaseNode], *, is_shared: bool = False) -> list[Chunk]:
    """The texts of nodes as response synthesizers show them to the model; nodes without any are
    left out.

    `doc_id` is the id of the source document, else of the node. `version` is the hash LlamaIndex
    keeps of the same, so it changes with the document's text or metadata.
    """
    plain = (node.node if isinstance(node, NodeWithScore) else node for node in nodes)
    chunks = (_to_chunk(node, is_shared) for node in plain)
    return [chunk for chunk in chunks if chunk is not None]


def nodes_of(source: object) -> list[NodeWithScore | BaseNode]:
    """The nodes of an index's document store, or those that are given.

    Raises:
        InvalidRequestError: it is neither an index nor a sequence of nodes, or the index keeps no nodes.
    """
    if isinstance(source, BaseIndex):
        found = list(source.docstore.docs.values())
        if not found:
            raise InvalidRequestError(
                "the index's document store holds no nodes, as with vector stores that keep the texts "
                "themselves: pass the nodes"
            )
        return [*found]
    if not isinstance(source, Sequence):
        raise InvalidRequestError(
            f"nodes is a {type(source).__name__}: pass a sequence of nodes, or an index"
        )
    for index, node in enumerate(source):
        if not isinstance(node, (NodeWithScore, BaseNode)):
            raise InvalidRequestError(
                f"nodes[{index}] is a {type(node).__name__}: pass nodes, documents or NodeWithScore"
            )
    return list(source)


def _to_chunk(node: BaseNode, is_shared: bool) -> Chunk | None:
    text = node.get_content(metadata_mode=MetadataMode.LLM).strip()
    if not text:
        return None
    source = node.source_node
    version = source.hash if source is not None and source.hash else node.hash
    return Chunk(text, node.ref_doc_id or node.node_id, version or None, is_shared)
