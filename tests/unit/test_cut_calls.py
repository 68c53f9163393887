"""Answers that end within a call: no call looks whole that is not, and no markup looks like text."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from pdmesh_gateway.answer_format import FORMATS, AnswerFormat, Calls
from pdmesh_gateway.call_stops import CallStops
from pdmesh_gateway.choices import Delta
from pdmesh_gateway.items import (
    AnswerEnded,
    ChoiceItems,
    ItemKind,
    ItemParser,
    ItemWriter,
    WholeAnswer,
    collect,
    is_json_object,
)
from pdmesh_gateway.reasoning import ReasoningStart
from pdmesh_gateway.schemas import arguments_schema
from pdmesh_gateway.tools.format import CallableTool
from pdmesh_gateway.tools.harmony_calls import ANALYSIS, Harmony

SCHEMA = arguments_schema({"type": "object", "properties": {"q": {"type": "string"}, "n": {"type": "integer"}}})
CALLS = Calls(tools=(CallableTool(name="look", schema=SCHEMA),), required=False, most=16)
ARGUMENTS = {"q": "7\n\n} Observation: ```", "n": 7}
_JSON = json.dumps(ARGUMENTS)
_ONE = f'{{"name": "look", "arguments": {_JSON}}}'
_CODER = (
    f"<tool_call>\n<function=look>\n<parameter=q>\n{ARGUMENTS['q']}\n</parameter>\n<parameter=n>\n7\n</parameter>\n"
)

#: By format: text, and two calls behind it, as models write them.
ANSWERS = {
    "hermes": f"I look.\n<tool_call>\n{_ONE}\n</tool_call>\n<tool_call>\n{_ONE}\n</tool_call>",
    "mistral": f"I look.\n[TOOL_CALLS]look[ARGS]{_JSON}[TOOL_CALLS]look[ARGS]{_JSON}",
    "mistral_list": f"I look.\n[TOOL_CALLS][{_ONE}, {_ONE}]",
    "qwen_coder": f"I look.\n{_CODER}</function>\n</tool_call>\n{_CODER}</function>\n</tool_call>",
    "llama": f'{{"name": "look", "parameters": {_JSON}}}; {{"name": "look", "parameters": {_JSON}}}',
    "harmony": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.look "
    f"<|constrain|>json<|message|>{_JSON}<|call|>",
}
STOPS = [
    "}",
    '"n"',
    "7",
    "\n\n",
    "```",
    "Observation:",
    "{",
    '"',
    "</tool_call>",
    "<tool_call>",
    "look",
    "[TOOL_CALLS]",
]


def format_of(name: str) -> AnswerFormat:
    if name == "harmony":
        channels = Harmony()
        return AnswerFormat(tools=channels, channels=channels, reasons=True, reasoning=ANALYSIS, textless_ids={})
    return AnswerFormat(tools=FORMATS[name], textless_ids={})


def parsed(name: str, writer: ItemWriter) -> ItemParser:
    begins = ReasoningStart.POSSIBLE if name == "harmony" else ReasoningStart.NONE
    return format_of(name).parser(writer, begins, CALLS)


def answered(
    name: str, pieces: Sequence[str], finish: str, stop_reason: int | None = None, stops: Sequence[str] = ()
) -> WholeAnswer:
    """What clients are told of an answer in these pieces, each of which comes alone."""
    items = ChoiceItems(lambda writer: parsed(name, writer))
    finder = CallStops(stops, False, lambda writer: parsed(name, writer))
    events = []
    for piece in pieces:
        text, found = finder.push(piece)
        events += items.advance(Delta(index=0, text=text, finish_reason=found and "stop", stop_reason=found))
        if found is not None:
            return collect(events)
    text, found = finder.flush(is_cut=finish == "length" or stop_reason is not None)
    events += items.advance(
        Delta(index=0, text=text, finish_reason="stop" if found else finish, stop_reason=found or stop_reason)
    )
    assert isinstance(events[-1], AnswerEnded)
    return collect(events)


@pytest.mark.parametrize(("finish", "stop_reason"), [("length", None), ("stop", 5)], ids=["limit", "stop token"])
@pytest.mark.parametrize("name", ANSWERS)
def test_a_call_that_was_cut_never_looks_whole_nor_its_markup_like_text(
    name: str, finish: str, stop_reason: int | None
) -> None:
    whole = ANSWERS[name]
    text = answered(name, [whole], "stop").text_of(ItemKind.TEXT)
    assert len(answered(name, [whole], "stop").calls) == (1 if name == "harmony" else 2)
    for end in range(1, len(whole)):
        for pieces in ([whole[:end]], list(whole[:end])):
            answer = answered(name, pieces, finish, stop_reason)
            assert text.startswith(answer.text_of(ItemKind.TEXT)), whole[:end]
            last = answer.items[-1] if answer.items else None
            is_cut = last is not None and last.kind is ItemKind.CALL and not is_json_object(last.text)
            assert answer.finish_reason == ("length" if is_cut else finish), whole[:end]
            for call in answer.calls[:-1] if is_cut else answer.calls:
                assert json.loads(call.text) == ARGUMENTS


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("name", ANSWERS)
def test_stop_strings_do_not_act_within_calls(name: str, stop: str) -> None:
    whole = ANSWERS[name]
    for pieces in ([whole], list(whole), [whole[i : i + 7] for i in range(0, len(whole), 7)]):
        answer = answered(name, pieces, "stop", stops=[stop])
        if stop == "look" and "I look" in whole:
            assert (answer.text_of(ItemKind.TEXT), answer.calls, answer.stop_reason) == ("I ", [], "look")
            continue
        assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
        assert [json.loads(call.text) for call in answer.calls] == [ARGUMENTS] * (1 if name == "harmony" else 2)


@pytest.mark.parametrize("stop", ["STOP", "\nSTOP", "P", "ST"])
def test_stop_strings_act_on_the_text_around_calls(stop: str) -> None:
    call = f"<tool_call>\n{_ONE}\n</tool_call>"
    for pieces in (list, lambda text: [text]):
        before = answered("hermes", pieces(f"So.\nSTOP{call}"), "stop", stops=[stop])
        assert (before.calls, before.stop_reason) == ([], stop)
        after = answered("hermes", pieces(f"{call}\nSo.\nSTOP and on"), "stop", stops=[stop])
        assert (len(after.calls), after.finish_reason, after.stop_reason) == (1, "stop", stop)
        assert after.text_of(ItemKind.TEXT) == "So.\nSTOP"[: "So.\nSTOP".index(stop)]


def test_a_stop_string_does_not_reach_across_a_call() -> None:
    call = f"<tool_call>\n{_ONE}\n</tool_call>"
    answer = answered("hermes", list(f"a{call}b"), "stop", stops=["ab", "a<tool_call>"])
    assert (answer.text_of(ItemKind.TEXT), len(answer.calls), answer.stop_reason) == ("ab", 1, None)


@pytest.mark.parametrize(
    "text", ["a < b", "x <tool", "See <tool_call", "<", "[TOOL", "[", '{"name": ', "<think", "<fun"]
)
@pytest.mark.parametrize("name", FORMATS)
def test_text_that_a_model_ends_within_what_could_be_markup_is_text(name: str, text: str) -> None:
    assert answered(name, list(text), "stop").text_of(ItemKind.TEXT) == text


def test_text_before_min_tokens_is_not_looked_at() -> None:
    finder = CallStops(["ab"], False, lambda writer: parsed("hermes", writer))
    assert finder.push("ab", check=False) == ("ab", None)
    assert finder.push("ab") == ("", "ab")
