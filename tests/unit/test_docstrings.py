"""Docstrings say what a caller gets: they begin with a verb or a noun, not in the middle of a sentence."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: First words of what is read twice: prepositions, conjunctions, pronouns without a noun.
_FRAGMENTS = """
of as those until who whom whose since because than that and or but nor so yet for from by with without within in on at
to into onto beside besides beyond between among before after about above below behind during under over through against
instead except unlike via it they them he she these none nothing nobody somebody everybody whoever whatever whichever
once again not no also even else then there here more most less least as too both either neither
"""

#: Share of docstrings that may begin so, where no better first word was found.
_MOST = 0.01


def _docstrings() -> Iterator[tuple[str, str]]:
    for folder in ("kubernetes", "lab", "libs", "services", "testing"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            if "_pb2" in file.name:
                continue
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    text = ast.get_docstring(node)
                    if text:
                        yield f"{file.relative_to(ROOT)}:{node.lineno}", text


def test_docstrings_begin_with_what_a_caller_gets() -> None:
    words = set(_FRAGMENTS.split())
    docstrings = list(_docstrings())
    fragments = [
        f"{where}: {text.splitlines()[0]}"
        for where, text in docstrings
        if text.split()[0].strip("`*,.:;()\"'").lower() in words
    ]
    assert len(docstrings) > 1000
    assert len(fragments) <= _MOST * len(docstrings), "\n".join(fragments)
