"""gpt-oss's answers: messages of channels, read as reasoning, text and calls however they are cut."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from pdmesh.grammars import Grammars, schema_problem
from pdmesh_gateway.answer_format import AnswerFormat, Calls, find_format
from pdmesh_gateway.choices import Delta
from pdmesh_gateway.items import ChoiceItems, ItemKind, WholeAnswer, collect
from pdmesh_gateway.model_tokenizer import ModelTokenizer
from pdmesh_gateway.reasoning import ReasoningStart
from pdmesh_gateway.schemas import arguments_schema, obeyed
from pdmesh_gateway.tools.format import CallableTool
from pdmesh_gateway.tools.harmony_calls import ANALYSIS, Harmony
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.tokenizers import add_special_tokens


def held_to(parameters: dict[str, Any]) -> Any:
    return obeyed(arguments_schema(parameters), schema_problem).schema


WEATHER = held_to({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})
CALLS = Calls(tools=(CallableTool(name="get_weather", schema=WEATHER),), required=False, most=1)
THOUGHT = "<|channel|>analysis<|message|>so {it} is<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "a}"}'

#: An answer; its reasoning, its text, and the arguments of its calls.
RECORDED: list[tuple[str, str, str, list[dict[str, str]]]] = [
    (f"{THOUGHT}<|channel|>final<|message|>Yes.", "so {it} is", "Yes.", []),
    ("<|channel|>final<|message|>Yes.<|return|>", "", "Yes.", []),
    (f"{THOUGHT}{CALL}<|call|>", "so {it} is", "", [{"city": "a}"}]),
    (f"{THOUGHT} to=functions.get_weather<|channel|>commentary json<|message|>{{}}", "so {it} is", "", [{}]),
    (
        f"{THOUGHT}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}",
        "so {it} is",
        "I look.",
        [{"city": "a}"}],
    ),
    ("<|channel|>commentary to=functions.other<|message|>{}<|call|>", "", "{}", []),
    (f"{THOUGHT}<|channel|>analysis<|message|> and so<|end|>", "so {it} is and so", "", []),
    ("to be, < or not", "", "to be, < or not", []),
]


def format_of(textless_ids: dict[str, int] | None = None) -> AnswerFormat:
    channels = Harmony()
    return AnswerFormat(
        tools=channels, channels=channels, reasons=True, reasoning=ANALYSIS, textless_ids=textless_ids or {}
    )


def read(
    pieces: list[str], begins: ReasoningStart = ReasoningStart.POSSIBLE, calls: Calls | None = CALLS
) -> WholeAnswer:
    answer = ChoiceItems(lambda writer: format_of().parser(writer, begins, calls))
    events = [event for piece in pieces for event in answer.advance(Delta(index=0, text=piece))]
    return collect([*events, *answer.advance(Delta(index=0, finish_reason="stop"))])


def shown(answer: WholeAnswer) -> tuple[str, str, list[Any]]:
    arguments = [json.loads(call.text) for call in answer.calls]
    return answer.text_of(ItemKind.REASONING), answer.text_of(ItemKind.TEXT), arguments


@pytest.mark.parametrize(("text", "reasoning", "content", "arguments"), RECORDED)
def test_an_answer_reads_the_same_however_it_is_cut(
    text: str, reasoning: str, content: str, arguments: list[Any]
) -> None:
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        assert shown(read(pieces)) == (reasoning, content, arguments)


def test_what_is_no_tool_of_the_request_is_text() -> None:
    assert shown(read([f"{THOUGHT}{CALL}"], calls=None)) == ("so {it} is", '{"city": "a}"}', [])


def test_an_answer_that_begins_within_its_reasoning_goes_on() -> None:
    text = "so<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    assert shown(read([text], ReasoningStart.BEGUN)) == ("so", "Yes.", [])
    assert ANALYSIS.begins_after("<|start|>assistant") is ReasoningStart.POSSIBLE
    assert ANALYSIS.begins_after("<|start|>assistant<|channel|>analysis<|message|>") is ReasoningStart.BEGUN


@pytest.mark.parametrize("num_texts", [500, pytest.param(50_000, marks=pytest.mark.slow)])
def test_no_text_is_an_error(num_texts: int) -> None:
    rng = random.Random(num_texts)
    made_of = [*Harmony.markers * 3, "assistant", "analysis", "final", " to=functions.get_weather", "{", "}", '"', "a"]
    for _ in range(num_texts):
        pieces = [piece[: rng.choice([99, 99, 99, 4])] for piece in rng.choices(made_of, k=rng.randrange(1, 20))]
        assert read(pieces) == read(["".join(pieces)]), pieces


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that has the markers as special tokens."""
    directory = write_checkpoint(tmp_path_factory.mktemp("model"), vocab_size=512, template="{{ tools }}")
    add_special_tokens(directory, *Harmony.markers)
    return directory


def test_a_checkpoint_with_channels_is_found(directory: Path) -> None:
    found = find_format(ModelTokenizer.load(directory), "")
    assert found.channels is not None
    assert (found.tools, found.reasoning, found.max_calls) == (found.channels, ANALYSIS, 1)
    assert found.limits_reasoning
    for calls in (None, CALLS):  # headers are needed to read an answer
        assert found.shown_ids(ReasoningStart.POSSIBLE, calls) == {found.textless_ids[text] for text in Harmony.markers}


def test_grammars_let_through_what_reads_as_it_should(directory: Path) -> None:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    grammars = Grammars(directory, vocab_size=tokenizer.get_vocab_size(), eos_token_ids=(258, 256))
    answer_format = find_format(ModelTokenizer.load(directory), "")

    def allows(grammar: str, text: str) -> bool:
        assert grammars.problem(grammar) is None
        matcher = grammars.matcher(grammar)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    final = "<|channel|>final<|message|>"
    free = answer_format.grammar(ReasoningStart.POSSIBLE, CALLS, "")
    required = answer_format.grammar(
        ReasoningStart.POSSIBLE, Calls(tools=CALLS.tools, required=True, most=1), '{"grammars": [{"json_schema": {}}]}'
    )
    for answer in (CALL, THOUGHT + CALL):
        assert allows(free, answer)
        assert allows(required, answer)
        assert not allows(required, answer.replace("city", "town"))
    assert allows(free, f"{THOUGHT}{final}No {{.")
    assert not allows(required, f"{THOUGHT}{final}No.")
    assert not allows(free, "No.")
    given = answer_format.grammar(
        ReasoningStart.POSSIBLE, None, '{"grammars": [{"json_schema": {"const": 7}}]}', max_reasoning_tokens=64
    )
    assert allows(given, f"{THOUGHT}{final}7")
    assert allows(given, f"{final}7")
    assert not allows(given, f"{final}8")
    assert not allows(given, "7")
