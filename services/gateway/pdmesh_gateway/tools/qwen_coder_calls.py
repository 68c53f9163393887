"""``<tool_call><function=name><parameter=p>value</parameter></function></tool_call>``: Qwen3-Coder, Qwen3.5.

Text values are written unquoted, others as JSON, so the meaning of a value depends on its schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from pdmesh_gateway.items import ItemWriter
from pdmesh_gateway.tools.answer_reader import NAME, SPACE, Capture, OptionalText, Reader, Script
from pdmesh_gateway.tools.format import CallableTool, ToolFormat, json_value, literal, regex, repeated
from pdmesh_gateway.tools.hermes_calls import free_text

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END = "<function=", "</function>"
PARAMETER, VALUE_END = "<parameter=", "</parameter>"

#: Names of parameters. A schema with other names is written without them.
_KEY = Capture(r"[^<>\n]")


class QwenCoder(ToolFormat):
    """Calls with a marker around each parameter."""

    name = "qwen_coder"
    markers = (OPEN, CLOSE)

    def rules(self, tools: Sequence[CallableTool], marker: Callable[[str], str], *, most: int, free: bool) -> str:
        calls: list[str] = []
        rules: list[str] = []
        for number, tool in enumerate(tools):
            rules += _parameter_rules(number, tool.schema)
            head = literal(f"\n{FUNCTION}{tool.name}>\n")
            calls.append(f"{head} parameters_{number} {literal(END + chr(10))} {marker(CLOSE)}")
        rules.append(f"call: {' | '.join(calls)}\n")
        if free:
            return free_text(marker(OPEN), "call", most, OPEN, FUNCTION) + "\n".join(rules)
        return f"answer: {repeated(marker(OPEN) + ' call', literal(chr(10)), most)}\n" + "\n".join(rules)

    def read(self, reader: Reader, schemas: Mapping[str, Mapping[str, Any]]) -> Script[None]:
        while (yield from reader.until([OPEN, FUNCTION], reader.writer.text)):
            head = yield from reader.call_head(OptionalText(OPEN), SPACE, FUNCTION, NAME, ">")
            if head is None:
                reader.text(len(OPEN if reader.buffer.startswith(OPEN) else FUNCTION))
                continue
            reader.begin_call(head)
            yield from _read_parameters(reader, schemas.get(head.captured[0], {}))
            reader.writer.end_item()
            yield from reader.spaces()


def _read_parameters(reader: Reader, schema: Mapping[str, Any]) -> Script[None]:
    writer = reader.writer
    properties = schema.get("properties", {})
    writer.arguments("{", drawn="")
    before = ""
    while (head := (yield from reader.call_head(SPACE, PARAMETER, _KEY, ">", OptionalText("\n")))) is not None:
        key = head.captured[0]
        reader.mark(head.num_chars)
        writer.arguments(f"{before}{json.dumps(key)}: ", drawn="")
        before = ", "
        if not (yield from _read_value(reader, properties.get(key, {"type": "string"}))):
            return
    if (yield from reader.skip(SPACE, END)):
        writer.arguments("}", drawn="")
        yield from reader.skip(SPACE, CLOSE)
    elif not reader.is_over:
        writer.arguments("}", drawn="")


def _read_value(reader: Reader, schema: Any) -> Script[bool]:
    """Read a parameter's value to its end; return False if the text ends within it."""
    value = _Value(reader.writer, schema)
    is_whole = yield from reader.until(("\n" + VALUE_END, VALUE_END), value.push, is_inside=True)
    if is_whole:
        value.end()
        yield from reader.skip(OptionalText("\n"), VALUE_END)
    else:
        value.cut()
        reader.mark(len(reader.buffer))
    return is_whole


class _Value:
    """Converter of a value to JSON. Texts are written piece by piece, other values when they are whole."""

    def __init__(self, writer: ItemWriter, schema: Any) -> None:
        self._writer = writer
        self._is_text = is_text(schema)
        self._may_be_null = not self._is_text or _takes_null(schema)
        self._held = ""
        self._begun = False

    def push(self, piece: str) -> None:
        self._held += piece
        if self._is_text and not (self._may_be_null and not self._begun and "null".startswith(self._held)):
            self._write()

    def end(self) -> None:
        if not self._begun and self._may_be_null and _is_json(self._held):
            self._writer.arguments(self._held)
            return
        self._write()
        self._writer.arguments('"', drawn="")

    def cut(self) -> None:
        """Write the incomplete value."""
        if not self._begun:
            self._writer.arguments(self._held)

    def _write(self) -> None:
        text = json.dumps(self._held, ensure_ascii=False)[1:-1]
        self._writer.arguments(text if self._begun else '"' + text, drawn=self._held)
        self._held = ""
        self._begun = True


