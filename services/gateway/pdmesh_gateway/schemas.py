"""JSON schemas: conversion of a client's schema to one that llguidance obeys.

`obeyed` rewrites constraints that can be expressed otherwise (`_Rewriter`). Then it asks llguidance, and drops single
constraints until none is refused (`_Repair`). The result names them, so that callers can refuse or warn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from pdmesh_gateway.patterns import portable
from pdmesh_gateway.schema_references import escaped, found_at, target_of

ANY_OBJECT = {"type": "object"}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}

#: Function that returns llguidance's objection to a schema; None if the schema can be obeyed.
Objection = Callable[[Any], str | None]

#: Limit of the questions to llguidance about one schema.
MAX_QUESTIONS = 400

#: Limit of the characters of a path that a warning shows.
MAX_PATH_CHARS = 160

#: Limit of numbers' bounds: larger ones are out of the library's range, and of a number with 16 digits.
MAX_BOUND = 10**18

#: Limit of the values of an array with ``uniqueItems`` whose subsets are all written out.
MAX_UNIQUE_VALUES = 6

#: Keywords of JSON Schema, from draft 4 to 2020-12, that constrain values. All others are annotations.
_KEYWORDS = frozenset(
    (
        *("type", "enum", "const", "$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not"),
        *("if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
        *("multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        *("minLength", "maxLength", "pattern", "format"),
        *("items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems"),
        *("contains", "minContains", "maxContains"),
        *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames"),
        *("required", "minProperties", "maxProperties"),
    )
)
_CONDITIONS = {"minContains": "contains", "maxContains": "contains", "then": "if", "else": "if", "if": "if"}
_OF_SCHEMAS = ("properties", "patternProperties")
_LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMAS = ("items", "additionalProperties", "additionalItems")
_PARTS = ("allOf", "anyOf", "oneOf")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
#: Keywords that are dropped last, because dropping them removes the most.
_LAST = ("type", "properties", "required", "items", "prefixItems", "anyOf", "allOf", "enum", "const", "$ref")
_TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")
_UNSATISFIABLE = "Unsatisfiable schema"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A constraint that answers do not obey. ``path`` is a JSON pointer into the client's schema.

    JSON Schema lets a validator ignore an annotation, and gives a malformed keyword no meaning.
    """

    path: str
    why: str
    is_annotation: bool = False
    is_malformed: bool = False

    def __str__(self) -> str:
        path = self.path if len(self.path) <= MAX_PATH_CHARS else f"{self.path[:MAX_PATH_CHARS]}…"
        return f"{path} ({self.why})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Obeyed:
    """A schema at least as narrow as the client's, except for the ``dropped`` constraints."""

    schema: Any
    dropped: tuple[Dropped, ...] = ()


def arguments_schema(parameters: Any) -> Mapping[str, Any]:
    """Return a schema of objects that fit ``parameters``. A tool without parameters (None) takes an empty object."""
    if parameters is None:
        return NO_ARGUMENTS
    if not isinstance(parameters, Mapping) or not parameters:
        return ANY_OBJECT
    return parameters if "type" in parameters else {"type": "object", **parameters}


def obeyed(schema: Any, objection: Objection) -> Obeyed:
    """Return the part of ``schema`` that llguidance obeys, without annotations, and the dropped constraints.

    Objects that name properties get no others, unless the schema allows them: a model would invent some. An
    unsatisfiable schema stays as it is, and so does the rest of a schema after `MAX_QUESTIONS` questions.
    """
    if isinstance(schema, bool):
        return Obeyed(schema={} if schema else {"enum": []})
    rewriter = _Rewriter(schema, objection)
    repair = _Repair(rewriter.definitions, rewriter.paths, objection)
    root = repair.node(rewriter.root, "#")
    if isinstance(root, bool):
        root = {} if root else {"enum": []}
    if rewriter.definitions:
        root = {**root, "$defs": rewriter.definitions}
    return Obeyed(schema=root, dropped=(*rewriter.dropped, *repair.dropped))


