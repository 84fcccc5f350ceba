"""Calls of tools that the caller demands: decoding is bound to a JSON schema of them, so that any model
gives one, whatever form of calls it was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cachecraft_rag.engine.tools import ToolCall, ToolOptions, new_call, parameters_of


def call_schema(tools: ToolOptions) -> dict[str, Any]:
    """The schema of an answer that calls a tool: `{"name": ..., "arguments": ...}`, or an array of such
    where several calls are allowed.

    Not an array of one where only one is: weak models do not know what a lone bracket begins.
    """
    is_named = tools.choice != "required"
    functions = [tool["function"] for tool in tools.tools]
    chosen = [each for each in functions if not is_named or each["name"] == tools.choice]
    calls = [_call(index, function["name"]) for index, function in enumerate(chosen)]
    definitions = {
        f"tool{index}": _moved(parameters_of(function), _place(index))
        for index, function in enumerate(chosen)
    }
    one = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if is_named or not tools.parallel:
        return {**one, "$defs": definitions}
    return {"type": "array", "items": one, "minItems": 1, "$defs": definitions}


def read_calls(written: str) -> tuple[ToolCall, ...]:
    """The calls in an answer that was bound to `call_schema`; none if it is not whole."""
    try:
        found = json.loads(written)
    except ValueError:
        return ()
    calls = found if isinstance(found, list) else [found]
    if not all(map(_is_call, calls)):
        return ()
    return tuple(new_call(call["name"], call["arguments"]) for call in calls)


def _call(index: int, name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": _place(index)}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _place(index: int) -> str:
    return f"#/$defs/tool{index}"


def _moved(schema: Any, place: str) -> Any:
    """A schema as it must read at `place` in another: its references are to its own parts."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved


def _is_call(call: Any) -> bool:
    return (
        isinstance(call, Mapping)
        and isinstance(call.get("name"), str)
        and isinstance(call.get("arguments"), Mapping)
    )
