"""Settings: fields of frozen dataclasses whose types have their limits and their meaning.

``port: Annotated[Port, "HTTP; 0 takes a free port"] = 8000`` declares one. msgspec parses and checks its value from the
configuration file, the environment and flags, and its row in ``docs/configuration.md`` is made from that line. A field
without a meaning is no setting: only code sets it. This module knows no file and no environment
(`pdmesh.config_sources` does), so that the pure core can declare settings too.
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pdmesh.errors import ConfigError
from pdmesh.units import parse_bytes, parse_seconds

#: The key that our own commands show to a gateway. Not a setting: a mesh's settings may have only hashes of keys.
CLIENT_KEY_VARIABLE = "PDMESH_API_KEY"

T = TypeVar("T")


class Mark(Enum):
    """Further properties of a setting, in its type."""

    SECRET = "secret"  # never shown or recorded
    TOP_TEN = "top ten"  # listed first, for most users
    HANDED_DOWN = "handed down"  # set by `pdmesh up` for its services


SECRET, TOP_TEN, HANDED_DOWN = Mark.SECRET, Mark.TOP_TEN, Mark.HANDED_DOWN


def one_of(*values: str) -> msgspec.Meta:
    """Mark a text as one of ``values``."""
    return msgspec.Meta(pattern=rf"\A({'|'.join(values)})\Z", extra={_CHOICES: values})


_CHOICES = "choices"
_NOUNS = {bool: "true or false", int: "whole number", float: "number", str: "text", Path: "path"}
_SWITCHES = {"yes": True, "no": False}  # msgspec reads true, false, 1 and 0


@dataclass(frozen=True, slots=True)
class Unit:
    """Name and parser of a number with a unit."""

    noun: str
    examples: str
    parse: Callable[[str], float]


_UNITS = {
    ("bytes", int): Unit("size in bytes", "such as 4GiB or 10GB", parse_bytes),
    ("s", float): Unit("duration in seconds", "such as 30s or 5m", parse_seconds),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """Leaf of a tree of settings. `name` is dotted ("gateway.port"), and `hint` is the field's type with its marks."""

    name: str
    hint: Any
    type: type
    optional: bool
    default: object
    meaning: str
    choices: tuple[str, ...]
    marks: frozenset[Mark]

    @property
    def secret(self) -> bool:
        """Whether values are never shown."""
        return SECRET in self.marks

    @property
    def unit(self) -> Unit | None:
        """Unit of a number, by the last word of its name; None for a rate, such as ``bytes_per_s``."""
        if self.name.endswith("_per_s"):
            return None
        return _UNITS.get((self.name.rpartition("_")[2], self.type))

    @property
    def limits(self) -> tuple[float | None, float | None]:
        """The least and the greatest number; None without a limit."""
        meta = _number_or_text(self.hint)
        return meta.ge, None if meta.le == sys.float_info.max else meta.le

    @property
    def wanted(self) -> str:
        """Description of valid values, in words."""
        if self.choices:
            return f"one of {', '.join(filter(None, self.choices))}"
        noun, examples = _NOUNS[self.type], ""
        if self.unit is not None:
            noun, examples = self.unit.noun, f", {self.unit.examples}"
        low, high = self.limits
        limits = "" if low is None else f" of at least {low:g}" if high is None else f" from {low:g} to {high:g}"
        return f"{noun}{limits}{examples}"

    def value(self, given: object, where: str, *, is_text: bool = False) -> object:
        """Return the tree's value for ``given``. With ``is_text``, numbers and switches may be text.

        Raises ConfigError, which names the value, its limits and ``where`` it came from.
        """
        if given == "" and self.optional:
            if self.secret:  # probably an unset variable of a script
                raise ConfigError(f"{where} is empty: give a secret, or leave the setting out")
            if is_text:
                return None
        found = given
        try:
            if isinstance(found, str) and self.unit is not None:
                found = self.unit.parse(found)
            elif is_text and isinstance(found, str) and self.type is bool:
                found = _SWITCHES.get(found.lower(), found)
            elif is_text and isinstance(found, str) and self.type in (int, float):
                found = self.type(found)
            return converted(found, self.hint, strict=not is_text)
        except ValueError:  # includes msgspec's ValidationError
            shown = "a secret of the wrong type" if self.secret else repr(given)
            article = "" if self.choices or self.type in (bool, str) else "a "
            raise ConfigError(f"{where} is {shown}: must be {article}{self.wanted}") from None


def converted(value: object, hint: type[T], *, strict: bool = True) -> T:
    """Return a plain value converted to the type ``hint``. Raises msgspec.ValidationError."""
    return msgspec.convert(value, hint, strict=strict, dec_hook=_path)


def _path(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    raise ValueError(f"no {kind.__name__}")


def settings_of(node: type, prefix: str = "") -> Iterator[Setting]:
    """Yield the settings of a tree of dataclasses, in the order of their declaration, named with dots."""
    hints = typing.get_type_hints(node, include_extras=True)
    for item in dataclasses.fields(node):
        name, hint = prefix + item.name, hints[item.name]
        marks: tuple[Any, ...] = getattr(hint, "__metadata__", ())
        meaning = next((mark for mark in marks if isinstance(mark, str)), "")
        plain = _plain(hint)
        if dataclasses.is_dataclass(plain) and not meaning and prefix == "":
            yield from settings_of(typing.cast(type, plain), name + ".")
        elif meaning:
            yield _setting(name, hint, plain, item.default, meaning, marks)


def _setting(name: str, hint: Any, plain: Any, default: object, meaning: str, marks: tuple[Any, ...]) -> Setting:
    optional = isinstance(plain, types.UnionType) or typing.get_origin(plain) is typing.Union
    kind: Any = (
        _plain(next(part for part in typing.get_args(plain) if part is not types.NoneType)) if optional else plain
    )
    extra = _number_or_text(hint).extra or {}
    return Setting(
        name,
        hint,
        kind,
        optional,
        default,
        meaning,
        extra.get(_CHOICES, ()),
        frozenset(mark for mark in marks if isinstance(mark, Mark)),
    )


def _plain(hint: Any) -> Any:
    """Return ``X`` for a hint ``Annotated[X, ...]``, and any other hint unchanged."""
    return hint.__origin__ if hasattr(hint, "__metadata__") else hint


def _number_or_text(hint: Any) -> msgspec.Meta:
    """Return the mark of a type, or of the first member of a union that has one; an empty mark without any."""
    marks = [*getattr(hint, "__metadata__", ())]
    for part in typing.get_args(_plain(hint)):
        marks += getattr(part, "__metadata__", ())
    return next((mark for mark in marks if isinstance(mark, msgspec.Meta)), msgspec.Meta())


def values_of(tree: object) -> Iterator[tuple[Setting, object]]:
    """Yield every setting of a tree, with its value there."""
    for setting in settings_of(type(tree)):
        value = tree
        for part in setting.name.split("."):
            value = getattr(value, part)
        yield setting, value
