from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest

from cachecraft_rag.engine.options import CallOptions
from cachecraft_rag.engine.tools import StructuredOutput
from cachecraft_rag.errors import InvalidRequestError

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", "parameters": parameters}}


def test_a_schema_of_any_mapping_type_is_accepted() -> None:
    """What reads like a dictionary is one."""
    assert StructuredOutput(json_schema=MappingProxyType(SCHEMA)).json_schema == SCHEMA


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "objekt"}, r"json_schema is no JSON schema: 'objekt' .* \(at \$\.type\)"),
        ({"required": "city"}, "is no JSON schema: 'city' is not of type 'array'"),
        ({"enum": [{1, 2}]}, "json_schema cannot be written as JSON"),
        (dict, "json_schema is a type: pass a JSON schema as a mapping"),
    ],
)
def test_what_is_no_schema_is_refused(schema: Any, message: str) -> None:
    """The error says where the rule is broken, before any request is made."""
    with pytest.raises(InvalidRequestError, match=message):
        StructuredOutput(json_schema=schema)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"type": "objekt"}, "parameters of tool 'weather' is no JSON schema"),
        ("city", "parameters of tool 'weather' is a str"),
        ({"default": object()}, r"tools\[0\] cannot be written as JSON"),
    ],
)
def test_parameters_of_a_tool_are_a_schema(parameters: Any, message: str) -> None:
    """They are checked whether or not the call of the tool is forced."""
    with pytest.raises(InvalidRequestError, match=message):
        CallOptions.from_kwargs({"tools": [tool(parameters)]})


def test_a_tool_needs_no_parameters() -> None:
    """A function without arguments is a tool too."""
    assert CallOptions.from_kwargs({"tools": [tool(None)]}).tools.names == ("weather",)
