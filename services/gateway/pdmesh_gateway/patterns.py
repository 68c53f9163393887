"""Conversion of the regular expressions of JSON schemas (ECMA-262) to llguidance's dialect."""

from __future__ import annotations

import re

#: An escape, a class, or one character.
_PIECE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)|\[\^?(?:\\.|[^\]\\])*(?:\]|\Z)|.", re.DOTALL)
_IN_CLASS = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)|.", re.DOTALL)

#: Characters that JSON escapes. llguidance 1.6 drops the rest of a pattern after a literal that contains one.
_ESCAPED = re.compile(r"\\?[\"\x00-\x1f]|\\[\\nrtfv]|\\(?:x|u00)(?:22|5[cC]|[01][0-9a-fA-F])")

#: Patterns that libraries write with look-arounds, and equal patterns without.
_DATE = r"\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D"
_SECONDS = r"\d+(?:[.,]\d+)?S"
_TIME = rf"T(?:\d+H(?:\d+M)?(?:{_SECONDS})?|\d+M(?:{_SECONDS})?|{_SECONDS})"
_KNOWN = {
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        # The ISO 8601 duration of zod.
        rf"^P(?:\d+W|(?:{_DATE})(?:{_TIME})?|{_TIME})$"
    )
}

_NO_NUL = r"^[^\x00]*$"


def portable(pattern: str, *, splits: bool = False) -> str:
    """Return a pattern that matches the same texts in llguidance's dialect.

    With ``splits``, the result may be several patterns, separated by NUL, and a text must match each of them.
    Look-aheads at the beginning become separate patterns, and so does the ban of NUL that `_apart` needs.
    """
    pattern = _KNOWN.get(pattern, pattern)
    pieces = ["[\\s\\S]" if piece == "[^]" else piece for piece in _PIECE.findall(pattern)]
    also: list[str] = []
    if splits and pieces[:1] == ["^"]:
        while (end := _end_of_lookahead(pieces)) is not None:
            also.append("^" + "".join(pieces[4:end]))
            del pieces[1 : end + 1]
    if not splits:
        return "".join(_class(piece) for piece in pieces)
    spelled = ["".join(map(_apart, part)) for part in (pieces, *map(_PIECE.findall, also))]
    if any(_ESCAPED.fullmatch(piece) or _has_escaped(piece) for piece in _PIECE.findall(pattern)):
        spelled.append(_NO_NUL)
    return "\x00".join(spelled)


def _end_of_lookahead(pieces: list[str]) -> int | None:
    """Return the index at which the look-ahead after ``^`` ends; None without one."""
    if pieces[1:4] != ["(", "?", "="]:
        return None
    depth = 0
    for index, piece in enumerate(pieces[1:], start=1):
        depth += (piece == "(") - (piece == ")")
        if depth == 0:
            return index
    return None


def _has_escaped(piece: str) -> bool:
    return (
        piece.startswith("[")
        and not piece.startswith("[^")
        and any(_ESCAPED.fullmatch(each) for each in _IN_CLASS.findall(piece[1:-1]))
    )


def _apart(piece: str) -> str:
    """Return a piece that is not a literal if JSON escapes it.

    The piece then also matches NUL, which `_NO_NUL` forbids.
    """
    if _ESCAPED.fullmatch(piece):
        return f"[{piece}\\x00]"
    return _class(piece).replace("[", "[\\x00", 1) if _has_escaped(piece) else _class(piece)


def _class(piece: str) -> str:
    """Return a class with llguidance's operators escaped, which ECMA-262 does not have."""
    if len(piece) < 2 or not piece.startswith("["):
        return piece
    head = 2 if piece.startswith("[^") else 1
    inner = "".join("\\" + each if each in "[&~" else each for each in _IN_CLASS.findall(piece[head:-1]))
    return piece[:head] + inner + "]"
