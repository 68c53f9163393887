"""Numbers and white space of JSON end, whatever a model would rather write; texts are left alone."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from pdmesh.engine.grammar_state import GrammarState
from pdmesh.engine.json_bounds import MAX_BLANKS, JsonBounds
from pdmesh.grammars import Grammars, is_json
from pdmesh_testing.checkpoints import write_checkpoint

EOS = (258, 256)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def grammars(directory: Path) -> Grammars:
    return Grammars(directory, vocab_size=320, eos_token_ids=EOS)


@pytest.fixture(scope="module")
def bounds(grammars: Grammars) -> JsonBounds:
    return JsonBounds(grammars.token_bytes())


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def of_schema(schema: Any, **options: Any) -> str:
    overrides: Any = {"whitespace_flexible": False, **options}
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=overrides)


def stubborn(
    grammars: Grammars, bounds: JsonBounds, tokenizer: Tokenizer, grammar: str, wanted: str, begin: str = ""
) -> str:
    """The answer of a model that writes ``begin``, then the first of the ``wanted`` characters that may follow."""
    guide = GrammarState(grammars.matcher(grammar), EOS, bounds if is_json(grammar) else None)
    ids = [tokenizer.encode(char, add_special_tokens=False).ids[0] for char in wanted]
    output = tokenizer.encode(begin, add_special_tokens=False).ids if begin else []
    guide.take(list(output))
    while not guide.is_complete and len(output) < 200:
        bits = guide.allowed(320, EOS)
        assert bits is not None, guide.error
        allowed = np.flatnonzero(np.unpackbits(bits, count=320, bitorder="little")).tolist()
        token_id = next((each for each in ids if each in allowed), allowed[0])
        if token_id in EOS:
            break
        output.append(token_id)
        guide.take([token_id])
    return tokenizer.decode(output)


OBJECT = {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"], "additionalProperties": False}


def of(kind: dict[str, Any]) -> str:
    return of_schema({**OBJECT, "properties": {"a": kind}})


@pytest.mark.parametrize(
    ("kind", "wanted", "expected"),
    [
        ({"type": "integer"}, "1}", "1" * 16),
        ({"type": "integer", "minimum": 0}, "1}", "1" * 16),
        ({"type": "integer", "maximum": 0}, "-1}", "-" + "1" * 16),
        ({"type": "integer", "minimum": 10**17}, "1}", "1" * 18),
        ({"type": "integer", "multipleOf": 5}, "5}", "5" * 16),
        ({"type": "number"}, "1}", "1" * 16),
        ({"type": "number", "minimum": 0}, "1}", "1" * 16),
        ({"type": ["integer", "null"]}, "1}", "1" * 16),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "1}", "1" * 16),
        ({}, "1}", "1" * 16),
        ({"const": 12345678901234568}, "1}", "12345678901234568"),
        ({"enum": [10**17, 10**17 + 1]}, "10}", str(10**17)),
    ],
)
def test_a_number_ends_where_a_double_ends(
    grammars: Grammars, bounds: JsonBounds, tokenizer: Tokenizer, kind: dict[str, Any], wanted: str, expected: str
) -> None:
    assert stubborn(grammars, bounds, tokenizer, of(kind), wanted) == f'{{"a":{expected}}}'


@pytest.mark.parametrize(
    ("begin", "expected"),
    [('{"a":0.', "0." + "1" * 16), ('{"a":1e', "1e111"), ('{"a":1.5E-', "1.5E-111"), ('{"a":-12', "-12" + "1" * 14)],
)
def test_fractions_and_exponents_end(
    grammars: Grammars, bounds: JsonBounds, tokenizer: Tokenizer, begin: str, expected: str
) -> None:
    assert stubborn(grammars, bounds, tokenizer, of({"type": "number"}), "1}", begin) == f'{{"a":{expected}}}'


@pytest.mark.parametrize(
    "kind",
    [
        {"type": "string", "maxLength": 40},
        {"type": "string", "pattern": "^[0-9]{40}$"},
        {"type": "string", "pattern": "^[0-9]+$", "maxLength": 40},
    ],
)
def test_digits_of_texts_are_left_alone(
    grammars: Grammars, bounds: JsonBounds, tokenizer: Tokenizer, kind: dict[str, Any]
) -> None:
    assert stubborn(grammars, bounds, tokenizer, of(kind), '1"}', '{"a":"') == '{"a":"' + "1" * 40 + '"}'


def test_a_regular_expression_has_as_many_digits_as_it_says(
    grammars: Grammars, bounds: JsonBounds, tokenizer: Tokenizer
) -> None:
    assert stubborn(grammars, bounds, tokenizer, LLMatcher.grammar_from_regex("[0-9]{1,40}"), "1") == "1" * 40


@pytest.mark.parametrize("options", [{"whitespace_flexible": True}, {"whitespace_pattern": r"[ \n]*"}])
def test_white_space_ends(
    grammars: Grammars, bounds: JsonBounds, tokenizer: Tokenizer, options: dict[str, Any]
) -> None:
    grammar = of_schema({**OBJECT, "properties": {"a": {"type": "boolean"}}}, **options)
    blanks = " " * MAX_BLANKS
    answer = stubborn(grammars, bounds, tokenizer, grammar, " t}", "{")
    assert answer == f'{{{blanks}"a"{blanks}:{blanks}true{blanks}}}'


def test_blanks_of_texts_are_left_alone(grammars: Grammars, bounds: JsonBounds, tokenizer: Tokenizer) -> None:
    grammar = of({"type": "string", "maxLength": 40})
    assert stubborn(grammars, bounds, tokenizer, grammar, ' "}', '{"a":"') == '{"a":"' + " " * 40 + '"}'


@pytest.mark.parametrize("end", [b"1", b" "])
def test_a_bound_takes_no_time_for_long_runs_before_it(end: bytes) -> None:
    bounds = JsonBounds([b"1", b" ", b" " * 128, b"1" * 128, b"}"])
    output = [2, 3] * 16 + [2] * 31 + [[b"1", b" "].index(end)]
    start_s = time.process_time()
    bounds.apply(np.full(1, 31, np.uint8), output, may_end=False)
    assert time.process_time() - start_s < 0.05


@pytest.mark.parametrize("digit", ["1", "a"])
def test_bounds_do_not_depend_on_the_names_that_a_process_gives_special_tokens(
    directory: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, digit: str
) -> None:
    monkeypatch.setattr("pdmesh.grammars.secrets.token_hex", lambda num_bytes: digit * 2 * num_bytes)
    grammars = Grammars(directory, vocab_size=320, eos_token_ids=EOS)
    guide = GrammarState(grammars.matcher(of_schema({"type": "integer"})), EOS, JsonBounds(grammars.token_bytes()))
    guide.take(tokenizer.encode("1" * 16, add_special_tokens=False).ids)
    bits = guide.allowed(320, EOS)
    assert bits is not None
    assert set(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()) == set(EOS)
