"""Marks of a request's fields, read where another endpoint gets a field that it does not know."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

T = TypeVar("T")

#: A field that cannot change an answer: other endpoints ignore it.
Inert = Annotated[T, msgspec.Meta(extra={"inert": True})]


def neutral(*values: Any) -> msgspec.Meta:
    """Mark the values that ask for nothing: other endpoints accept the field with one of them."""
    return msgspec.Meta(extra={"neutral": values})


def shaped(shape: type[msgspec.Struct]) -> msgspec.Meta:
    """Name the struct whose fields the objects of a list may have, which stay objects."""
    return msgspec.Meta(extra={"shape": shape})
