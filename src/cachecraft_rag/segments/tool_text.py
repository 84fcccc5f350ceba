"""Tools as text, for chat templates that know none.

The form is that of Hermes and Qwen, which most open models have seen. Which templates need it is found
by rendering, for a template may name tools and still not show them.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from cachecraft_rag.errors import InvalidRequestError
from cachecraft_rag.segments.messages import PlainMessage

Template = Callable[[Sequence[PlainMessage], Sequence[Mapping[str, Any]]], str]
"""Messages and tools → the text that a chat template makes of them; InvalidRequestError if it refuses."""

_TOOL_LIST = """You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def knows_tools(template: Template) -> bool:
    """Whether a template shows tools, calls of tools, and their results."""
    tool, called, result = (f"f{secrets.token_hex(16)}" for _ in range(3))
    call_id = secrets.token_hex(5)[:9]  # Mistral's templates refuse ids of any other length
    call = {"id": call_id, "type": "function", "function": {"name": called, "arguments": {"a": 1}}}
    messages: list[PlainMessage] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result, "tool_call_id": call_id, "name": called},
    ]
    parameters = {"type": "object", "properties": {"a": {"type": "integer", "description": "a number"}}}
    function = {"name": tool, "description": "a tool", "parameters": parameters}
    return _shows(template, messages, [{"type": "function", "function": function}], (tool, called, result))


def takes_system(template: Template) -> bool:
    """Whether a template shows system messages."""
    word = secrets.token_hex(16)
    messages = [{"role": "system", "content": word}, {"role": "user", "content": "?"}]
    return _shows(template, messages, (), (word,))


def as_text(
    messages: Sequence[PlainMessage], tools: Sequence[Mapping[str, Any]], *, in_system: bool
) -> list[PlainMessage]:
    """The same chat in messages that have nothing but a role and a content.

    The tools are listed at the end of the system message, or before the first user message where
    the template has no place for a system message. Results become messages of the user, those of one
    step together: a template may want the roles to alternate.
    """
    written: list[PlainMessage] = []
    for is_result, group in groupby(messages, key=lambda message: message["role"] == "tool"):
        if is_result:
            results = "\n".join(f"<tool_response>\n{m['content']}\n</tool_response>" for m in group)
            written.append({"role": "user", "content": results})
        else:
            written += [{"role": m["role"], "content": _with_calls(m)} for m in group]
    return _with_tools(written, tools, in_system) if tools else written


def _with_calls(message: PlainMessage) -> str:
    calls = (_json(call["function"]) for call in message.get("tool_calls", ()))
    parts = [message["content"], *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]
    return "\n".join(part for part in parts if part)


def _with_tools(
    messages: list[PlainMessage], tools: Sequence[Mapping[str, Any]], in_system: bool
) -> list[PlainMessage]:
    listed = _TOOL_LIST.format(tools="\n".join(map(_json, tools)))
    first = messages[0]
    if in_system and first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{listed}".lstrip()}, *messages[1:]]
    if not in_system and first["role"] == "user":
        return [{**first, "content": f"{listed}\n\n{first['content']}"}, *messages[1:]]
    return [{"role": "system" if in_system else "user", "content": listed}, *messages]


def _shows(
    template: Template,
    messages: Sequence[PlainMessage],
    tools: Sequence[Mapping[str, Any]],
    words: Sequence[str],
) -> bool:
    try:
        text = template(messages, tools)
    except InvalidRequestError:
        return False
    return all(word in text for word in words)


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)
