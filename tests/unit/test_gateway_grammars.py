"""From what clients ask for to a grammar, or to a 400 that names the field."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from pdmesh.errors import ConfigError, RequestRejected
from pdmesh.grammars import Grammars
from pdmesh_gateway.answer_grammars import MAX_PROPERTIES, GrammarChecker, asked_for
from pdmesh_gateway.grammar_process import GrammarProcess
from pdmesh_gateway.http.unknown import known_fields
from pdmesh_gateway.protocol.chat_protocol import ChatRequest
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.grammar_judge import InProcessJudge

pytestmark = pytest.mark.anyio

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
DEEP: dict[str, Any] = {"type": "integer"}
for _ in range(200):
    DEEP = {"type": "array", "items": DEEP}
TAG = {"structures": [{"begin": "<f>", "schema": OBJECT, "end": "</f>"}], "triggers": ["<f"]}


def request(**fields: Any) -> ChatRequest:
    body = {"messages": [{"role": "user", "content": "?"}], **fields}
    return msgspec.json.decode(json.dumps(body), type=ChatRequest)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def grammars(directory: Path) -> Grammars:
    return Grammars(directory, vocab_size=512, eos_token_ids=(258, 256))


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def json_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def strict(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}}


def structured(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


#: What is asked for, a text that is allowed, and one that is not.
ASKED: list[tuple[dict[str, Any], str, str]] = [
    (json_schema(OBJECT), '{"a":12}', '{"b"'),
    (json_schema(OBJECT), '{"a":12}', '{ "a"'),
    ({"response_format": {"type": "json_object"}}, '{"any":[1,null]}', "[1]"),
    *(
        ({"response_format": {"type": kind, **extra, "schema": schema}}, allowed, forbidden)
        for kind in ("json_object", "json_schema")
        for extra in ({}, {"json_schema": None})
        for schema, allowed, forbidden in (
            (OBJECT, '{"a":12}', '{"b"'),
            (json.dumps(OBJECT), '{"a":12}', '{"a":"'),
            ({"type": "array", "items": {"type": "integer"}}, "[1,2]", "{"),
            ({"enum": ["yes", "no"]}, '"no"', "{"),
        )
    ),
    ({"response_format": {"type": "json_object", "schema": {}}}, '{"any":1}', "[1]"),
    ({"response_format": {"type": "json_object", "schema": None}}, '{"any":1}', "[1]"),
    ({"response_format": {"type": "json_object", "json_schema": {"schema": OBJECT}}}, '{"a":1}', '{"b"'),
    (structured(json=OBJECT), '{"a":-1}', '{"a":"'),
    (structured(json=json.dumps(OBJECT)), '{"a":0}', "a"),
    (structured(json=OBJECT, disable_any_whitespace=False), '{ "a": 12 }', '{ "b'),
    (structured(json=OBJECT, whitespace_pattern=" ?"), '{ "a": 12}', "{\n"),
    (structured(json_object=True), "{}", "1"),
    (structured(regex="[0-9]{3}-[a-z]+"), "123-ab", "12-"),
    (structured(choice=["a.b", "a(c"]), "a(c", "aab"),
    (structured(grammar='root ::= "x" | "y" root'), "yyx", "z"),
    (structured(grammar='start: "x" | "y" start'), "yx", "z"),
    (structured(grammar='root ::= "\\x41\\u00e9\\U0001f600"'), "Aé😀", "x41"),
    (structured(grammar="root ::= [\\u00e0-\\u00e3]+"), "àãá", "e"),
    (structured(grammar="root ::= [\\x41-\\x43\\x5d\\x2d]+"), "AC]-", "D"),
    (structured(grammar='root ::= "\\x22\\x5c\\x0a\\x1b"'), '"\\\n\x1b', "x"),
    (structured(grammar='root ::= ("a\\x01")* "b"'), "a\x01a\x01b", "ab"),
    (structured(grammar="root ::= [^\\n\\x22]+"), "a b", '"'),
    (structured(grammar="root ::= ."), "\n", "ab"),
    (structured(grammar="root ::= [+--]+"), "+,-", "."),
    (structured(grammar="root ::= [a&&b~~]+"), "a&b~", "c"),
    (
        structured(grammar='root ::= start # the "rule"\nstart ::= "x" | fooBar\nfooBar ::= foo-bar\nfoo-bar ::= "y"'),
        "y",
        "r",
    ),
    (structured(grammar='root  ::= item{2,3}\r\nitem ::= [0-9] "," |\r\n "z"\r\n'), "1,z", "zzzz"),
    (structured(grammar='root ::= "\\\\" "[" "]"'), "\\[]", "x"),
    (structured(structural_tag=TAG), 'Some text <f>{"a":1}</f> and more', 'Some text <f>{"b'),
]


@pytest.mark.parametrize(("fields", "allowed", "forbidden"), ASKED, ids=[str(index) for index in range(len(ASKED))])
async def test_what_is_asked_for_is_what_is_allowed(
    grammars: Grammars, tokenizer: Tokenizer, fields: dict[str, Any], allowed: str, forbidden: str
) -> None:
    grammar, _ = await GrammarChecker(InProcessJudge(grammars)).grammar(request(**fields))
    matcher = grammars.matcher(grammar)
    good, bad = (tokenizer.encode(text, add_special_tokens=False).ids for text in (allowed, forbidden))
    assert matcher.consume_tokens(good), matcher.get_error()
    assert matcher.is_accepting()
    assert not grammars.matcher(grammar).consume_tokens(bad)


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, structured(), structured(json=None)])
async def test_nothing_is_asked_for(grammars: Grammars, fields: dict[str, Any]) -> None:
    assert asked_for(request(**fields)) is None
    assert await GrammarChecker(InProcessJudge(grammars)).grammar(request(**fields)) == ("", [])


async def test_a_dropped_constraint_is_named_and_what_is_no_constraint_refuses_no_strict_schema(
    grammars: Grammars,
) -> None:
    checker = GrammarChecker(InProcessJudge(grammars))
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    _, warnings = await checker.grammar(request(**json_schema(schema)))
    assert warnings == [
        '`response_format` is not checked against #/properties/a/uniqueItems (Unimplemented keys: ["uniqueItems"])'
    ]
    _, warnings = await checker.grammar(request(**strict({"type": "string", "format": "password"})))
    assert warnings == ["`response_format` is not checked against #/format (Unknown format: password)"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "xml"}}, "`response_format.type` is 'xml': use text, json_object"),
    ({"response_format": {"type": "json_schema"}}, "`response_format.json_schema.schema` is missing"),
    (json_schema([1]), "not a JSON object"),
    ({"response_format": {"type": "json_object", "schema": [1]}}, "not a JSON object"),
    ({"response_format": {"type": "json_object", "schema": "{"}}, "not JSON"),
    (json_schema(DEEP), "64 levels deep"),
    (json_schema({"properties": {f"p{i}": {} for i in range(MAX_PROPERTIES + 1)}}), "over 1000 properties"),
    (json_schema({"enum": [str(i) for i in range(1001)]}), "over 1000 enum values"),
    (json_schema({"const": "x" * 70_000}), "over 65536 bytes"),
    (json_schema({"items": {"minLength": 10_001}}), "`minLength` is over 10000"),
    (strict({"type": "no such type"}), "is not a valid JSON schema: #/type ("),
    (json_schema({"type": ["string", "int"]}), "is not a valid JSON schema: #/type ("),
    (
        json_schema({**OBJECT, "properties": {"a": "integer"}}),
        "is not a valid JSON schema: #/properties/a (it is not a schema",
    ),
    (
        structured(json={"type": "array", "items": {"anyOf": {"type": "string"}}}),
        "not a valid JSON schema: #/items/anyOf (",
    ),
    (json_schema({"type": "object", "properties": ["a"]}), "is not a valid JSON schema: #/properties ("),
    (strict({"$ref": "#/no/where"}), "cannot be enforced: "),
    (structured(json="{"), "not JSON"),
    (structured(regex="(a"), "cannot be enforced: "),
    (structured(choice=[]), "must be one or more strings"),
    (structured(choice=[str(i) for i in range(1001)]), "1001 strings; at most 1000 are allowed"),
    (structured(grammar="start: nowhere"), "cannot be enforced: "),
    (structured(grammar=""), "must have 1 to 262144 characters"),
    (structured(grammar="root ::= " + "x" * 262_144), "must have 1 to 262144 characters"),
    (structured(grammar='root ::= "a'), "does not end"),
    (structured(grammar="root ::= " + "[" * 200_000), "does not end"),
    (structured(grammar="root ::= nowhere"), "Rule 'nowhere' not found"),
    (structured(grammar='root ::= "\\q"'), "unknown escape at \\q"),
    (structured(grammar='root ::= "\\ud800"'), "is not a character"),
    (strict({"type": "array", "uniqueItems": True}), "cannot be enforced: #/uniqueItems"),
    (strict({"type": "string", "pattern": "a(?=b)"}), "cannot be enforced: #/pattern (look-around"),
    (structured(regex="a", choice=["b"]), "has regex and choice: give one of them"),
    (structured(structural_tag={"structures": [], "triggers": []}), "has no tags"),
    (structured(structural_tag={**TAG, "triggers": ["<f"] * 1001}), "more than 1000 tags or triggers"),
    (structured(structural_tag={**TAG, "triggers": ["<g"]}), "begins with none of the triggers"),
    (structured(structural_tag="{"), "structural tag that cannot be read"),
    ({**structured(regex="a"), "response_format": {"type": "json_object"}}, "cannot both be given"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[str(index) for index in range(len(REFUSED))])
async def test_what_cannot_be_obeyed_is_a_400_that_names_the_field(
    grammars: Grammars, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestRejected) as caught:
        await GrammarChecker(InProcessJudge(grammars)).grammar(request(**fields))
    assert message in str(caught.value)
    assert caught.value.status == 400
    assert caught.value.param is not None
    assert caught.value.param.split(".")[0] in fields


@pytest.mark.parametrize("name", ["guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"])
def test_fields_that_vllm_has_given_up_point_to_the_new_one(name: str) -> None:
    with pytest.raises(RequestRejected, match=f"`{name}` is not supported by this server. Use `structured_outputs`."):
        known_fields({name: "x"}, ChatRequest)


async def test_a_grammar_is_compiled_once(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    problem = Grammars.problem

    def count(self: Grammars, grammar: str) -> str | None:
        compiled.append(grammar)
        return problem(self, grammar)

    monkeypatch.setattr(Grammars, "problem", count)
    checker = GrammarChecker(InProcessJudge(grammars))
    for _ in range(3):
        await checker.grammar(request(**structured(regex="once")))
    assert len(compiled) == 1


async def test_one_that_takes_too_long_is_refused_meanwhile_and_tried_again(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = anyio.Event()
    checker = GrammarChecker(InProcessJudge(grammars))
    with monkeypatch.context() as patch:
        patch.setattr("pdmesh_gateway.answer_grammars.COMPILE_LIMIT_S", 0.01)
        patch.setattr(Grammars, "problem", lambda _self, _grammar: anyio.from_thread.run(goes_on.wait))
        try:
            with pytest.raises(RequestRejected, match="Simplify it"):
                await checker.grammar(request(**structured(regex="a")))
        finally:
            goes_on.set()
    assert (await checker.grammar(request(**structured(regex="a"))))[0]  # the machine was busy, and is not any more


PRIMES = {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (9973, 9967, 9949, 9941)]}


async def test_what_never_ends_or_ends_the_process_is_refused_and_the_next_is_judged(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled here, the first goes on for minutes; what takes all memory is judged no more, and ends the process."""
    monkeypatch.setattr("pdmesh_gateway.answer_grammars.COMPILE_LIMIT_S", 1.0)
    judge = GrammarProcess(directory, vocab_size=512, eos_token_ids=(258, 256))
    checker = GrammarChecker(judge)
    try:
        with pytest.raises(RequestRejected, match=r"longer|too much"):
            await checker.grammar(request(**json_schema(PRIMES)))
        assert "integer" in (await checker.grammar(request(**json_schema({"type": "integer"}))))[0]
        with pytest.raises(RequestRejected, match="cannot be enforced"):
            await checker.grammar(request(**structured(regex="(a")))
        with pytest.raises(RequestRejected, match="longer"):
            await checker.grammar(request(**structured(grammar="root ::= " + "\n" * 100_000 + '"a"')))
        with pytest.raises(RequestRejected, match="is not a valid grammar: unknown escape"):
            await checker.grammar(request(**structured(grammar='root ::= "\\q"')))
        assert "start" in (await checker.grammar(request(**structured(grammar='root ::= "a"'))))[0]
        paths = {"properties": {"x" * 30_000: {"allOf": [{"const": 2**53 + 1}] * 800}}}
        with pytest.raises(RequestRejected, match="Simplify it"):  # else every path would be kept
            await checker.grammar(request(**json_schema(paths)))
        long = {"properties": {"x" * 9000: {"const": 2**53 + 1}}}
        _, warnings = await checker.grammar(request(**json_schema(long)))
        assert [len(each) < 400 for each in warnings] == [True]
        huge = {"type": "array", "items": {"type": "string"}, "minItems": 10**9}
        problem = await checker.problem(LLMatcher.grammar_from_json_schema(json.dumps(huge)))
        assert problem is not None
        assert (await checker.grammar(request(**structured(regex="a"))))[0]
    finally:
        judge.close()


