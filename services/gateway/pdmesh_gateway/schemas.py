"""JSON schemas: from what a client sent to what an answer can be held to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ANY_OBJECT = {"type": "object"}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}

#: What changes nothing in what fits, and takes room.
_WORDS = ("description", "title", "default", "examples", "$comment", "$schema", "deprecated", "readOnly", "writeOnly")

_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "contains", "propertyNames")


def arguments_schema(parameters: Any) -> Mapping[str, Any]:
    """Return a `closed` schema of objects that fit ``parameters``.

    A tool without parameters (None) takes an empty object.
    """
    if parameters is None:
        return NO_ARGUMENTS
    if not isinstance(parameters, Mapping) or not parameters:
        return ANY_OBJECT
    schema: dict[str, Any] = closed(parameters)
    if "type" not in schema:
        schema["type"] = "object"
    return schema


def closed(schema: Any) -> Any:
    """Return a schema of which all that fits fits ``schema``, without its words.

    Objects that name their properties have no others, unless they say so: a model would make some up.
    """
    if not isinstance(schema, Mapping):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _WORDS:
            continue
        if key in _OF_SCHEMAS and isinstance(value, Mapping):
            result[key] = {name: closed(inner) for name, inner in value.items()}
        elif key in _LISTS_OF_SCHEMAS and isinstance(value, list) and "properties" not in schema:
            result[key] = [closed(inner) for inner in value]
        elif key in _SCHEMAS:
            result[key] = closed(value)
        else:
            result[key] = value
    # Parts that are combined say of each other's properties nothing.
    if "properties" in result and not result.keys() & {"additionalProperties", "allOf", "anyOf", "oneOf", "$ref"}:
        result["additionalProperties"] = False
    return result
