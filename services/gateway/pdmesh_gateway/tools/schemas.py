"""Schemas of arguments: from what a client sent to what an answer can be held to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ANY_OBJECT = {"type": "object"}

#: What changes nothing in what fits, and takes room.
_WORDS = ("description", "title", "default", "examples", "$comment", "$schema", "deprecated", "readOnly", "writeOnly")

_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "contains", "propertyNames")


def arguments_schema(parameters: Any) -> Mapping[str, Any]:
    """Return a schema of which all that fits is an object that fits ``parameters``, without its words.

    Objects that name their properties have no others, unless they say so: a model would make some up.
    """
    if not isinstance(parameters, Mapping) or not parameters:
        return ANY_OBJECT
    schema: dict[str, Any] = _closed(parameters)
    if "type" not in schema:
        schema["type"] = "object"
    return schema


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    closed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _WORDS:
            continue
        if key in _OF_SCHEMAS and isinstance(value, Mapping):
            closed[key] = {name: _closed(inner) for name, inner in value.items()}
        elif key in _LISTS_OF_SCHEMAS and isinstance(value, list) and "properties" not in schema:
            closed[key] = [_closed(inner) for inner in value]
        elif key in _SCHEMAS:
            closed[key] = _closed(value)
        else:
            closed[key] = value
    # Parts that are combined say of each other's properties nothing.
    if "properties" in closed and not closed.keys() & {"additionalProperties", "allOf", "anyOf", "oneOf", "$ref"}:
        closed["additionalProperties"] = False
    return closed
