"""Whether a mapping is a JSON schema, checked where a call comes in."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
from collections.abc import Mapping
from typing import Any

from cachecraft_rag.errors import InvalidRequestError

_MAX_REMEMBERED = 256


def check_schema(where: str, schema: object) -> None:
    """Check `schema`; without the package `jsonschema`, which vLLM brings, only that it is JSON.

    What the schema says and vLLM's structured outputs cannot do is vLLM's to refuse.

    Args:
        where: names it in errors.

    Raises:
        InvalidRequestError: it is no mapping, holds what JSON cannot, or breaks the rules of schemas.
    """
    if not isinstance(schema, Mapping):
        raise InvalidRequestError(
            f"{where} is a {type(schema).__name__}: pass a JSON schema as a mapping; of a pydantic model "
            "that is Model.model_json_schema()"
        )
    if complaint := _complaint(as_json(where, schema)):
        raise InvalidRequestError(f"{where} is no JSON schema: {complaint}")


def as_json(where: str, value: Mapping[str, Any]) -> str:
    """`value` as JSON text.

    Raises:
        InvalidRequestError: it holds what JSON cannot.
    """
    try:
        return json.dumps(dict(value), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{where} cannot be written as JSON: {error}") from error


# Remembered: an agent passes the same tools with every step, and one check takes milliseconds.
@functools.lru_cache(_MAX_REMEMBERED)
def _complaint(text: str) -> str:
    """What is wrong, "" if nothing is."""
    if importlib.util.find_spec("jsonschema") is None:
        return ""
    jsonschema: Any = importlib.import_module("jsonschema")
    try:
        jsonschema.Draft202012Validator.check_schema(json.loads(text))
    except jsonschema.SchemaError as error:
        return f"{error.message} (at {error.json_path})"
    return ""