def _is_json(value: str) -> bool:
    try:
        msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return False
    return True


def is_text(schema: Any) -> bool:
    """Return whether all values are texts or null, and are therefore written unquoted. False for null alone."""
    if not isinstance(schema, Mapping):
        return False
    if (options := _any_of(schema)) is not None:
        texts = [option for option in options if option != _NULL]
        return bool(texts) and all(is_text(option) for option in texts)
    if "type" in schema:
        return "string" in (kinds := _kinds(schema)) and kinds <= {"string", "null"}
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
    return all(isinstance(value, str) for value in values)


_NULL = {"type": "null"}


def _any_of(schema: Mapping[str, Any]) -> list[Any] | None:
    options = schema.get("anyOf", schema.get("oneOf"))
    return options if isinstance(options, list) and options else None


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    kinds = schema.get("type")
    return {str(kind) for kind in (kinds if isinstance(kinds, list) else [kinds])}


def _takes_null(schema: Mapping[str, Any]) -> bool:
    return "null" in _kinds(schema) or any(
        isinstance(option, Mapping) and _takes_null(option) for option in _any_of(schema) or ()
    )


def _parameter_rules(number: int, schema: Mapping[str, Any]) -> list[str]:
    properties = schema.get("properties")
    name = f"parameters_{number}"
    if not isinstance(properties, Mapping):
        return [
            f'{name}: ("{PARAMETER}" KEY_{number} ">\\n" value_{number})*',
            rf"KEY_{number}: /[A-Za-z0-9_.-]{{1,64}}/",
            f"value_{number}[lazy]: /(?s:.*)/ {literal(chr(10) + VALUE_END + chr(10))}",
        ]
    required = schema.get("required", ())
    rules: list[str] = []
    parts: list[str] = []
    for i, (key, of) in enumerate(properties.items()):
        rule = f"p_{number}_{i}"
        parts.append(rule if key in required else f"{rule}?")
        head, end = literal(f"{PARAMETER}{key}>\n"), literal(f"\n{VALUE_END}\n")
        if not is_text(of):
            shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
            value = {**shared, **of} if isinstance(of, Mapping) else of
            rules.append(f"{rule}: {head} {json_value(value)} {end}")
            continue
        texts = _texts(of)
        if texts is None:
            rules += [f"{rule}: {head} v_{number}_{i}", f"v_{number}_{i}[lazy]: /(?s:.*)/ {end}"]
        else:
            terminals = [text if text.startswith('"') else f"V_{number}_{i}_{j}" for j, text in enumerate(texts)]
            rules.append(f"{rule}: {head} ({' | '.join(terminals)}) {end}")
            rules += [
                f"{name}: {text}" for name, text in zip(terminals, texts, strict=True) if not text.startswith('"')
            ]
    return [f"{name}: {' '.join(parts) or chr(34) * 2}", *rules]


def _texts(schema: Mapping[str, Any]) -> list[str] | None:
    """Return Lark strings and regular expressions of the unquoted texts that fit a schema; None if all do."""
    if (options := _any_of(schema)) is not None:
        found: list[str] = []
        for option in options:
            texts = ['"null"'] if option == _NULL else _texts(option)
            if texts is None:
                return None
            found += texts
        return found
    null = ['"null"'] if "null" in _kinds(schema) else []
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return list(dict.fromkeys([*(literal(v) or '""' for v in values if isinstance(v, str)), *null]))
    limits: list[str] = []
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if least or most is not None:
        limits.append(f"/(?s:.{{{int(least)},{'' if most is None else int(most)}}})/")
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        before = "" if pattern.startswith("^") else "(?s:.*)"
        after = "" if pattern.endswith("$") else "(?s:.*)"
        inner = pattern.removeprefix("^").removesuffix("$").replace("/", "\\/").replace("\n", "\\n")
        limits.append(f"/{before}({inner}){after}/")
    if not limits:
        return None
    return [" & ".join([*limits, f"~/(?s:.*{regex(VALUE_END)}.*)/"]), *null]
