"""Conversion of GBNF, llama.cpp's grammar language, into the form that llguidance converts."""

from __future__ import annotations

import re

import msgspec
from llguidance import grammar_from

_PIECE = re.compile(
    r"#[^\r\n]*|(?P<text>\"(?:\\.|[^\"\\])*\")|(?P<set>\[(?:\\.|[^\]\\])*\])|\{[^}]*\}|(?P<open>[\"\[{])"
    r"|(?P<name>[A-Za-z0-9_-]+)|(?P<any>\.)|.",
    re.DOTALL,
)
_RULE = re.compile(r"^[ \t]*([A-Za-z0-9_-]+)[ \t]*::=", re.MULTILINE)
_CHAR = re.compile(r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\(.)|(.)", re.DOTALL)
_SHORT = {"n": "\n", "r": "\r", "t": "\t"}
#: Any character, line breaks included; the dot of regular expressions excludes them.
_ANY = "[\\x00-\U0010ffff]"


class Converted(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar for llguidance, or the reason why there is none."""

    grammar: str = ""
    problem: str = ""


def converted(grammar: str) -> Converted:
    """Convert a grammar by `lark_of`, with an error as the ``problem``. llguidance takes quadratic time for some
    grammars.
    """
    try:
        return Converted(grammar=lark_of(grammar))
    except (ValueError, RecursionError) as error:
        return Converted(problem=str(error))


def lark_of(grammar: str) -> str:
    """Return a grammar for llguidance from GBNF or Lark. Raise ValueError if the text is no grammar.

    Only GBNF is rewritten; its rules except ``root`` are renamed.
    """
    names = {name: f"rule-{number}" for number, name in enumerate(_RULE.findall(grammar)) if name != "root"}
    if "::=" not in grammar or "%llguidance" in grammar:
        return grammar_from("grammar", grammar)
    return grammar_from("grammar", _PIECE.sub(lambda piece: _respelled(piece, names), grammar))


def _respelled(piece: re.Match[str], names: dict[str, str]) -> str:
    match piece.lastgroup:
        case "text":
            return _text(piece[0][1:-1])
        case "set":
            negated = "^" if piece[0].startswith("[^") else ""
            return f"[{negated}{_set(piece[0][1 + len(negated) : -1])}]"
        case "open":
            raise ValueError(f"what begins with {piece[0]} at character {piece.start()} does not end")
        case "name":
            return names.get(piece[0], piece[0])
        case "any":
            return _ANY
        case _:
            return piece[0]


def _text(inner: str) -> str:
    """Return a literal in Lark. Control characters, which literals cannot contain, become sets of one character."""
    parts = [""]
    for char in map(_char, _CHAR.finditer(inner)):
        if (char < " " and char not in "\n\r\t") or char == "\x7f":
            parts += [f"[\\x{ord(char):02x}]", ""]
        else:
            parts[-1] += {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(char, char)
    if len(parts) == 1:
        return f'"{parts[0]}"'
    return "(" + " ".join(part if number % 2 else f'"{part}"' for number, part in enumerate(parts)) + ")"


def _set(inner: str) -> str:
    """Return the inside of a set. A dash after a character makes a range with the next character."""
    found = list(_CHAR.finditer(inner))
    parts: list[str] = []
    index = 0
    while index < len(found):
        is_range = index + 2 < len(found) and found[index + 1][0] == "-"
        ends = (found[index], found[index + 2]) if is_range else (found[index],)
        parts.append("-".join(_in_set(_char(end)) for end in ends))
        index += 3 if is_range else 1
    return "".join(parts)


def _in_set(char: str) -> str:
    return char if char.isalnum() or char > "\x7f" else f"\\x{ord(char):02x}"


def _char(piece: re.Match[str]) -> str:
    """Return the character that an escape or a plain character stands for. Raise ValueError for any other."""
    short, plain = piece[4], piece[5]
    if plain is not None:
        return plain
    if short is not None:
        if short not in '"\\[]nrt':
            raise ValueError(f"unknown escape at \\{short}")
        return _SHORT.get(short, short)
    code = int(piece[1] or piece[2] or piece[3], 16)
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise ValueError(f"{piece[0]} is not a character")
    return chr(code)
