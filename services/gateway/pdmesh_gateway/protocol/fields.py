"""Annotations of a request's fields, for requests of other endpoints that have these fields."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

T = TypeVar("T")

#: A field that cannot change an answer: other endpoints ignore it.
Inert = Annotated[T, msgspec.Meta(extra={"inert": True})]


def neutral(*values: Any) -> msgspec.Meta:
    """Mark the values without effect: other endpoints accept the field with one of them."""
    return msgspec.Meta(extra={"neutral": values})


def shaped(shape: type[msgspec.Struct]) -> msgspec.Meta:
    """Name the struct whose fields a list's objects may have. The objects are not converted."""
    return msgspec.Meta(extra={"shape": shape})
