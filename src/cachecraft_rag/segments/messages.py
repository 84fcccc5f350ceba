"""Chat messages as they come in → one plain form, as chat templates take it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cachecraft_rag.errors import InvalidRequestError

PlainMessage = dict[str, Any]
"""`role` and `content`, both strings; an assistant's may have `tool_calls`, their arguments parsed, and a
tool's `tool_call_id` and `name`."""

_NEEDED = frozenset({"role", "content"})
_ALLOWED = {"assistant": frozenset({"tool_calls"}), "tool": frozenset({"tool_call_id", "name"})}


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[PlainMessage]:
    """The messages in plain form.

    Raises:
        InvalidRequestError: a message has not the form that `render_chat` names.
    """
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequestError(
            f"messages is a {type(messages).__name__}: give a list of "
            '{"role": ..., "content": ...}, or use complete() for one text'
        )
    if not messages:
        raise InvalidRequestError("messages is empty: give at least one message")
    return [_plain_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _plain_message(where: str, message: Mapping[str, Any]) -> PlainMessage:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(
            f"{where} is a {type(message).__name__}: a message is a mapping with role and content"
        )
    # OpenAI's form leaves out the content of a message that only calls tools, or gives None.
    calls = _plain_calls(f"{where}.tool_calls", message.get("tool_calls") or ())
    given = {"content": "", **message} if calls else message
    role = given.get("role")
    allowed = _NEEDED | _ALLOWED.get(str(role), frozenset())
    missing, unknown = _NEEDED - set(given), set(given) - allowed
    if missing or unknown:
        wrong = f"lacks {sorted(missing)}" if missing else f"has unknown keys {sorted(map(str, unknown))}"
        raise InvalidRequestError(f"{where} {wrong}: such a message has {', '.join(sorted(allowed))}")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"{where} has the role {role!r}: a role is a non-empty string")
    content = given["content"]
    plain = {"role": role, "content": _plain_content(where, "" if calls and content is None else content)}
    names = {name: given[name] for name in ("tool_call_id", "name") if given.get(name) is not None}
    return {**plain, **names, **({"tool_calls": calls} if calls else {})}


def _plain_content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "\n".join(_block_text(f"{where}.content[{i}]", b) for i, b in enumerate(content))
    raise InvalidRequestError(
        f"{where}.content is a {type(content).__name__}: it is a string or a list of text blocks"
    )


def _block_text(where: str, block: Any) -> str:
    kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
    if kind != "text":
        raise InvalidRequestError(
            f"{where} is of type {kind!r}: only text blocks are supported, "
            'of the form {"type": "text", "text": ...}'
        )
    text = block.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where} has the text {text!r}: a text block holds a string")
    return text


def _plain_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    if isinstance(calls, (str, Mapping)) or not isinstance(calls, Sequence):
        raise InvalidRequestError(f"{where} is a {type(calls).__name__}: it is a list of tool calls")
    return [_plain_call(f"{where}[{i}]", call) for i, call in enumerate(calls)]


def _plain_call(where: str, call: Any) -> dict[str, Any]:
    function = named_function(call)
    if function is None:
        raise InvalidRequestError(
            f"{where} is {call!r}: a tool call has the form "
            '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
        )
    name = function["name"]
    arguments = _plain_arguments(where, function.get("arguments"))
    named = {} if call.get("id") is None else {"id": call["id"]}
    return {**named, "type": "function", "function": {"name": name, "arguments": arguments}}


def named_function(entry: object) -> Mapping[str, Any] | None:
    """The function of a tool, or of a call of one, in OpenAI's form; None where it has none with a name."""
    function = entry.get("function") if isinstance(entry, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return function if isinstance(function, Mapping) and isinstance(name, str) and name else None


def _plain_arguments(where: str, arguments: Any) -> dict[str, Any]:
    """Parsed, as templates want them; no text at all stands for no arguments."""
    try:
        parsed = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except ValueError as error:
        raise InvalidRequestError(f"{where} has arguments that are no JSON: {error}") from error
    if not isinstance(parsed, Mapping):
        raise InvalidRequestError(
            f"{where} has the arguments {arguments!r}: they are a mapping, or a JSON object as text"
        )
    return dict(parsed)
