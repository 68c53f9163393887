"""JSON schemas: the values within a schema that its references name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote


class _Missing:
    """Type of `_MISSING`, the value at a path that does not exist."""


_MISSING = _Missing()


def target_of(schema: Any, reference: Any) -> str | None:
    """Return the pointer of a reference within ``schema``; None for other references, or if there is no such value."""
    if not isinstance(reference, str):
        return None
    own_id = schema.get("$id") if isinstance(schema, Mapping) else None
    base, _, pointer = reference.partition("#")
    if base and base != own_id:
        return None
    if pointer and not pointer.startswith("/"):
        return next(_anchored(schema, "#", pointer), None)
    path = "#" + unquote(pointer)
    return None if found_at(schema, path) is _MISSING else path


def found_at(schema: Any, path: str) -> Any:
    """Return the value at a pointer; `_MISSING` if there is none."""
    for part in path.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, Mapping) and part in schema:
            schema = schema[part]
        elif isinstance(schema, list) and part.isdecimal() and len(part) < 6 and int(part) < len(schema):
            schema = schema[int(part)]
        else:
            return _MISSING
    return schema


def _anchored(schema: Any, path: str, anchor: str) -> Iterator[str]:
    """Yield the paths of schemas with the given ``$anchor``."""
    if isinstance(schema, Mapping):
        if schema.get("$anchor") == anchor:
            yield path
        for key, value in schema.items():
            yield from _anchored(value, f"{path}/{escaped(key)}", anchor)
    elif isinstance(schema, list):
        for i, value in enumerate(schema):
            yield from _anchored(value, f"{path}/{i}", anchor)


def escaped(key: str) -> str:
    """Return a key as a part of a pointer."""
    return key.replace("~", "~0").replace("/", "~1")
