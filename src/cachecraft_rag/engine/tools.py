"""Tools that a model may call, and answers that must keep a form."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cachecraft_rag.engine.json_schema import as_json, check_schema
from cachecraft_rag.errors import InvalidRequestError
from cachecraft_rag.segments.messages import named_function

Tool = Mapping[str, Any]
"""In OpenAI's form: `{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}`,
where `parameters` is a JSON schema."""
TOOL_CHOICES = ("auto", "none", "required")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that the model asks for.

    Attributes:
        arguments: as the model wrote them; checked against the tool's schema only where decoding was
            bound to it (`tool_choice` "required" or a name).
    """

    id: str
    name: str
    arguments: Mapping[str, Any]


def new_call(name: str, arguments: Mapping[str, Any]) -> ToolCall:
    """A call under an id of its own: nine letters and digits, as Mistral's chat templates want it when the
    call is shown again."""
    return ToolCall(secrets.token_hex(5)[:9], name, arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """A form that the answer must have; decoding is bound to it by vLLM's structured outputs.

    Exactly one field is given.

    Attributes:
        json_schema: the answer is JSON that fits this schema.
        json_object: the answer is any JSON object.
        regex: the answer matches as a whole.
        choice: the answer is one of these texts.

    Raises:
        InvalidRequestError: none or several are given, `choice` is empty, or `json_schema` is no schema.
    """

    json_schema: Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        given = [name for name in ("json_schema", "json_object", "regex", "choice") if getattr(self, name)]
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured output has {' and '.join(given) or 'no form'}: give exactly one of "
                "json_schema, json_object, regex and choice"
            )
        if self.json_schema is not None:
            check_schema("json_schema", self.json_schema)


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """The tools of one call.

    Attributes:
        tools: in OpenAI's form; the model is shown them in this order.
        choice: "auto" (the model decides), "none", "required" (at least one call), or the name of the
            tool to call.
        parallel: several calls in one answer are allowed.

    Raises:
        InvalidRequestError: a tool has not the form, its parameters are no JSON schema, two have one name,
            or `choice` names none of them.
    """

    tools: tuple[Tool, ...] = ()
    choice: str = "auto"
    parallel: bool = True
    names: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        names = tuple(_name_of(index, tool) for index, tool in enumerate(self.tools))
        if len(set(names)) != len(names):
            raise InvalidRequestError(f"tools are named {', '.join(names)}: each needs a name of its own")
        if self.choice not in (*TOOL_CHOICES, *names):
            known = ", ".join(map(repr, (*TOOL_CHOICES, *names)))
            raise InvalidRequestError(f"tool_choice is {self.choice!r}: use one of {known}")
        if self.choice == "required" and not names:
            raise InvalidRequestError("tool_choice is 'required' and no tools are given: pass tools=")
        object.__setattr__(self, "names", names)

    @property
    def shown(self) -> tuple[dict[str, Any], ...]:
        """The tools as chat templates take them; none where none may be called."""
        return () if self.choice == "none" else tuple(_shown(tool["function"]) for tool in self.tools)

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be a tool call."""
        return bool(self.tools) and self.choice not in ("auto", "none")


def _name_of(index: int, tool: object) -> str:
    function = named_function(tool)
    if function is None:
        raise InvalidRequestError(
            f"tools[{index}] is {tool!r}: a tool has the form "
            '{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}'
        )
    as_json(f"tools[{index}]", function)
    name: str = function["name"]
    if function.get("parameters") is not None:
        check_schema(f"parameters of tool {name!r}", function["parameters"])
    return name


def _shown(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {**function, "parameters": parameters_of(function)}}


def parameters_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments; they are an object, even where it does not say so."""
    return {"type": "object", "properties": {}, **(function.get("parameters") or {})}


def check_tools(tools: object) -> tuple[Tool, ...]:
    """The tools as a tuple.

    Raises:
        InvalidRequestError: it is no sequence.
    """
    if tools is None:
        return ()
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence):
        raise InvalidRequestError(f"tools is a {type(tools).__name__}: pass a sequence of tools")
    return tuple(tools)
