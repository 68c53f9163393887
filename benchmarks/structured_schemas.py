"""Fifty JSON schemas, each of which every answer that fits is bounded: what `structured_soak.py` asks for."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def text(least: int = 0, most: int = 12) -> Schema:
    return {"type": "string", "minLength": least, "maxLength": most}


def whole(least: int | None = None, most: int | None = None) -> Schema:
    bounds = {"minimum": least, "maximum": most}
    return {"type": "integer", **{name: bound for name, bound in bounds.items() if bound is not None}}


def pattern(regex: str) -> Schema:
    return {"type": "string", "pattern": regex}


def formatted(name: str) -> Schema:
    return {"type": "string", "format": name}


def a_list(items: Schema, least: int, most: int) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def an_object(*optional: str, **properties: Schema) -> Schema:
    """All are required but those that are named."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def any_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def one(*values: object) -> Schema:
    return {"enum": list(values)}


NULL: Schema = {"type": "null"}
FLAG: Schema = {"type": "boolean"}
DIGIT = whole(0, 9)

#: A list that holds lists, three deep: what refers to itself, and ends.
NESTED: Schema = {
    "$defs": {"node": an_object("inner", name=text(1, 4), inner=any_of(NULL, {"$ref": "#/$defs/node"}))},
    "$ref": "#/$defs/node",
}

SCHEMAS: dict[str, Schema] = {
    # objects of plain values
    "person": an_object(name=text(1, 20), age=whole(0, 150)),
    "flags": an_object(a=FLAG, b=FLAG, c=FLAG),
    "nothing": an_object(value=NULL),
    "empty object": an_object(),
    "optional": an_object("b", "c", a=DIGIT, b=text(), c=FLAG),
    "all optional": an_object("a", "b", "c", "d", a=DIGIT, b=DIGIT, c=FLAG, d=NULL),
    "many": an_object(**{f"p{number}": DIGIT for number in range(24)}),
    "long names": an_object(**{f"a_rather_long_name_of_property_{number}": FLAG for number in range(4)}),
    "escapes": an_object(**{'a "quoted" name': DIGIT, "back\\slash": DIGIT, "new\nline": FLAG}),
    # numbers
    "bounded": an_object(low=whole(-5, 5), high=whole(1000, 1010), one=whole(7, 7)),
    "above": an_object(n={"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 14}),
    "negative": an_object(n=whole(-1000, -990)),
    "number": an_object(x={"type": "number", "minimum": 0, "maximum": 1}),
    "wide number": an_object(x={"type": "number", "minimum": -273.15, "maximum": 1000.5}),
    "multiple": an_object(n={"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 5}),
    # texts
    "at least": an_object(s=text(8, 16)),
    "exactly": an_object(s=text(5, 5)),
    "code": an_object(s=pattern("^[A-Z]{3}-[0-9]{4}$")),
    "choice of words": an_object(s=pattern("^(red|green|blue)(ish)?$")),
    "hex": an_object(s=pattern("^#[0-9a-f]{6}$")),
    "phone": an_object(s=pattern(r"^\+?[0-9]{1,3}( [0-9]{2,4}){2,3}$")),
    "letters of Greek": an_object(s=pattern("^[\u03b1-\u03c9]{2,6}$")),
    # formats
    "date": an_object(when=formatted("date")),
    "time": an_object(when=formatted("time")),
    "moment": an_object(when=formatted("date-time")),
    "uuid": an_object(id=formatted("uuid")),
    "address": an_object(at=formatted("ipv4")),
    # values of a few
    "enumerated": an_object(kind=one("person", "place", "thing")),
    "mixed values": an_object(v=one(1, "one", None, True, 1.5, [1], {"a": 1})),
    "constant": an_object(version={"const": 3}, kind={"const": "fixed"}),
    "unicode values": an_object(s=one("größe", "日本語", "🙂", "naïve", "\u2028")),
    "unicode names": an_object(**{"größe": DIGIT, "名前": text(0, 4), "🙂": FLAG}),
    # lists
    "list": a_list(DIGIT, 0, 5),
    "list of exactly": a_list(whole(-3, 3), 3, 3),
    "texts": an_object(tags=a_list(text(1, 6), 1, 4)),
    "matrix": an_object(rows=a_list(a_list(DIGIT, 2, 2), 2, 2)),
    "objects": a_list(an_object(x=DIGIT, y=DIGIT), 1, 3),
    "tuple": {"type": "array", "prefixItems": [DIGIT, text(1, 3), FLAG], "items": False, "minItems": 3},
    "empty list": a_list(DIGIT, 0, 0),
    # either, or
    "either": an_object(v=any_of(DIGIT, text(1, 5), NULL)),
    "shapes": any_of(
        an_object(kind={"const": "circle"}, radius=whole(1, 99)),
        an_object(kind={"const": "square"}, side=whole(1, 99)),
        an_object(kind={"const": "point"}),
    ),
    "several types": an_object(v={"type": ["integer", "boolean", "null"], "minimum": 0, "maximum": 99}),
    "both": an_object(v={"allOf": [whole(0, None), whole(None, 50)]}),
    # deep, and by reference
    "deep": an_object(a=an_object(b=an_object(c=an_object(d=an_object(e=DIGIT))))),
    "shared": {
        "$defs": {"point": an_object(x=DIGIT, y=DIGIT)},
        **an_object(start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"}),
    },
    "definitions": {"definitions": {"word": text(1, 5)}, **an_object(word={"$ref": "#/definitions/word"})},
    "recursive": NESTED,
    "tree": {
        "$defs": {
            **{
                f"tree{depth}": an_object(leaf=DIGIT, left=any_of(NULL, {"$ref": f"#/$defs/tree{depth + 1}"}))
                for depth in range(6)
            },
            "tree6": an_object(leaf=DIGIT),
        },
        **an_object(root={"$ref": "#/$defs/tree0"}),
    },
    # maps
    "map": {"type": "object", "patternProperties": {"^[a-z]{1,3}$": text(0, 3)}, "additionalProperties": False},
    "names by pattern": {
        "type": "object",
        "patternProperties": {"^[ab]$": DIGIT},
        "additionalProperties": False,
    },
}