@pytest.mark.parametrize("schema", [{"minimum": 10**400}, {"maximum": -(10**400)}])
async def test_numbers_beyond_all_that_are_read_are_a_400(grammars: Grammars, schema: dict[str, Any]) -> None:
    with pytest.raises(RequestRejected, match="cannot be enforced"):
        await GrammarChecker(InProcessJudge(grammars)).grammar(request(**strict({"type": "integer", **schema})))


async def test_a_schema_that_nothing_fits_is_a_400(grammars: Grammars) -> None:
    with pytest.raises(RequestRejected, match="cannot be enforced"):
        await GrammarChecker(InProcessJudge(grammars)).grammar(request(**json_schema(False)))


def test_without_a_tokenizer_a_grammar_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Grammars(tmp_path, vocab_size=10, eos_token_ids=()).problem("{}")


def nested(depth: int) -> str:
    return "(" * depth + "a" + "{1,50}){1,50}" * depth


HOSTILE: list[dict[str, Any]] = [
    json_schema({"type": "string", "maxLength": 10**9}),
    json_schema({"type": "array", "minItems": 10**6}),
    json_schema({"properties": {f"p{i}": {"type": "string"} for i in range(1000)}}),
    json_schema({"anyOf": [{"const": f"v{i}", "type": "string"} for i in range(800)]}),
    json_schema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    json_schema({"$ref": "http://127.0.0.1:1/schema.json"}),
    json_schema({"type": "integer", "minimum": 5, "maximum": 4}),
    json_schema({"type": "string", "pattern": "(?=a)b"}),
    json_schema({"type": "number", "multipleOf": 1e-300}),
    structured(regex="(a?){2000}a{2000}"),
    structured(regex=nested(4)),
    structured(regex="|".join(f"w{i}" for i in range(5000))),
    structured(grammar="start: start start | " + " | ".join(f'"{i}"' for i in range(500))),
    structured(grammar="start: " + "(" * 500 + '"a"' + ")" * 500),
    structured(grammar="\x00"),
    structured(choice=["a" * 4000] * 60),
    structured(structural_tag={"structures": [{"begin": "a", "schema": {}, "end": ""}] * 200, "triggers": ["a"]}),
]


@pytest.mark.parametrize("fields", HOSTILE, ids=[str(index) for index in range(len(HOSTILE))])
async def test_hostile_grammars_are_obeyed_or_refused(grammars: Grammars, fields: dict[str, Any]) -> None:
    checker, status = GrammarChecker(InProcessJudge(grammars)), 400
    try:
        status = 200 if not grammars.matcher((await checker.grammar(request(**fields)))[0]).is_error() else 500
    except RequestRejected as refused:
        status = refused.status
    assert status in (200, 400)


@pytest.mark.parametrize("begin", ['"', "/"])
@pytest.mark.parametrize("end", ["", "\\"])
def test_an_unclosed_part_of_a_lark_grammar_takes_no_quadratic_time(grammars: Grammars, begin: str, end: str) -> None:
    start_s = time.process_time()
    grammar = f"start: <x> {begin}" + f"\\{begin}" * 50_000 + end
    assert grammars.problem(LLMatcher.grammar_from_lark(grammar)) is not None
    assert time.process_time() - start_s < 2.0
