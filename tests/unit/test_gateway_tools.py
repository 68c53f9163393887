"""Formats of tool calls: what their grammars let through reads as the same calls, however it is cut."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken, Tokenizer

from pdmesh.errors import ConfigError
from pdmesh.grammars import Grammars, schema_problem
from pdmesh_gateway.answer_format import FORMATS, AnswerFormat, Calls, find_format
from pdmesh_gateway.choices import Delta
from pdmesh_gateway.items import ChoiceItems, ItemKind, ItemWriter, TextAdded, WholeAnswer, collect
from pdmesh_gateway.model_tokenizer import ModelTokenizer
from pdmesh_gateway.reasoning import ReasoningStart
from pdmesh_gateway.schemas import arguments_schema, obeyed
from pdmesh_gateway.tools.format import CallableTool
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.tokenizers import add_special_tokens


def held_to(parameters: dict[str, Any]) -> Any:
    return obeyed(arguments_schema(parameters), schema_problem).schema


WEATHER = held_to(
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"enum": ["c", "f"]},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["city", "days"],
    }
)
TOOLS = (
    CallableTool(name="get_weather", schema=WEATHER),
    CallableTool(name="stop", schema=held_to({"type": "object", "properties": {}})),
)
PARIS = {"city": 'Par"is}\\ü]', "days": 3}

#: A format; an answer as its models write it; its text, and its calls.
RECORDED: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>', "", [("get_weather", PARIS)]),
    (
        "hermes",
        'I look.\n<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>\n'
        '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
        "I look.\n",
        [("get_weather", PARIS), ("stop", {})],
    ),
    ("hermes", "No <tool_call tool< at all.", "No <tool_call tool< at all.", []),
    ("hermes", "A <tool_call> is a tag.", "A <tool_call> is a tag.", []),
    ("llama", '{"name": "get_weather", "parameters": %s}', "", [("get_weather", PARIS)]),
    (
        "llama",
        '<|python_tag|>{"name": "get_weather", "parameters": %s}; {"name": "stop", "parameters": {}}',
        "",
        [("get_weather", PARIS), ("stop", {})],
    ),
    ("llama", 'Use {"name": "x"} then.', 'Use {"name": "x"} then.', []),
    ("mistral_list", '[TOOL_CALLS][{"name": "get_weather", "arguments": %s}]', "", [("get_weather", PARIS)]),
    (
        "mistral_list",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": %s, "id": "abcdefghi"}, {"name": "stop", "arguments": {}}]',
        "",
        [("get_weather", PARIS), ("stop", {})],
    ),
    ("mistral", "Well. [TOOL_CALLS]get_weather[ARGS]%s", "Well. ", [("get_weather", PARIS)]),
    (
        "mistral",
        "[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]%s[TOOL_CALLS]stop[ARGS]{}",
        "",
        [("get_weather", PARIS), ("stop", {})],
    ),
    (
        "qwen_coder",
        'So:\n<tool_call>\n<function=get_weather>\n<parameter=city>\nPar"is}\\ü]\n</parameter>\n<parameter=days>\n3\n'
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=stop>\n</function>\n</tool_call>",
        "So:\n",
        [("get_weather", PARIS), ("stop", {})],
    ),
    (
        "qwen_coder",
        "<function=get_weather>\n<parameter=city>\nnull\n\n</parameter>\n<parameter=days>\n3</parameter>"
        "<parameter=note>null</parameter></function>",
        "",
        [("get_weather", {"city": "null\n", "days": 3, "note": None})],
    ),
]
RECORDED = [
    (name, text.replace("%s", json.dumps(PARIS, ensure_ascii=False)), shown, calls)
    for name, text, shown, calls in RECORDED
]


class Recorder(ItemWriter):
    """Keeps all that was drawn, in order, whatever it became."""

    def __init__(self) -> None:
        super().__init__("seed")
        self.drawn = ""

    def text(self, piece: str) -> None:
        self.drawn += piece
        super().text(piece)

    def reasoning(self, piece: str) -> None:
        self.drawn += piece
        super().reasoning(piece)

    def arguments(self, piece: str, drawn: str | None = None) -> None:
        self.drawn += piece if drawn is None else drawn
        super().arguments(piece, drawn)

    def marker(self, drawn: str) -> None:
        self.drawn += drawn
        super().marker(drawn)


def format_of(name: str, *, reasons: bool = False, textless_ids: dict[str, int] | None = None) -> AnswerFormat:
    return AnswerFormat(tools=FORMATS[name], reasons=reasons, textless_ids=textless_ids or {})


def calls(*, required: bool = False, most: int = 16, tools: Sequence[CallableTool] = TOOLS) -> Calls:
    return Calls(tools=tuple(tools), required=required, most=most)


def read(
    name: str,
    pieces: Sequence[str],
    begins: ReasoningStart = ReasoningStart.NONE,
    finish: str = "stop",
    tools: Sequence[CallableTool] = TOOLS,
) -> WholeAnswer:
    """What an answer in these pieces is; nothing of it may be lost."""
    writer = Recorder()
    answer = ChoiceItems(lambda writer: format_of(name).parser(writer, begins, calls(tools=tools)), writer)
    events = [event for piece in pieces for event in answer.advance(Delta(index=0, text=piece))]
    events += answer.advance(Delta(index=0, finish_reason=finish))
    assert writer.drawn == (text := "".join(pieces))
    assert writer.num_chars == len(text)
    assert all(text.startswith(event.text, event.start) for event in events if isinstance(event, TextAdded))
    return collect(events)


def shown(answer: WholeAnswer) -> tuple[str, list[tuple[str, Any]]]:
    return answer.text_of(ItemKind.TEXT), [(call.name, json.loads(call.text)) for call in answer.calls]


@pytest.mark.parametrize(("name", "text", "content", "expected"), RECORDED)
def test_an_answer_reads_the_same_however_it_is_cut(name: str, text: str, content: str, expected: Any) -> None:
    assert shown(read(name, [text])) == (content, expected)
    assert shown(read(name, list(text))) == (content, expected)
    for at in range(len(text)):
        assert shown(read(name, [text[:at], text[at:]])) == (content, expected), text[:at]


def pieces_of_calls() -> list[str]:
    """What calls are made of, to be put together at random."""
    whole = [text for _, text, _, _ in RECORDED]
    marks = ["<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", "[TOOL_CALLS]"]
    marks += [
        "[ARGS]",
        "[CALL_ID]",
        "<|python_tag|>",
        "<think>",
        "</think>",
        '{"name": "',
        '", "arguments": {',
        "}",
        "{",
    ]
    marks += ["]", "[", '"', "\\", "\n", " ", "null", "f", "ü", ">", ";", ",", ": ", '"parameters": {', '"id": "']
    return whole + marks * 3


def fuzzed(rng: random.Random, num_texts: int) -> Iterator[list[str]]:
    made_of = pieces_of_calls()
    for _ in range(num_texts):
        text = "".join(
            piece if rng.random() < 0.7 else piece[rng.randrange(len(piece)) :][: rng.randrange(1, 12)]
            for piece in rng.choices(made_of, k=rng.randrange(1, 12))
        )
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(4)))
        yield [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("num_texts", [1_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_no_text_is_lost_and_none_is_an_error(num_texts: int) -> None:
    rng = random.Random(num_texts)
    for number, pieces in enumerate(fuzzed(rng, num_texts)):
        name = list(FORMATS)[number % len(FORMATS)]
        begins = list(ReasoningStart)[number % len(ReasoningStart)]
        in_pieces, whole = read(name, pieces, begins), read(name, ["".join(pieces)], begins)
        assert in_pieces == whole, pieces
        for call in whole.calls[:-1]:  # the last one may be cut
            assert call.id


@pytest.fixture(scope="module")
def tokenized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Grammars, Tokenizer, dict[str, int]]:
    """A tokenizer that has some markers as special tokens, others as added ones, and the rest as text."""
    directory = write_checkpoint(tmp_path_factory.mktemp("model"), vocab_size=512)
    special = ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]
    tokenizer = add_special_tokens(directory, *special)
    tokenizer.add_tokens([AddedToken("</think>", special=False, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = {text: tokenizer.get_vocab()[text] for text in [*special, "</think>"]}
    return Grammars(directory, vocab_size=tokenizer.get_vocab_size(), eos_token_ids=(258, 256)), tokenizer, ids


def allows(tokenized: Any, grammar: str, text: str) -> tuple[bool, bool]:
    """Whether a grammar allows all of a text, and whether it may end with it."""
    grammars, tokenizer, _ = tokenized
    assert grammars.problem(grammar) is None
    matcher = grammars.matcher(grammar)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids), matcher.is_accepting()


CALLS_AS_DRAWN = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "a", "days": 3}}\n</tool_call>',
    "llama": '<|python_tag|>{"name": "get_weather", "parameters": {"city": "a", "days": 3}}',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "a", "days": 3}',
    "mistral_list": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "a", "days": 3}}]',
    "qwen_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\na\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("with_special", [True, False])
@pytest.mark.parametrize("name", list(FORMATS))
def test_grammars_let_through_what_reads_as_a_call(tokenized: Any, name: str, with_special: bool) -> None:
    textless_ids = tokenized[2] if with_special else {}
    if not with_special and name in ("mistral", "mistral_list", "llama"):
        pytest.skip("its markers are special tokens")
    answer_format = format_of(name, textless_ids=textless_ids)
    text = CALLS_AS_DRAWN[name]
    assert shown(read(name, [text])) == ("", [("get_weather", {"city": "a", "days": 3})])
    required = answer_format.grammar(ReasoningStart.NONE, calls(required=True), "")
    free = answer_format.grammar(ReasoningStart.NONE, calls(), "")
    assert allows(tokenized, required, text) == allows(tokenized, free, text) == (True, True)
    assert allows(tokenized, free, "It is {warm} \n\n today.") == (True, True)
    assert not allows(tokenized, required, "It")[0]
    for wrong in (text.replace("days", "dayz"), text.replace("get_weather", "get_whether"), text.replace("3", "x")):
        assert not allows(tokenized, required, wrong)[0]
        assert not allows(tokenized, free, wrong)[0]
    one = answer_format.grammar(ReasoningStart.NONE, calls(required=True, most=1), "")
    assert allows(tokenized, one, text)[0]
    between = {"llama": "; ", "mistral": "", "mistral_list": ""}.get(name, "\n")
    again = between + text.removeprefix("<|python_tag|>")
    assert not allows(tokenized, one, text + again)[0]
    if name != "mistral_list":
        assert allows(tokenized, required, text + again * 15) == (True, True)
        assert not allows(tokenized, required, text + again * 16)[0]
        if name != "llama":
            assert not allows(tokenized, free, text + again * 16)[0]


BOUNDED = held_to(
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"enum": ["c", "f"]},
            "note": {"anyOf": [{"type": "string", "minLength": 1, "maxLength": 4}, {"type": "null"}]},
            "code": {"type": "string", "pattern": "^[a-z]{2}/[0-9]$"},
            "places": {"type": "array", "items": {"$ref": "#/$defs/place"}, "maxItems": 2},
        },
        "required": ["city", "days"],
        "$defs": {"place": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}},
    }
)


def fits(arguments: dict[str, Any]) -> bool:
    """Whether arguments fit `BOUNDED`."""
    checks = {
        "city": lambda value: isinstance(value, str) and len(value) <= 6,
        "days": lambda value: value in range(1, 10),
        "unit": lambda value: value in ("c", "f"),
        "note": lambda value: value is None or (isinstance(value, str) and 1 <= len(value) <= 4),
        "code": lambda value: re.fullmatch("[a-z]{2}/[0-9]", value) is not None,
        "places": lambda value: len(value) <= 2 and all(place in ({"x": True}, {"x": False}) for place in value),
    }
    return {"city", "days"} <= arguments.keys() and all(checks[key](value) for key, value in arguments.items())


def drawn(tokenized: Any, grammar: str, begin: str, rng: random.Random, most: int = 600) -> tuple[str, bool]:
    """A text whose tokens after ``begin`` are drawn evenly from all that may follow; whether it came to its end."""
    grammars, tokenizer, _ = tokenized
    token_ids = tokenizer.encode(begin, add_special_tokens=False).ids
    matcher = grammars.matcher(grammar)
    assert matcher.try_consume_tokens(token_ids) == len(token_ids)
    while len(token_ids) < most and not matcher.is_stopped() and not (matcher.is_accepting() and rng.random() < 0.3):
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        token_id = int(rng.choice(allowed[(allowed != 256) & (allowed != 258)]))
        assert matcher.consume_token(token_id)
        token_ids.append(token_id)
    return tokenizer.decode(token_ids, skip_special_tokens=False), matcher.is_accepting()


@pytest.mark.parametrize("num_texts", [4, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("name", list(FORMATS))
def test_whatever_is_drawn_is_calls_whose_arguments_fit(
    tokenized: Any, name: str, required: bool, num_texts: int
) -> None:
    """With random weights, so to speak. In free text a call is begun, and goes on at random."""
    tools = [CallableTool(name="get_weather", schema=BOUNDED), TOOLS[1]]
    grammar = format_of(name, textless_ids=tokenized[2]).grammar(
        ReasoningStart.NONE, calls(required=required, tools=tools, most=3), ""
    )
    begin = "" if required else CALLS_AS_DRAWN[name].partition("get_weather")[0]
    rng = random.Random(num_texts)
    num_whole = 0
    for _ in range(num_texts):
        text, is_whole = drawn(tokenized, grammar, begin, rng)
        _, called = shown(read(name, [text], tools=tools)) if is_whole else ("", [])
        assert not is_whole or 1 <= len(called) <= 3, text
        num_whole += is_whole
        for called_name, arguments in called:
            assert fits(arguments) if called_name == "get_weather" else arguments == {}, text
    assert num_whole > num_texts / 2


def test_a_grammar_begins_after_the_reasoning(tokenized: Any) -> None:
    given = '{"grammars": [{"json_schema": {"const": 7}}]}'
    answer_format = format_of("hermes", reasons=True, textless_ids=tokenized[2])
    begun = answer_format.grammar(ReasoningStart.BEGUN, None, given)
    assert allows(tokenized, begun, "so {it is}\n</think>\n\n7") == (True, True)
    assert allows(tokenized, begun, "so") == (True, False)
    assert not allows(tokenized, begun, "so</think>8")[0]
    possible = answer_format.grammar(ReasoningStart.POSSIBLE, None, given)
    assert allows(tokenized, possible, "<think>\nso</think>7") == allows(tokenized, possible, "7") == (True, True)
    assert not allows(tokenized, possible, "so")[0]
    text = CALLS_AS_DRAWN["hermes"]
    with_calls = answer_format.grammar(ReasoningStart.POSSIBLE, calls(), "")
    for answer in (text, "<think>Is <tool_call> due?</think>\n\n" + text, "<think>so</think>No.", "No."):
        assert allows(tokenized, with_calls, answer) == (True, True), answer
    either = answer_format.grammar(ReasoningStart.NONE, calls(), given)
    assert allows(tokenized, either, text) == allows(tokenized, either, "7") == (True, True)
    assert not allows(tokenized, either, "No.")[0]


@pytest.mark.parametrize(
    ("begins", "text", "reasoning", "content"),
    [
        (ReasoningStart.BEGUN, "so\n</think>\n\nYes.", "so\n", "Yes."),
        (ReasoningStart.BEGUN, "<think>\nso</think>", "so", ""),
        (ReasoningStart.BEGUN, "so it", "so it", ""),
        (ReasoningStart.POSSIBLE, "\n<think>so</think>Yes </think>.", "so", "Yes </think>."),
        (ReasoningStart.POSSIBLE, " <thin air", "", " <thin air"),
        (ReasoningStart.NONE, "<think>so</think>", "", "<think>so</think>"),
    ],
)
def test_reasoning_comes_before_the_answer(begins: ReasoningStart, text: str, reasoning: str, content: str) -> None:
    for at in range(len(text)):
        answer = read("hermes", [text[:at], text[at:]], begins)
        assert (answer.text_of(ItemKind.REASONING), answer.text_of(ItemKind.TEXT)) == (reasoning, content)


def test_reasoning_tokens_are_counted_up_to_the_end_of_the_marker() -> None:
    text, answer = (
        "so it is</think>Yes, it is",
        ChoiceItems(lambda w: format_of("hermes").parser(w, ReasoningStart.BEGUN, None)),
    )
    for at, char in enumerate(text):
        answer.advance(Delta(index=0, text=char, token_ids=[1], text_offsets=[at]))
    assert answer.num_reasoning_tokens == len("so it is</think>")


#: Part of a template, special tokens, and what is found.
FOUND: list[tuple[str, list[str], str | None]] = [
    ("{{ tools }}<tool_call>", [], "hermes"),
    ("{{ tools }}<tool_call><function=", [], "qwen_coder"),
    ("[TOOL_CALLS]{{ tools }}", ["[TOOL_CALLS]"], "mistral_list"),
    ("[TOOL_CALLS]{{ tools }}", ["[TOOL_CALLS]", "[ARGS]"], "mistral"),
    ("{{ tools }}", ["<|python_tag|>"], "llama"),
    ("{{ tools }}", [], "hermes"),
]


@pytest.mark.parametrize(("template", "tokens", "found"), FOUND)
def test_a_checkpoints_format_is_found_or_set(tmp_path: Path, template: str, tokens: list[str], found: str) -> None:
    directory = write_checkpoint(tmp_path / "model", template=template)
    add_special_tokens(directory, *tokens)
    loaded = ModelTokenizer.load(directory)
    answer_format = find_format(loaded, "")
    assert answer_format.tools.name == found
    assert answer_format.tells_tools is (template == "{{ tools }}" and not tokens)  # else nothing says how to call
    assert not answer_format.reasons
    chosen = find_format(loaded, "llama")
    assert (chosen.tools.name, chosen.tells_tools) == ("llama", False)
    with pytest.raises(ConfigError, match="tool_format"):
        find_format(loaded, "none")


@pytest.mark.parametrize("template", ["{{ messages }}", "{% if tools %}{{ raise_exception('no') }}{% endif %}"])
def test_a_template_that_knows_no_tools_is_found_out(tmp_path: Path, template: str) -> None:
    loaded = ModelTokenizer.load(write_checkpoint(tmp_path / "model", template=template + "</think>"))
    answer_format = find_format(loaded, "")
    assert (answer_format.tools.name, answer_format.tells_tools) == ("hermes", True)
    assert find_format(loaded, "mistral").tells_tools
    assert answer_format.reasons
    assert answer_format.reasoning_after("<think>\n") is ReasoningStart.BEGUN
    assert answer_format.reasoning_after("<think>\n\n</think>\n\n") is ReasoningStart.NONE
    assert answer_format.reasoning_after("assistant\n") is ReasoningStart.POSSIBLE


def test_mistrals_reasoning_has_markers_of_its_own(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", vocab_size=400)
    special = ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"]
    tokenizer = add_special_tokens(directory, *special)
    loaded = ModelTokenizer.load(directory)
    answer_format = find_format(loaded, "")
    assert answer_format.reasons
    assert answer_format.reasoning_after("[INST]Hi[/INST]") is ReasoningStart.POSSIBLE
    assert answer_format.reasoning_after("[INST]Hi[/INST][THINK]") is ReasoningStart.BEGUN
    text = "[THINK]They <think> of it.[/THINK]I look.[TOOL_CALLS]stop[ARGS]{}"
    for pieces in ([text], list(text)):
        answer = ChoiceItems(lambda writer: answer_format.parser(writer, ReasoningStart.POSSIBLE, calls()))
        events = [event for piece in pieces for event in answer.advance(Delta(index=0, text=piece))]
        whole = collect([*events, *answer.advance(Delta(index=0, finish_reason="stop"))])
        assert whole.text_of(ItemKind.REASONING) == "They <think> of it."
        assert shown(whole) == ("I look.", [("stop", {})])
    grammars = Grammars(directory, vocab_size=tokenizer.get_vocab_size(), eos_token_ids=(258, 256))
    held: Any = (grammars, tokenizer, {})
    grammar = answer_format.grammar(ReasoningStart.POSSIBLE, calls(required=True), "")
    assert allows(held, grammar, text.replace("I look.", "")) == (True, True)
    assert not allows(held, grammar, text)[0]
    shown_ids = answer_format.shown_ids(ReasoningStart.POSSIBLE, calls())
    assert shown_ids == {loaded.textless_ids[token] for token in special}


@pytest.mark.parametrize("begins", [ReasoningStart.BEGUN, ReasoningStart.POSSIBLE])
@pytest.mark.parametrize("given", ["", LLMatcher.grammar_from_regex("[0-9]+")])
@pytest.mark.parametrize("with_calls", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 3])
def test_reasoning_ends_after_as_many_tokens_as_it_may_have(
    tmp_path: Path, begins: ReasoningStart, given: str, with_calls: bool, num_tokens: int
) -> None:
    directory = write_checkpoint(tmp_path / "model", vocab_size=400, template="{{ tools }}<tool_call>")
    tokenizer = add_special_tokens(directory, "<think>", "</think>")
    answer_format = find_format(ModelTokenizer.load(directory), "")
    assert answer_format.limits_reasoning
    grammars = Grammars(directory, vocab_size=tokenizer.get_vocab_size(), eos_token_ids=(258, 256))
    grammar = answer_format.grammar(begins, calls() if with_calls else None, given, num_tokens)
    assert grammars.problem(grammar) is None
    opening, close = tokenizer.token_to_id("<think>"), tokenizer.token_to_id("</think>")
    assert opening is not None
    assert close is not None
    matcher = grammars.matcher(grammar)
    if begins is ReasoningStart.POSSIBLE:
        assert matcher.consume_token(opening)
    for token_id in range(70, 70 + num_tokens):
        assert matcher.consume_token(token_id)
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    assert bits.nonzero()[0].tolist() == [close]
    assert matcher.consume_token(close)
    assert matcher.consume_tokens(tokenizer.encode("12").ids)
    assert matcher.is_accepting()
    if num_tokens:
        early = grammars.matcher(grammar)
        assert early.consume_tokens([*([opening] if begins is ReasoningStart.POSSIBLE else []), 70, close])
    assert answer_format.num_thought_tokens([70, opening, 71, opening, 72, 73]) == 2
    assert answer_format.num_thought_tokens([70, 71]) == 0


def test_reasoning_whose_end_is_no_token_is_not_limited() -> None:
    assert not format_of("hermes", reasons=True).limits_reasoning
    assert not format_of("hermes", textless_ids={"</think>": 5}).limits_reasoning
