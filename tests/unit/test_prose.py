"""Texts that a native engineer stumbles over are counted, and none may be added: `RECORDED` is the table.

`python tests/unit/test_prose.py [PATH ...]` prints every marked text with its place and what to write instead. A mark
is a place to look at: some marked sentences are fine. If your change lowers a number, lower its row. CONTRIBUTING.md
has pairs of before and after.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
CODE = ("kubernetes", "lab", "libs", "services", "testing")
PAGES = ("docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")

#: The highest allowed percentage of marked texts of each kind; of trailing comments, their highest number.
RECORDED = {"docstring": 1, "comment": 1, "page": 2, "trailing comments": 400}

#: The first commit whose descendants have subjects of the form that `SUBJECT` and `MAX_SUBJECT` ask for.
FIRST_CHECKED = "a9b5e909"
SUBJECT = re.compile(r"[\w/.,-]+: [A-Za-z`]")
MAX_SUBJECT = 72


#: Names of former versions, and what is called so now. docs/terms.md explains the present ones.
RETIRED = {
    "Appointment": "Timer",
    "EmptyInstance": "InstanceCapacity",
    "Foretold": "PoolForecast",
    "KeptHere": "PrefixCache",
    "KeptWhere": "CacheIndex",
    "KvElsewhere": "RemoteKv",
    "Lives": "RequestHistories",
    "Mandate": "LeaderTerm",
    "OccupiedInstance": "InstanceLoad",
    "PartLost": "RangeLost",
    "PartMove": "Copy",
    "Rehome": "SetPlaces",
    "Relocation": "Copy",
    "Respread": "SetPlaces",
    "Strangers": "RejectedPeers",
    "TurnOver": "StreamHandover",
    "do_without": "replace_receiver",
    "exact_group": "arithmetic_class",
    "gives_back": "streams_out",
    "give_turn": "hand_over_stream",
    "giver": "previous_source",
    "lost_part": "lost_range",
    "num_elsewhere_tokens": "num_remote_tokens",
    "num_kept": "num_cached",
    "told_members": "last_sent_members",
    "unheard": "unreachable",
}


class Rule(NamedTuple):
    pattern: re.Pattern[str]
    advice: str
    opening: bool = False  # only the first words of a docstring or trailing comment are looked at


_PREPOSITIONS = (
    "Of|For|From|With|Without|In|On|At|By|To|Until|Till|As|Who|Whom|Whose|Which|But|And|Or|So|Behind|Beside|Before|After"
    "|Through|Among|Between|Because|Since|Else|Where|There|Nothing|Nobody|None"
)
_AFTER_WHAT = (
    "is|are|was|were|has|have|had|it|they|he|she|one|there|comes|came|goes|went|others|who|can|may|must|lies|stands"
    "|follows|remains|holds|waits"
)
RULES = {
    name: Rule(re.compile(pattern), advice, opening)
    for name, pattern, advice, opening in [
        ("a pronoun first", r"^(It|Its|They|Their|Those|These|That|He|One|Ones|Such|Both)\b", "name the thing", True),
        (
            "a fragment",
            rf"^({_PREPOSITIONS})\b(?![^.]*\breturn)",
            "begin with a verb for a function, with a noun for a class or field",
            True,
        ),
        (
            "so many",
            r"\bso (many|much|few|little|long|often) (?!as\b|that\b)[a-z]+",
            "give the quantity its name: `num_tokens`, `timeout_s`",
            False,
        ),
        ("what as a noun", rf"\b[Ww]hat ({_AFTER_WHAT})\b", "name it: 'the remaining tokens'", False),
        (
            "those of",
            r"\b([Tt]hose (of|that|which|who|whose|with|without|in|on|from|for|to)|[Tt]hat (of|which)"
            r"|the ones? (of|that|which|whose))\b",
            "repeat the noun",
            False,
        ),
        (
            "of which",
            r"\b(of which|(of|with|for|to) whom|(behind|beside|from) which|(of|with) whose)\b",
            "write two sentences",
            False,
        ),
        (
            "a person for a machine",
            r"\b([Ww]ho(ever)?|[Ww]hom|[NnSsEe](o|ome|very)body|[SsEe](ome|very)one|[Aa]nybody)\b",
            "'no instance', 'each gateway', 'the process that'",
            False,
        ),
        (
            "a foreign verb",
            r"\b(goes? on|going on|went on|g[ia]ve[sn]? (up|back)|giving (up|back)|tells? of|told of|does? without"
            r"|stands? still|stood still|lies? (in|behind|on)|comes? to nothing|(is|are) let go)\b",
            "continue, free, evict, release, report, replace, pause, is stored in",
            False,
        ),
        ("is to be", r"\b(is|are|was|were) to (be|come|go|get|have|do|take|give|send)\b", "'will be', 'should'", False),
        ("a bare that", r"\b(for|of|with|by|in|from|to|about) that[,.;:]", "name what 'that' is", False),
        ("a long sentence", r"^(?:[^\s|]+\s+){45,}\S+", "split the sentence", False),
    ]
}
_SENTENCES = re.compile(r"(?<=[.:!?])\s+(?=[A-Z`*])|\n\s*\n|\n\s*[-*] ")


class Text(NamedTuple):
    kind: str
    place: str
    text: str


def marks_of(text: Text) -> Iterator[tuple[str, str]]:
    """Yield the names of the rules that a text breaks, with the words that break each."""
    for number, sentence in enumerate(_SENTENCES.split(text.text.strip())):
        plain = re.sub(r"\]\([^)]*\)", "]", re.sub(r"``?[^`]*``?", "x", sentence)).lstrip("*->| #").strip()
        for name, rule in RULES.items():
            if rule.opening and (number or text.kind not in ("docstring", "trailing comment")):
                continue
            if found := rule.pattern.search(plain):
                yield name, found[0]


def texts_of_code(path: Path) -> Iterator[Text]:
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if text := ast.get_docstring(node):
            yield Text("docstring", f"{path.relative_to(ROOT)}:{node.body[0].lineno}", text)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = token.string.lstrip("#: ")
        directive = re.match(r"(type|noqa|pyright|pragma|fmt|mypy)\b", text)
        if token.type == tokenize.COMMENT and " " in text and not directive:
            place = f"{path.relative_to(ROOT)}:{token.start[0]}"
            trailing = not token.line.lstrip().startswith("#")
            yield (
                Text("trailing comment", place, text[:1].upper() + text[1:])
                if trailing
                else Text("comment", place, text)
            )


def texts_of_page(path: Path) -> Iterator[Text]:
    in_code = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and not line.startswith(("    ", "#")):
            for cell in line.strip().strip("|").split("|"):
                if len(cell.split()) > 3:
                    yield Text("page", f"{path.relative_to(ROOT)}:{number}", cell.strip())


@cache
def texts() -> list[Text]:
    code = [path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py")) if "_pb2" not in path.name]
    pages = [page for name in PAGES for page in (sorted((ROOT / name).rglob("*.md")) or [ROOT / name])]
    return [
        text for paths, read in ((code, texts_of_code), (pages, texts_of_page)) for path in paths for text in read(path)
    ]


@pytest.mark.parametrize("kind", ["docstring", "comment", "page"])
def test_no_text_that_is_hard_to_read_is_added(kind: str) -> None:
    all_of_kind = [text for text in texts() if text.kind == kind]
    marked = [text for text in all_of_kind if any(marks_of(text))]
    assert 100 * len(marked) <= RECORDED[kind] * len(all_of_kind), report(marked)


def test_no_trailing_comment_is_added() -> None:
    number = sum(text.kind == "trailing comment" for text in texts())
    assert number <= RECORDED["trailing comments"], "put the words into the name, the type or the docstring"


def test_commit_subjects_say_where_and_what_in_a_line() -> None:
    command = ["git", "-C", str(ROOT), "log", "--format=%s", f"{FIRST_CHECKED}..HEAD"]
    log = subprocess.run(command, capture_output=True, text=True, check=False)
    if log.returncode:
        pytest.skip("no history here")
    subjects = log.stdout.splitlines()
    assert [one for one in subjects if len(one) > MAX_SUBJECT or not SUBJECT.match(one)] == []


def test_no_retired_name_is_used_again() -> None:
    pattern = re.compile(rf"\b({'|'.join(RETIRED)})\b")
    used = [
        f"{path.relative_to(ROOT)}: {name} is {RETIRED[name]} now"
        for folder in CODE
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in sorted(set(pattern.findall(path.read_text())))
    ]
    assert not used, "\n".join(used)


def test_every_rule_marks_a_sentence_and_a_plain_sentence_has_no_mark() -> None:
    stumbling = (
        "Its prompt, which goes on with so many tokens of which nobody is to have what is kept, as those of others: "
        "for that."
    )
    names = {name for name, _ in marks_of(Text("docstring", "", stumbling))}
    assert names >= {"a pronoun first", "a foreign verb", "so many", "of which", "a person for a machine", "is to be"}
    assert names >= {"what as a noun", "those of", "a bare that"}
    assert {name for name, _ in marks_of(Text("docstring", "", "Of these, two."))} == {"a fragment"}
    assert {name for name, _ in marks_of(Text("page", "", "word " * 46))} == {"a long sentence"}
    assert not list(marks_of(Text("docstring", "", "Place the prompt on `prefill`. Evict cached blocks first.")))


def report(marked: list[Text]) -> str:
    return "\n".join(
        f"{text.place}: {name} [{words}]: {RULES[name].advice}\n    {' '.join(text.text.split())[:160]}"
        for text in marked
        for name, words in list(marks_of(text))[:1]
    )


def main() -> None:
    wanted = [str(Path(path).resolve().relative_to(ROOT)) for path in sys.argv[1:]]
    chosen = [text for text in texts() if not wanted or text.place.startswith(tuple(wanted))]
    marked = [text for text in chosen if any(marks_of(text))]
    sys.stdout.write(report(marked) + "\n")
    total, bad = Counter(text.kind for text in chosen), Counter(text.kind for text in marked)
    for kind in total:
        sys.stdout.write(f"{kind}: {total[kind]} texts, {bad[kind]} marked, {100 * bad[kind] / total[kind]:.1f} %\n")


if __name__ == "__main__":
    main()
