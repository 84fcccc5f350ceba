"""What a `FakeEngine` answers: what it was told to, in the form that the call asks for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cachecraft_rag.engine.options import CallOptions
from cachecraft_rag.engine.tools import StructuredOutput, Tool, ToolCall


@dataclass(frozen=True, slots=True)
class FakeAnswer:
    """A canned answer with tool calls, each `(name, arguments)`."""

    text: str = ""
    tool_calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()


Reply = str | FakeAnswer | Sequence[str | FakeAnswer] | Callable[[str], str | FakeAnswer]
"""One answer for every call, one per call in turn (the last repeats), or prompt → answer."""


def in_form(answer: str | FakeAnswer, options: CallOptions) -> FakeAnswer:
    """The canned answer, or one that keeps the form which the call is bound to: a plain text gives way
    to an example of the schema, a canned tool call is handed out as it is."""
    given = FakeAnswer(answer) if isinstance(answer, str) else answer
    if given.tool_calls:
        return given
    if options.tools.is_forced:
        tool = _chosen(options)
        return FakeAnswer("", ((tool["name"], _example(tool.get("parameters", {}))),))
    if options.sampling.structured is not None:
        return FakeAnswer(_bound(given.text, options.sampling.structured))
    return given


def tool_calls(answer: FakeAnswer, number: int) -> tuple[ToolCall, ...]:
    """Its tool calls, their ids made from the number of the engine's call."""
    return tuple(
        ToolCall(f"call-{number}-{index}", name, arguments)
        for index, (name, arguments) in enumerate(answer.tool_calls)
    )


def _chosen(options: CallOptions) -> Mapping[str, Any]:
    tools: Sequence[Tool] = options.tools.tools
    named = [tool["function"] for tool in tools if tool["function"]["name"] == options.tools.choice]
    function: Mapping[str, Any] = (named or [tools[0]["function"]])[0]
    return function


def _bound(text: str, form: StructuredOutput) -> str:
    if form.choice:
        return text if text in form.choice else form.choice[0]
    if form.regex is not None or _is_json_object(text):
        return text
    return json.dumps(_example(form.json_schema or {}))


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _example(schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> Any:
    """A value that fits the schema, for the keywords that pydantic writes."""
    root = schema if root is None else root
    if "$ref" in schema:
        name = str(schema["$ref"]).rsplit("/", 1)[-1]
        return _example(root.get("$defs", root.get("definitions", {}))[name], root)
    for keyword in ("anyOf", "oneOf", "allOf"):
        if keyword in schema:
            return _example(schema[keyword][0], root)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type", "object")
    if kind == "object":
        wanted = schema.get("required", ())
        return {
            name: _example(part, root)
            for name, part in schema.get("properties", {}).items()
            if name in wanted
        }
    if kind == "array":
        return [_example(schema.get("items", {}), root)] * int(schema.get("minItems", 0))
    return {"string": "text", "integer": 1, "number": 1.5, "boolean": True, "null": None}[kind]
