"""What a setting is: a field of a frozen dataclass whose type says its limits and its meaning.

``port: Annotated[int, PORT, "HTTP; 0 takes a free port"] = 8000`` is all there is to one: what the configuration file,
the environment and flags may say of it, and its row in ``docs/configuration.md``, follow from that line. This module
knows no file and no environment (`pdmesh.config` does), so that the pure core can declare settings too.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from pdmesh.errors import ConfigError
from pdmesh.ranges import Range
from pdmesh.units import parse_bytes, parse_seconds

#: No setting of any service: the key that our own commands show to a gateway. A mesh's settings may have hashes only.
CLIENT_KEY_VARIABLE = "PDMESH_API_KEY"


@dataclass(frozen=True, slots=True)
class OneOf:
    """The only values of a text."""

    values: tuple[str, ...]


def one_of(*values: str) -> OneOf:
    """Mark a text as one of ``values``."""
    return OneOf(values)


class Mark(Enum):
    """What else a setting's type may say of it."""

    SECRET = "secret"  # never shown or recorded
    NO_SETTING = "no setting"  # a field that is filled in otherwise


SECRET = Mark.SECRET
NO_SETTING = Mark.NO_SETTING

_ANY_NUMBER = Range(0)
_ANY_DURATION = Range(1e-3)

_NOUNS = {bool: "true or false", int: "whole number", float: "number", str: "text", Path: "path"}


@dataclass(frozen=True, slots=True)
class Unit:
    """What a number with a unit is called and how it is read."""

    noun: str
    examples: str
    parse: Callable[[str], float]


_UNITS = {
    ("bytes", int): Unit("size in bytes", "such as 4GiB or 10GB", parse_bytes),
    ("s", float): Unit("duration in seconds", "such as 30s or 5m", parse_seconds),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One leaf of a tree of settings."""

    name: str  # "gateway.port"
    type: type
    optional: bool
    default: object
    meaning: str = ""
    range: Range | None = None  # of numbers only
    choices: tuple[str, ...] = ()
    secret: bool = False

    @property
    def unit(self) -> Unit | None:
        """The unit of a number, by the last word of its name."""
        return _UNITS.get((self.name.rpartition("_")[2], self.type))

    @property
    def wanted(self) -> str:
        """What it may be, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        noun = _NOUNS[self.type] if self.unit is None else self.unit.noun
        examples = "" if self.unit is None else f", {self.unit.examples}"
        return f"{noun}{self.range or ''}{examples}"

    def parsed(self, text: object) -> object:
        """A value from text, or the text itself where it cannot be one (`checked` then says so)."""
        if not isinstance(text, str):
            return text
        if self.optional and text == "":
            return None
        try:
            if self.type is bool:
                return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.lower()]
            return self.type(text) if self.unit is None else self.unit.parse(text)
        except (ValueError, KeyError):
            return text

    def checked(self, value: object, where: str) -> object:
        """``value`` as the tree holds it. Raises ConfigError, which says ``where`` it came from."""
        if value is None and self.optional:
            return None
        if self.secret and self.optional and value == "":  # a variable of a script's that is not set, most likely
            raise ConfigError(f"{where} is empty: give a secret, or leave the setting out")
        if self.type is Path and isinstance(value, str):
            value = Path(value)
        if self.unit is not None and isinstance(value, str):
            value = self.parsed(value)  # TOML has no sizes and durations
        if self.type is float and type(value) is int:
            value = float(value)
        fits = type(value) is self.type or (self.type is Path and isinstance(value, Path))
        if fits and self.range is not None and isinstance(value, int | float):
            fits = value in self.range
        if not fits or (self.choices and value not in self.choices):
            shown = "a secret of the wrong type" if self.secret else repr(value)
            article = "" if self.choices or self.type in (bool, str) else "a "
            raise ConfigError(f"{where} is {shown}: must be {article}{self.wanted}")
        return value


def settings_of(node: type, prefix: str = "") -> Iterator[Setting]:
    """The settings of a tree of dataclasses, in the order of their declaration, named with dots."""
    hints = typing.get_type_hints(node, include_extras=True)
    for item in dataclasses.fields(node):
        name, hint = prefix + item.name, hints[item.name]
        marks: tuple[Any, ...] = getattr(hint, "__metadata__", ())
        plain = hint.__origin__ if marks else hint
        if NO_SETTING in marks:
            continue
        if dataclasses.is_dataclass(plain):
            yield from settings_of(typing.cast(type, plain), name + ".")
            continue
        optional = isinstance(plain, types.UnionType)
        kind = next(part for part in typing.get_args(plain) if part is not types.NoneType) if optional else plain
        yield Setting(
            name,
            kind,
            optional,
            item.default,
            meaning=next((mark for mark in marks if isinstance(mark, str)), ""),
            range=_range(marks, item.name) if kind in (int, float) else None,
            choices=next((mark.values for mark in marks if isinstance(mark, OneOf)), ()),
            secret=SECRET in marks,
        )


def _range(marks: tuple[Any, ...], name: str) -> Range:
    """Return the declared range; by default a duration is above zero, another number at least zero."""
    unsaid = _ANY_DURATION if name.endswith("_s") else _ANY_NUMBER
    return next((mark for mark in marks if isinstance(mark, Range)), unsaid)


def with_values(node: type, values: dict[str, object], prefix: str = "") -> Any:
    """A tree of ``node`` with ``values`` by their dotted names, and defaults elsewhere."""
    hints = typing.get_type_hints(node)
    arguments: dict[str, object] = {}
    for item in dataclasses.fields(node):
        name, hint = prefix + item.name, hints[item.name]
        if name in values:
            arguments[item.name] = values[name]
        elif dataclasses.is_dataclass(hint):
            section = {key: value for key, value in values.items() if key.startswith(name + ".")}
            if section:
                arguments[item.name] = with_values(typing.cast(type, hint), section, name + ".")
    return node(**arguments)


def values_of(tree: object) -> Iterator[tuple[Setting, object]]:
    """Every setting of a tree, with its value there."""
    for setting in settings_of(type(tree)):
        value = tree
        for part in setting.name.split("."):
            value = getattr(value, part)
        yield setting, value
