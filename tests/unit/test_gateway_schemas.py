"""Kinds of constraints: kept, said in other words, or dropped alone and named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from pdmesh.grammars import schema_problem
from pdmesh_gateway.schemas import MAX_QUESTIONS, obeyed

BYTES = LLTokenizer("byte")


def fits(schema: Any, value: Any) -> bool:
    """Whether the grammar of what remains of a schema lets a value through."""
    found = obeyed(schema, schema_problem).schema
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(found), overrides={"whitespace_flexible": False})
    matcher = LLMatcher(BYTES, grammar)
    assert not matcher.is_error(), matcher.get_error()
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()


def dropped(schema: Any) -> list[str]:
    return [each.path for each in obeyed(schema, schema_problem).dropped]


STRING = {"type": "string"}
INT = {"type": "integer"}
COLOR = {"enum": ["red", "green"], "type": "string"}


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


#: A schema of which nothing is dropped; values that fit; values that do not.
HELD: list[tuple[Any, list[Any], list[Any]]] = [
    # Annotations, and keywords of others.
    ({**STRING, "title": "T", "description": "d", "default": 1, "examples": [2], "deprecated": True}, ["a"], [1]),
    ({**STRING, "nullable": True, "x-order": 1, "markdownDescription": "m", "example": "e"}, ["a"], [1]),
    ({**STRING, "contentEncoding": "base64", "contentMediaType": "image/png", "contentSchema": {}}, ["a"], [1]),
    # Implied ones.
    ({"type": "object", "propertyNames": STRING, "additionalProperties": INT}, [{"a": 1}], [{"a": "b"}]),
    ({"type": "object", "propertyNames": {}, "additionalProperties": INT}, [{"a": 1}], [{"a": "b"}]),
    ({"type": "object", "propertyNames": True, "additionalProperties": INT}, [{"a": 1}], [{"a": "b"}]),
    ({"type": "object", "propertyNames": COLOR, "additionalProperties": INT}, [{"red": 1}, {}], [{"blue": 1}]),
    ({"type": "object", "propertyNames": {"const": "a"}, "additionalProperties": INT}, [{"a": 1}], [{"b": 1}]),
    (
        {"type": "object", "propertyNames": {"pattern": "^[a-z]$"}, "additionalProperties": INT},
        [{"a": 1}],
        [{"A": 1}, {"a": "b"}],
    ),
    (
        {**of(m={"type": "object", "propertyNames": {"$ref": "#/$defs/C"}}), "$defs": {"C": COLOR}},
        [{"m": {"red": [1]}}],
        [{"m": {"x": 1}}],
    ),
    ({"type": "array", "items": INT, "uniqueItems": False}, [[1, 1]], [["a"]]),
    ({"type": "array", "items": INT, "uniqueItems": True, "maxItems": 1}, [[], [1]], [[1, 2]]),
    ({**STRING, "uniqueItems": True, "contains": {}, "propertyNames": {"pattern": "x"}}, ["a"], [1]),
    ({"type": "array", "items": COLOR, "uniqueItems": True, "minItems": 1}, [["red"], ["red", "green"]], [[]]),
    ({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}, [[True, False]], [[True, True]]),
    ({"type": "array", "minContains": 2}, [[]], [1]),
    ({"then": {"type": "null"}, "else": False, **STRING}, ["a"], [None]),
    ({"type": "object", "unevaluatedProperties": True, "properties": {"a": INT}}, [{"a": 1}], [{"a": "x"}]),
    ({"type": "object", "unevaluatedProperties": False, "properties": {"a": INT}}, [{"a": 1}], [{"a": 1, "b": 1}]),
    ({"type": "object", "properties": {"a": {"not": {}}, "b": INT}}, [{"b": 1}, {}], [{"a": 1}]),
    ({"type": "object", "properties": {"a": {"not": True}, "b": INT}}, [{"b": 1}, {}], [{"a": 1}]),
    ({**STRING, "not": False}, ["a"], [1]),
    ({**STRING, "minLength": 2.0, "maxLength": 3.0}, ["ab"], ["a", "abcd"]),
    # A format beside a pattern.
    ({**STRING, "format": "starts_with", "pattern": "^pd.*"}, ["pdx"], ["x"]),
    ({**STRING, "format": "date", "pattern": "^20"}, ["2024-01-01"], ["1999-01-01"]),
    # Patterns.
    ({**STRING, "pattern": r"^(?=.*[A-Z])(?=.*\d).{4}$"}, ["Aa1x"], ["aaaa", "A1"]),
    ({**STRING, "pattern": "^(?=ab)a"}, ["abc"], ["ac"]),
    ({**STRING, "pattern": r'^"[\\/]$'}, ['"\\', '"/'], ['"', '"a']),
    ({**STRING, "pattern": '^"[a-z]+"$'}, ['"ab"'], ['"', '""', "ab"]),
    ({**STRING, "pattern": r"^C:\\[a-z]+$"}, ["C:\\ab"], ["C:\\", "C:/ab"]),
    ({**STRING, "pattern": r"^[^\\]+\\[^\\]+$"}, ["a\\b"], ["a\\", "ab"]),
    ({**STRING, "pattern": '^[^"]*"[^"]*$'}, ['a"b', '"'], ["ab"]),
    ({**STRING, "pattern": "^a\\n[bc]$"}, ["a\nb"], ["a\n", "anb"]),
    ({**STRING, "pattern": r"^\x22[ab]$"}, ['"a'], ['"', '"c']),
    ({**STRING, "pattern": '^["][ab]$'}, ['"a'], ['"', '"c']),
    ({**STRING, "pattern": r"^\t\d$"}, ["\t1"], ["\t", "t1"]),
    ({**STRING, "pattern": "^[[a]$"}, ["[", "a"], ["b"]),
    ({**STRING, "pattern": "^[a&&b]$"}, ["a", "&", "b"], ["c"]),
    ({**STRING, "pattern": "^[^]$"}, ["a", "\n"], ["ab"]),
    # Numbers.
    ({"type": "number", "minimum": -3.4e38, "maximum": 3.4e38}, [1.5], ["a"]),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**64}, [5], [1.5]),
    ({"anyOf": [{"type": "number"}, {**STRING, "pattern": r"^(?!^[-+.]*$)[+-]?\d*$"}]}, [1.5], ["1"]),
    # Options.
    (
        {
            "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
            "discriminator": {"propertyName": "k"},
            "$defs": {"A": of(k={"const": "a"}), "B": of(k={"const": "b"}, n={"$ref": "#/$defs/A"})},
        },
        [{"k": "a"}, {"k": "b", "n": {"k": "a"}}],
        [{"k": "b"}, {"k": "c"}],
    ),
    # Objects that are put together: no property that none of the parts names.
    (
        {"allOf": [{"$ref": "#/$defs/B"}, of(x=INT)], "$defs": {"B": of(y=STRING)}},
        [{"y": "a", "x": 1}],
        [{"y": "a"}, {"x": 1}, {"y": "a", "x": 1, "z": 1}],
    ),
    (
        {**of(b={"$ref": "#/$defs/B"}, c={"allOf": [{"$ref": "#/$defs/B"}, of(x=INT)]}), "$defs": {"B": of(y=INT)}},
        [{"b": {"y": 1}, "c": {"y": 1, "x": 1}}],
        [{"b": {"y": 1, "x": 1}, "c": {"y": 1, "x": 1}}, {"b": {"y": 1}, "c": {"y": 1, "x": 1, "z": 1}}],
    ),
    (
        {"type": "object", "properties": {"a": INT}, "anyOf": [{"required": ["a"]}, of(b=INT)]},
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}],
        [{}, {"a": 1, "c": 1}],
    ),
    ({"allOf": [of(a=INT), {**of(b=INT), "additionalProperties": True}]}, [{"a": 1, "b": 1, "c": 1}], [{"a": 1}]),
    ({"anyOf": [of(a=INT), of(b=INT)]}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}]),
    ({**of(a=INT), "required": ["a", "b"]}, [{"a": 1, "b": "x"}], [{"a": 1}, {"a": 1, "b": 1, "c": 1}]),
    # References.
    ({"type": "object", "properties": {"next": {"$ref": "#"}, "v": INT}}, [{"next": {"v": 1}}], [{"next": 1}]),
    ({**of(a={"$ref": "#/definitions/x%20y"}), "definitions": {"x y": INT}}, [{"a": 1}], [{"a": "b"}]),
    ({**of(a={"$ref": "#num"}), "$defs": {"n": {"$anchor": "num", **INT}}}, [{"a": 1}], [{"a": "b"}]),
    ({**of(a=INT, b={"$ref": "#/properties/a"})}, [{"a": 1, "b": 2}], [{"a": 1, "b": "c"}]),
    ({"$id": "https://x.test/s", **of(a={"$ref": "https://x.test/s#/$defs/n"}), "$defs": {"n": INT}}, [{"a": 1}], [{}]),
    ({"const": "a<|im_end|>b"}, ["a<|im_end|>b"], ["a"]),
]


@pytest.mark.parametrize("index", range(len(HELD)))
def test_what_can_be_said_is_held(index: int) -> None:
    schema, fitting, others = HELD[index]
    assert dropped(schema) == []
    assert [value for value in fitting if not fits(schema, value)] == []
    assert [value for value in others if fits(schema, value)] == []


#: A schema; the constraints that are dropped of it; values that fit what remains, and that do not.
DROPPED: list[tuple[Any, list[str], list[Any], list[Any]]] = [
    ({**STRING, "format": "password"}, ["#/format"], ["a"], [1]),
    ({**STRING, "format": "binary", "minLength": 2}, ["#/format"], ["ab"], ["a"]),
    ({"type": "array", "items": STRING, "uniqueItems": True}, ["#/uniqueItems"], [["a", "a"]], [[1]]),
    ({**STRING, "pattern": "a(?!b)", "maxLength": 3}, ["#/pattern"], ["x"], ["xxxx"]),
    ({**STRING, "pattern": r"\bfoo\b"}, ["#/pattern"], ["x"], [1]),
    ({**STRING, "pattern": r"^(a)\1$"}, ["#/pattern"], ["x"], [1]),
    ({**STRING, "pattern": "("}, ["#/pattern"], ["x"], [1]),
    ({**STRING, "format": "email", "pattern": r"^(?!\.)x"}, ["#/pattern"], ["a@b.de"], ["a"]),
    ({"type": "number", "multipleOf": 0.07}, ["#/multipleOf"], [1.5], ["a"]),
    ({"oneOf": [INT, {"type": "number"}]}, ["#/oneOf"], [1, 1.5], ["a"]),
    ({"not": {"type": "null"}, "type": ["string", "null"]}, ["#/not"], ["a"], [1]),
    ({**STRING, "if": {"minLength": 1}, "then": {"pattern": "a"}}, ["#/if", "#/then"], ["b"], [1]),
    ({**of(a=INT), "dependentRequired": {"a": ["b"]}}, ["#/dependentRequired"], [{"a": 1}], [{}]),
    ({"type": "array", "contains": INT, "items": STRING}, ["#/contains"], [["a"]], [[1]]),
    ({**of(a=INT), "patternProperties": {"^x": INT, "x$": INT}}, ["#/patternProperties"], [{"a": 1}], [{"a": "b"}]),
    ({"type": "object", "propertyNames": {"maxLength": 2}}, ["#/propertyNames"], [{"abc": 1}], [1]),
    (
        {"type": "object", "propertyNames": {"$ref": "#/$defs/n", "maxLength": 3}, "$defs": {"n": STRING}},
        ["#/propertyNames"],
        [{"abcd": 1}],
        [1],
    ),
    ({"type": "object", "propertyNames": {"format": "uuid"}}, ["#/propertyNames/format"], [{"abc": 1}], [1]),
    ({**of(a={"$ref": "#/no/where"}, b=INT)}, ["#/properties/a/$ref"], [{"a": [], "b": 1}], [{"a": 1, "b": "c"}]),
    ({**of(a={"$ref": "https://x.test/y"}, b=INT)}, ["#/properties/a/$ref"], [{"a": [], "b": 1}], [{"b": 1}]),
    ({**of(a={"type": "str"}, b=INT)}, ["#/properties/a/type"], [{"a": [], "b": 1}], [{"a": 1, "b": "c"}]),
    ({**of(a="string", b=INT)}, ["#/properties/a"], [{"a": [], "b": 1}], [{"a": 1, "b": "c"}]),
    ({"const": 2**60 + 1}, ["#/const"], [5], []),
    (
        {**of(m={"type": "array", "uniqueItems": True}, k={"const": "v"})},
        ["#/properties/m/uniqueItems"],
        [{"m": [1, 1], "k": "v"}],
        [{"m": [], "k": "w"}, {"m": 1, "k": "v"}],
    ),
    (
        {
            "$ref": "#/$defs/n",
            "$defs": {"n": of(v={**STRING, "format": "path"}, l={"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]})},
        },
        ["#/$defs/n/properties/v/format"],
        [{"v": "a", "l": {"v": "b", "l": None}}],
        [{"v": "a", "l": {"v": "b"}}],
    ),
    (
        {**of(**{"a/b": {**STRING, "format": "x"}, "c": {**STRING, "format": "y"}})},
        ["#/properties/a~1b/format", "#/properties/c/format"],
        [{"a/b": "", "c": ""}],
        [{"a/b": 1, "c": ""}],
    ),
    (
        {"type": "object", "minProperties": 1, "maxProperties": 3, "properties": {"a": INT}},
        ["#/maxProperties"],
        [{"a": 1}],
        [{}],
    ),
]


@pytest.mark.parametrize("index", range(len(DROPPED)))
def test_what_cannot_be_said_is_dropped_alone(index: int) -> None:
    schema, paths, fitting, others = DROPPED[index]
    assert sorted(dropped(schema)) == sorted(paths)
    assert [value for value in fitting if not fits(schema, value)] == []
    assert [value for value in others if fits(schema, value)] == []


@pytest.mark.parametrize("schema", [{"type": "integer", "minimum": 5, "maximum": 4}, of(a={"not": {}}), False])
def test_what_nothing_fits_stays(schema: Any) -> None:
    found = obeyed(schema, schema_problem)
    assert not found.dropped
    assert "Unsatisfiable" in (schema_problem(found.schema) or "")


def test_a_schema_is_asked_about_so_often_at_most() -> None:
    num_asked = 0

    def refuse(_schema: Any) -> str:
        nonlocal num_asked
        num_asked += 1
        return "no"

    obeyed(of(**{f"p{number}": {**STRING, "minLength": number} for number in range(900)}), refuse)
    assert num_asked <= MAX_QUESTIONS