class _Rewriter:
    """Rewriter of a schema. ``root`` refers to ``definitions``, whose places in the client's schema are ``paths``.

    A schema that is combined with others is *open*: its parts do not know each other's properties. A definition that is
    used both ways exists twice.
    """

    def __init__(self, schema: Any, objection: Objection) -> None:
        self._schema = schema
        self._objection = objection
        self._names: dict[tuple[str, bool], str] = {}
        self.dropped: list[Dropped] = []
        self.definitions: dict[str, Any] = {}
        self.paths: dict[str, str] = {}
        self.root = self._node(schema, "#", is_open=False)
        while len(self.definitions) < len(self._names):
            (path, is_open), name = list(self._names.items())[len(self.definitions)]
            self.paths[name] = path
            self.definitions[name] = self._node(found_at(self._schema, path), path, is_open=is_open)

    def _node(self, schema: Any, path: str, *, is_open: bool) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        if schema.get("not") in ({}, True) and "not" in schema:
            return False
        is_merged = is_open or _is_merged(schema)
        result: dict[str, Any] = {}
        for key, value in schema.items():
            if _says_nothing(schema, key, value):
                continue
            where = f"{path}/{escaped(key)}"
            if key in _OF_SCHEMAS and isinstance(value, Mapping):
                result[key] = {
                    portable(name) if key == "patternProperties" else name: self._node(
                        inner, f"{where}/{escaped(name)}", is_open=False
                    )
                    for name, inner in value.items()
                }
            elif key in _LISTS_OF_SCHEMAS and isinstance(value, list):
                is_part = key in _PARTS and is_merged
                result[key] = [self._node(each, f"{where}/{i}", is_open=is_part) for i, each in enumerate(value)]
            elif key in _SCHEMAS:
                result[key] = self._node(value, where, is_open=False)
            elif key == "$ref" and (target := target_of(self._schema, value)) is not None:
                result[key] = f"#/$defs/{self._name(target, is_open=is_merged)}"
            elif key in ("minimum", "exclusiveMinimum") and isinstance(value, float | int) and value < -MAX_BOUND:
                result[key] = -MAX_BOUND
            elif key in ("maximum", "exclusiveMaximum") and isinstance(value, float | int) and value > MAX_BOUND:
                result[key] = MAX_BOUND
            elif key in _COUNTS and isinstance(value, float) and value.is_integer():
                result[key] = int(value)
            elif key == "$ref" and isinstance(value, str):
                # The reference must not meet a definition of the rewriter.
                result[key] = value.replace("#/$defs/", "#/definitions/")
            else:
                result[key] = value
        self._drop_inexact(result, path)
        self._hold_names(result, path)
        self._hold_unique(result, schema.get("items"))
        self._spell_pattern(result)
        if isinstance(options := result.get("anyOf"), list):
            result["anyOf"] = self._without_number_texts(options)
        if result.get("unevaluatedItems") is False and "items" not in result and not _is_merged(schema):
            result["items"] = result.pop("unevaluatedItems")
        closes = result.get("unevaluatedProperties") is False
        if closes:
            del result["unevaluatedProperties"]
        return result if is_open and not closes else self._closed(result, schema)

    def _closed(self, result: dict[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return an object's schema without further properties, if neither the object nor its parts allow them."""
        own = result.get("properties", {})
        if "additionalProperties" in result or not isinstance(own, Mapping):
            return result
        if _is_merged(schema):
            names = self._property_names(schema, frozenset())
            if not names:
                return result
        elif "properties" in schema:
            names = dict.fromkeys(own) | _required(schema)
        else:
            return result
        properties = {name: own.get(name, True) for name in names}
        return {"properties": properties, "additionalProperties": False} | {
            key: value for key, value in result.items() if key != "properties"
        }

    def _property_names(self, schema: Any, seen: frozenset[str]) -> dict[str, None] | None:
        """Return the properties that an object and its parts name; None if further ones are allowed or refused
        explicitly.
        """
        if not isinstance(schema, Mapping):
            return {}
        if schema.keys() & {"additionalProperties", "patternProperties", "propertyNames"}:
            return None
        names: dict[str, None] = {}
        parts: list[Any] = [part for key in _PARTS if isinstance(schema.get(key), list) for part in schema[key]]
        if (target := target_of(self._schema, schema.get("$ref"))) is not None and target not in seen:
            seen |= {target}
            parts.insert(0, found_at(self._schema, target))
        for part in parts:
            found = self._property_names(part, seen)
            if found is None:
                return None
            names |= found
        own = schema.get("properties")
        own = dict.fromkeys(own) if isinstance(own, Mapping) else {}
        return own | names | _required(schema)

    def _drop_inexact(self, result: dict[str, Any], path: str) -> None:
        """Drop fixed integers that no double represents: llguidance would round them."""
        values = result.get("enum")
        if isinstance(values, list) and (exact := [each for each in values if not _is_inexact(each)]) != values:
            result["enum"] = exact
        for key, refused in (
            ("const", _is_inexact(result.get("const"))),
            ("enum", bool(values) and not result["enum"]),
        ):
            if refused:
                del result[key]
                self.dropped.append(Dropped(path=f"{path}/{key}", why="its integer is not an exact double"))

    def _hold_names(self, result: dict[str, Any], path: str) -> None:
        """Replace ``propertyNames`` by properties or a pattern of equal meaning, if possible."""
        names = self._resolved(result.get("propertyNames"))
        if not isinstance(names, Mapping):
            return
        says = {key: value for key, value in names.items() if not _says_nothing(names, key, value)}
        values, pattern = says.get("enum", [says["const"]] if "const" in says else None), says.get("pattern")
        others = result.get("additionalProperties", True)
        own = result.get("properties", {})
        if says.keys() <= {"type"} and says.get("type", "string") in ("string", ["string"]):
            del result["propertyNames"]
        elif says.keys() <= {"type", "format"}:
            del result["propertyNames"]
            why = "a name's format is not checked"
            self.dropped.append(Dropped(path=f"{path}/propertyNames/format", why=why, is_annotation=True))
        elif not isinstance(own, Mapping) or "patternProperties" in result:
            pass
        elif isinstance(values, list) and says.keys() <= {"type", "enum", "const"}:
            del result["propertyNames"]
            result["properties"] = {name: own.get(name, others) for name in values if isinstance(name, str)}
            result["additionalProperties"] = False
        elif isinstance(pattern, str) and not own and says.keys() <= {"type", "pattern", "format"}:
            del result["propertyNames"]
            result["patternProperties"] = {portable(pattern): others}
            result["additionalProperties"] = False

    def _hold_unique(self, result: dict[str, Any], items: Any) -> None:
        """Replace ``uniqueItems`` by all ordered arrays, if the items are at most `MAX_UNIQUE_VALUES` known values."""
        items = self._resolved(items)
        if "uniqueItems" not in result or result.get("type") != "array" or not isinstance(items, Mapping):
            return
        says = {key: value for key, value in items.items() if not _says_nothing(items, key, value)}
        values = [True, False] if says == {"type": "boolean"} else says.get("enum")
        if not isinstance(values, list) or len(values) > MAX_UNIQUE_VALUES or not says.keys() <= {"type", "enum"}:
            return
        least, most = result.get("minItems", 0), result.get("maxItems", len(values))
        if isinstance(least, int) and isinstance(most, int):
            sizes = range(max(0, least), min(most, len(values)) + 1)
            arrays = [list(each) for size in sizes for each in combinations(values, size)]
            for key in ("type", "items", "uniqueItems", "minItems", "maxItems"):
                result.pop(key, None)
            result["enum"] = arrays

    def _resolved(self, schema: Any) -> Any:
        """Follow at most eight references, one after the other, and return the schema that is reached.

        Keywords beside a reference are added to the target. A reference is not followed if the target is missing, or
        if such keywords cannot be added, because the target has one of them or is no object.
        """
        for _ in range(8):
            if not isinstance(schema, Mapping) or (target := target_of(self._schema, schema.get("$ref"))) is None:
                break
            found = found_at(self._schema, target)
            beside = {
                key: value for key, value in schema.items() if key != "$ref" and not _says_nothing(schema, key, value)
            }
            if beside and (not isinstance(found, Mapping) or found.keys() & beside.keys()):
                break
            schema = {**found, **beside} if beside else found
        return schema

    def _spell_pattern(self, result: dict[str, Any]) -> None:
        """Rewrite a pattern in llguidance's dialect, if that can be obeyed, and drop a ``format`` beside it."""
        pattern = result.get("pattern")
        if not isinstance(pattern, str):
            return
        patterns = portable(pattern, splits=result.get("type") == "string").split("\x00")
        first, *others = ({"type": "string", "pattern": each} for each in patterns)
        if any(self._objection(each) is not None for each in (first, *others)):
            return
        result["pattern"] = first["pattern"]
        if others:
            result["allOf"] = [*result.get("allOf", []), *others]
        result.pop("format", None)

    def _without_number_texts(self, options: list[Any]) -> list[Any]:
        """Return options without strings whose pattern cannot be obeyed, if a number is also an option."""
        if not any(isinstance(each, Mapping) and each.get("type") in ("number", "integer") for each in options):
            return options
        return [
            each
            for each in options
            if not (isinstance(each, Mapping) and each.get("type") == "string" and "pattern" in each)
            or self._objection(each) is None
        ]

    def _name(self, path: str, *, is_open: bool) -> str:
        return self._names.setdefault((path, is_open), f"pdmesh-{len(self._names)}")


class _Repair:
    """Remover of refused constraints, one by one, from a schema and its ``definitions`` (in place)."""

    def __init__(self, definitions: dict[str, Any], paths: Mapping[str, str], objection: Objection) -> None:
        self._definitions = definitions
        self._originals = dict(definitions)
        self._paths = paths
        self._objection = objection
        self._repaired: set[str] = set()
        self._num_left = MAX_QUESTIONS
        self.dropped: list[Dropped] = []

    def node(self, node: Any, path: str) -> Any:
        """Return ``node`` without refused constraints. An unsatisfiable one stays."""
        problem = self._problem(node)
        if not _is_refused(problem) or self._num_left <= 0:
            return node
        if not isinstance(node, Mapping):
            self._drop(path, "it is not a schema", is_malformed=True)
            return True
        node = {key: self._child(key, value, path) for key, value in node.items()}
        if isinstance(node.get("oneOf"), list) and "anyOf" not in node and _is_refused(self._problem(node)):
            if _is_refused(self._problem({"oneOf": [self._told_apart(each) for each in node["oneOf"]]})):
                self._drop(f"{path}/oneOf", "its options may overlap: answers fit at least one")
            node = {"anyOf" if key == "oneOf" else key: value for key, value in node.items()}
        for alone in (False, True):
            for key in sorted(node, key=_LAST.__contains__):
                problem = self._problem(node)
                if not _is_refused(problem):
                    return node
                rest = {other: value for other, value in node.items() if other != key}
                refused = (
                    _is_refused(self._problem({key: node[key]})) if alone else not _is_refused(self._problem(rest))
                )
                if refused:
                    self._drop(f"{path}/{escaped(key)}", problem, is_malformed=_is_malformed(key, node[key]))
                    node = rest
        if _is_refused(problem := self._problem(node)) and self._num_left > 0:
            self._drop(path, problem)
            return {"type": node["type"]} if node.get("type") in _TYPES else True
        return node

    def _child(self, key: str, value: Any, path: str) -> Any:
        """Return a keyword's value with its schemas repaired."""
        path = f"{path}/{escaped(key)}"
        if key in _OF_SCHEMAS and isinstance(value, Mapping):
            return {name: self.node(inner, f"{path}/{escaped(name)}") for name, inner in value.items()}
        if key in _LISTS_OF_SCHEMAS and isinstance(value, list):
            return [self.node(each, f"{path}/{i}") for i, each in enumerate(value)]
        if key in _SCHEMAS:
            return self.node(value, path)
        if key == "$ref" and isinstance(value, str):
            name = value.removeprefix("#/$defs/")
            if name in self._definitions and name not in self._repaired:
                self._repaired.add(name)
                definition, self._definitions[name] = self._definitions[name], {}
                # Within itself the definition counts as any value.
                self._definitions[name] = self.node(definition, self._paths[name])
        return value

    def _told_apart(self, option: Any) -> Any:
        """Return the part of an option that distinguishes it from others: its type, and properties with
        fixed values.
        """
        if isinstance(option, Mapping) and option.keys() == {"$ref"}:
            option = self._originals.get(str(option["$ref"]).removeprefix("#/$defs/"), option)
        if not isinstance(option, Mapping) or not isinstance(option.get("properties"), Mapping):
            return option
        fixed = {
            name: value
            for name, value in option["properties"].items()
            if isinstance(value, Mapping) and value.keys() & {"const", "enum"}
        }
        return {key: option[key] for key in ("type", "required") if key in option} | {"properties": fixed}

    def _problem(self, node: Any) -> str | None:
        if isinstance(node, bool):
            return None
        if self._num_left <= 0:
            return "too many of its constraints are refused"
        self._num_left -= 1
        if isinstance(node, Mapping) and self._definitions:
            node = {**node, "$defs": self._definitions}
        return self._objection(node)

    def _drop(self, path: str, problem: str | None, *, is_malformed: bool = False) -> None:
        lines = [line.strip() for line in (problem or "").splitlines()]
        why = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
        is_annotation = path.endswith("/format")
        dropped = Dropped(path=path, why=why[:160], is_annotation=is_annotation, is_malformed=is_malformed)
        self.dropped.append(dropped)


def _is_inexact(value: Any) -> bool:
    return isinstance(value, int) and abs(value) > 2**53 and (value.bit_length() > 1000 or int(float(value)) != value)


def _is_refused(problem: str | None) -> bool:
    return problem is not None and not problem.startswith(_UNSATISFIABLE)


def _is_malformed(key: str, value: Any) -> bool:
    """Return whether JSON Schema gives a keyword's value no meaning. False for keywords that are not checked."""
    if key == "type":
        return not (value in _TYPES or (isinstance(value, list) and all(each in _TYPES for each in value)))
    return (key in _OF_SCHEMAS and not isinstance(value, Mapping)) or (key in _PARTS and not isinstance(value, list))


def _is_merged(schema: Mapping[str, Any]) -> bool:
    """Return whether several parts of a schema, ``allOf`` included, apply to the same object."""
    return "allOf" in schema or len(schema.keys() & {"properties", "anyOf", "oneOf", "$ref"}) > 1


def _required(schema: Mapping[str, Any]) -> dict[str, None]:
    names = schema.get("required")
    return dict.fromkeys(name for name in names if isinstance(name, str)) if isinstance(names, list) else {}


def _says_nothing(schema: Mapping[str, Any], key: str, value: Any) -> bool:
    """Return whether a keyword has no effect on the values that fit ``schema``."""
    if (condition := _CONDITIONS.get(key)) is not None:
        return condition not in schema or (key == "if" and not schema.keys() & {"then", "else"})
    if key not in _KEYWORDS:
        return True
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind] if isinstance(kind, str) else _TYPES
    if key == "uniqueItems":
        most = schema.get("maxItems")
        return value is not True or "array" not in kinds or (isinstance(most, int) and most <= 1)
    if key in ("propertyNames", "unevaluatedProperties", "dependentRequired", "dependentSchemas", "dependencies"):
        return value in ({}, True) or "object" not in kinds
    if key in ("unevaluatedItems", "contains"):
        return "array" not in kinds or (key == "unevaluatedItems" and value in ({}, True))
    return key == "not" and value is False
