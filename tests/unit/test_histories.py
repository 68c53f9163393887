"""What histories hold, and what chat templates make of it: nothing is refused, and nothing is dropped."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from pdmesh_gateway.histories import ChatTemplate
from pdmesh_gateway.templates import TemplateFailed, compile_template
from pdmesh_gateway.tools.writing import call_text, instructions
from pdmesh_testing.tokenizers import CHAT_TEMPLATE, TOOL_TEMPLATE

Message = dict[str, Any]

#: SmolLM2's: it writes any role, and nothing of tools.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

#: Gemma 3's: turns alternate, and the system message is part of the first one.
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set prefix = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set prefix = '' %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "<start_of_turn>{{ role }}\n{{ prefix if loop.first else '' }}{{ message['content'] | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

#: Gemma 2's and Mistral's first: no system message at all.
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "[{{ message['role'] }}]{{ message['content'] | trim }}{% endfor %}"
)

#: Mistral's with tools: turns alternate, but for calls and results, and ids of calls have nine characters.
MISTRAL = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}{% set ns = namespace(index=0) %}"
    "{% set users = rest | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in rest %}{% if not (m.role == 'tool' or (m.role == 'assistant' and m.tool_calls)) %}"
    "{% if (m['role'] == 'user') != (ns.index % 2 == 0) %}"
    "{{ raise_exception('After the optional system message, conversation roles must alternate') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}"
    "{% for m in rest %}{% if m.role == 'user' %}{% if tools and m == users[-1] %}[AVAILABLE_TOOLS]{{ tools | tojson }}"
    "[/AVAILABLE_TOOLS]{% endif %}[INST]{% if loop.last and system is defined %}{{ system }}\n\n{% endif %}"
    "{{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS][{% for call in m.tool_calls %}"
    "{% if call.id is not defined or call.id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric"
    " strings with length 9!') }}{% endif %}{{ call.function | tojson }}{% endfor %}]"
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}"
    "[/TOOL_RESULTS]{% else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}"
    "{% endfor %}"
)

#: Llama 3.1's: one call a message, and any role but for calls and results.
LLAMA = (
    "{% for m in messages %}{% if not (m.role == 'ipython' or m.role == 'tool' or 'tool_calls' in m) %}"
    "<|{{ m.role }}|>{{ m.content | trim }}<|eot|>{% elif 'tool_calls' in m %}{% if not m.tool_calls | length == 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    '<|assistant|>{{ m.content }}{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}<|eot|>"
    "{% else %}<|ipython|>{{ m.content | tojson }}<|eot|>{% endif %}{% endfor %}{{ tools | tojson if tools else '' }}"
)

#: Qwen's newest: the system message is first, and arguments are written one by one.
QWEN = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% if not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "S:{{ m.content }}{% elif m.role == 'user' %}U:{{ m.content }}{% elif m.role == 'assistant' %}A:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<function={{ call.function.name }}>{% for name, value in "
    "call.function.arguments | items %}<parameter={{ name }}>{{ value }}</parameter>{% endfor %}</function>{% endfor %}"
    "{% elif m.role == 'tool' %}T:{{ m.content }}{% else %}{{ raise_exception('Unexpected message role.') }}{% endif %}"
    "{{ '\n' }}{% endfor %}"
)

#: gpt-oss's: a developer or a system message in front; later ones are dropped.
GPT_OSS = (
    "{% if messages[0].role in ('developer', 'system') %}<developer>{{ messages[0].content }}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}"
    "{% if m.role == 'assistant' %}<assistant>{{ m.content }}{% for call in m.tool_calls or [] %}<to={{ "
    "call.function.name }}>{{ call.function.arguments | tojson }}{% endfor %}{% elif m.role == 'tool' %}<tool>"
    "{{ m.content }}{% elif m.role == 'user' %}<user>{{ m.content }}{% endif %}{% endfor %}{{ tools or '' }}"
)

#: DeepSeek's: a call's arguments are text.
DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}{{ m.content }}"
    "{% for call in m.tool_calls %}"
    "{{ '<call>' + call['function']['name'] + '\n' + call['function']['arguments'] + '</call>' }}{% endfor %}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
)

#: Written by hand: a role's branch is missing, and its messages vanish.
DROPS = (
    "{# Written for any developer. #}{% for m in messages %}{% if m.role in ('user', 'assistant') %}"
    "<{{ m.role }}>{{ m.content }}{% elif m.role == 'system' and loop.first %}<system>{{ m.content }}{% endif %}"
    "{% endfor %}"
)

TEMPLATES: Mapping[str, str] = {
    "ChatML": CHAT_TEMPLATE, "Hermes": TOOL_TEMPLATE, "SmolLM2": SMOLLM2, "Gemma 3": GEMMA, "no system": NO_SYSTEM,
    "Mistral": MISTRAL, "Llama 3.1": LLAMA, "Qwen": QWEN, "gpt-oss": GPT_OSS, "DeepSeek": DEEPSEEK, "drops": DROPS,
}  # fmt: skip
#: Mistral's models see instructions with the last message, if that is the user's, and no text beside calls.
LEFT_OUT = {("Mistral", "system messages everywhere"), ("Mistral", "a call with text")}
SHOW_TOOLS = {"Hermes", "Mistral", "Llama 3.1", "Qwen", "gpt-oss", "DeepSeek"}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def developer(text: str) -> Message:
    return {"role": "developer", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def says(text: str, *calls: tuple[str, Any]) -> Message:
    """An answer, with calls of ``look`` by id and arguments."""
    made = [
        {"id": id, "type": "function", "function": {"name": "look", "arguments": arguments}} for id, arguments in calls
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}


def result(id: str, text: str) -> Message:
    return {"role": "tool", "tool_call_id": id, "name": "look", "content": text}


ONE, TWO, THREE = "call00001", "call00002", "call00003"
CUT = '{"q": "Par'
LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
    },
}

HISTORIES: Mapping[str, list[Message]] = {
    "a question": [user("Hi.")],
    "turns": [system("Be kind."), user("Hi."), says("Hello."), user("More.")],
    "two system messages": [system("Be kind."), system("Be brief."), user("Hi.")],
    "system and developer": [system("Be kind."), developer("Be brief."), user("Hi.")],
    "developer and system": [developer("Be kind."), system("Be brief."), user("Hi.")],
    "a developer": [developer("Be kind."), user("Hi.")],
    "two developers": [developer("Be kind."), developer("Be brief."), user("Hi.")],
    "a developer later": [user("Hi."), says("Hello."), developer("Be brief."), user("More.")],
    "a developer at the end": [user("Hi."), developer("Be brief.")],
    "a system message later": [system("Be kind."), user("Hi."), says("Hello."), system("Be brief."), user("More.")],
    "a system message at the end": [user("Hi."), says("Hello."), user("More."), system("Be brief.")],
    "system messages everywhere": [system("One."), user("Hi."), system("Two."), says("Hm."), developer("Three.")],
    "instructions alone": [system("Be kind.")],
    "a developer alone": [developer("Be kind."), developer("Be brief.")],
    "two users": [user("Hi."), user("There.")],
    "three users and two answers": [user("A."), user("B."), user("C."), says("D."), says("E."), user("F.")],
    "an answer first": [says("Welcome."), user("Hi.")],
    "an answer after instructions": [system("Be kind."), says("Welcome."), user("Hi.")],
    "answers alone": [says("One."), says("Two.")],
    "an empty answer": [user("Hi."), says(""), user("There.")],
    "a call": [user("Hi."), says("", (ONE, {"q": "Oslo"})), result(ONE, "rain"), says("It rains."), user("And?")],
    "a call with text": [user("Hi."), says("I look.", (ONE, {"q": "Oslo"})), result(ONE, "rain")],
    "a call without arguments": [user("Hi."), says("", (ONE, {})), result(ONE, "rain")],
    "two calls": [
        user("Hi."), says("", (ONE, {"q": "Oslo"}), (TWO, {"q": "Rome"})), result(ONE, "a"), result(TWO, "b"),
    ],
    "results in another order": [
        *(user("Hi."), says("", (ONE, {"q": "Oslo"}), (TWO, {"q": "Rome"}))),
        *(result(TWO, "b"), result(ONE, "a"), user("And?")),
    ],
    "three calls of which one has a result": [
        user("Hi."), says("", (ONE, {"q": "Oslo"}), (TWO, {"q": "Rome"}), (THREE, {})), result(TWO, "b"), user("And?"),
    ],
    "a result too late": [user("Hi."), says("", (ONE, {"q": "Oslo"})), user("Well?"), result(ONE, "rain")],
    "a result of nothing": [user("Hi."), result(ONE, "rain")],
    "a call without a result": [user("Hi."), says("", (ONE, {"q": "Oslo"})), user("Never mind.")],
    "a call and then text": [user("Hi."), says("", (ONE, {"q": "Oslo"})), says("Hm."), result(ONE, "rain")],
    "ids that come again": [
        *(user("Hi."), says("", (ONE, {"q": "Oslo"})), result(ONE, "rain"), says("It rains."), user("And Rome?")),
        *(says("", (ONE, {"q": "Rome"})), result(ONE, "sun")),
    ],
    "a cut call": [user("Hi."), says("", (ONE, CUT)), user("Go on.")],
    "a cut call with a result": [user("Hi."), says("I look.", (ONE, CUT)), result(ONE, "no JSON"), user("Again.")],
    "a cut call after a whole one": [
        user("Hi."), says("", (ONE, {"q": "Oslo"}), (TWO, CUT)), result(ONE, "rain"), user("Go on."),
    ],
    "a call cut before its arguments": [user("Hi."), says("", (ONE, "")), user("Go on.")],
    "arguments that are a list": [user("Hi."), says("", (ONE, "[1, 2]")), user("Go on.")],
}  # fmt: skip


def render(
    template: str, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None, tool_format: str = "hermes"
) -> str:
    compiled = compile_template(template)
    return ChatTemplate(compiled, {"bos_token": "<bos>"}, is_for_tools=bool(tools)).render(
        {"messages": list(messages), "tools": tools, "add_generation_prompt": True}, tool_format=tool_format
    )


def texts_of(messages: Sequence[Message]) -> list[str]:
    """Every text of a history. Of a call that was cut, its name."""
    texts = [message["content"] for message in messages if message["content"]]
    for message in messages:
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            texts += [call["function"]["name"], *(arguments.values() if isinstance(arguments, dict) else ())]
    return texts


@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_shows_all_of_a_history(template: str, history: str, with_tools: bool) -> None:
    messages = HISTORIES[history]
    before = json.dumps(messages)
    text = render(TEMPLATES[template], messages, [LOOK] if with_tools else None)
    assert json.dumps(messages) == before
    if (template, history) not in LEFT_OUT:
        assert all(shown in text for shown in texts_of(messages))
    if with_tools:
        assert "Look something up." in text
        assert ("<tools>" in text and "Write each call like this" in text) is (template not in SHOW_TOOLS)


ORDINARY = ("a question", "turns", "two users", "a call", "a call with text", "a call without arguments", "two calls")


@pytest.mark.parametrize("history", ORDINARY)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_history_that_a_template_shows_is_rendered_as_it_is(template: str, history: str) -> None:
    messages = HISTORIES[history]
    try:
        plain = compile_template(TEMPLATES[template])(
            {"messages": messages, "bos_token": "<bos>", "add_generation_prompt": True}
        )
    except TemplateFailed:
        return
    if all(text in plain for text in texts_of(messages)):
        assert render(TEMPLATES[template], messages) == plain


def test_instructions_are_merged_where_a_template_wants_one_message() -> None:
    history = HISTORIES["system messages everywhere"]
    assert render(QWEN, history) == "S:One.\nTwo.\nThree.\nU:Hi.\nA:Hm.\n"
    assert render(GPT_OSS, history) == "<developer>One.\nTwo.\nThree.<user>Hi.<assistant>Hm."
    assert render(GEMMA, history) == (
        "<bos><start_of_turn>user\nOne.\nTwo.\nThree.\n\nHi.<end_of_turn>\n<start_of_turn>model\nHm.<end_of_turn>\n"
        "<start_of_turn>model\n"
    )
    assert render(NO_SYSTEM, history) == "[user]One.\nTwo.\nThree.\n\nHi.[assistant]Hm."
    assert render(CHAT_TEMPLATE, history).count("<|im_start|>system") == 3
    assert render(QWEN, HISTORIES["system and developer"]) == "S:Be kind.\nBe brief.\nU:Hi.\n"
    assert render(QWEN, HISTORIES["a developer later"]) == "S:Be brief.\nU:Hi.\nA:Hello.\nU:More.\n"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            CHAT_TEMPLATE,
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n",
        ),
        (GPT_OSS, "<developer>Be kind.<user>Hi."),
        (DROPS, "<system>Be kind.<user>Hi."),  # its source has the word
        (QWEN, "S:Be kind.\nU:Hi.\n"),
        (
            "{% for m in messages %}{{ m.role | upper }}:{{ m.content }};{% endfor %}{# developer #}",
            "SYSTEM:Be kind.;USER:Hi.;",
        ),
        (
            "{% for m in messages %}{{ '#' if m.role == 'developer' else '-' }}{{ m.content }}{% endfor %}",
            "#Be kind.-Hi.",
        ),
        (
            "{% for m in messages %}{% if m.role == 'developer' %}{{ raise_exception('no') }}{% endif %}"
            "{{ m.role }}{{ m.content }}{% endfor %}",
            "systemBe kind.userHi.",
        ),
        (
            "You help a developer.{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}",
            "You help a developer.systemBe kind.userHi.",
        ),
    ],
)
def test_a_developer_is_one_only_where_the_template_has_the_role(template: str, expected: str) -> None:
    assert render(template, HISTORIES["a developer"]) == expected


def test_turns_alternate_where_a_template_wants_that() -> None:
    assert render(NO_SYSTEM, HISTORIES["three users and two answers"]) == "[user]A.\nB.\nC.[assistant]D.\nE.[user]F."
    assert render(NO_SYSTEM, HISTORIES["an answer first"]) == "[user][assistant]Welcome.[user]Hi."
    assert render(SMOLLM2, HISTORIES["two users"]).count("<|im_start|>user") == 2
    assert render(MISTRAL, HISTORIES["two users"]) == "[INST]Hi.\nThere.[/INST]"


def test_a_cut_call_is_written_as_it_is_or_as_much_as_is_whole() -> None:
    history = HISTORIES["a cut call"]
    assert CUT in render(SMOLLM2, history)
    assert CUT in render(DEEPSEEK, history)
    assert render(QWEN, history) == "U:Hi.\nA:<function=look></function>\nU:Go on.\n"
    longer = [user("Hi."), says("", (ONE, '{"q": "Paris", "n": [1, 2')), result(ONE, "no"), user("Go on.")]
    assert "<parameter=q>Paris</parameter>" in render(QWEN, longer)
    assert '"parameters": {"q": "Paris", "n": [1' in render(LLAMA, longer)


def test_calls_stand_apart_where_a_message_has_one() -> None:
    assert render(LLAMA, HISTORIES["results in another order"]) == (
        '<|user|>Hi.<|eot|><|assistant|>{"name": "look", "parameters": {"q": "Oslo"}}<|eot|><|ipython|>"a"<|eot|>'
        '<|assistant|>{"name": "look", "parameters": {"q": "Rome"}}<|eot|><|ipython|>"b"<|eot|><|user|>And?<|eot|>'
    )


def test_results_follow_their_calls() -> None:
    assert render(QWEN, HISTORIES["a result too late"]) == (
        "U:Hi.\nA:<function=look><parameter=q>Oslo</parameter></function>\nT:rain\nU:Well?\n"
    )
    again = render(QWEN, HISTORIES["ids that come again"])
    assert again.index("Oslo") < again.index("T:rain") < again.index("Rome</parameter>") < again.index("T:sun")


def test_tools_are_told_to_a_template_that_shows_none() -> None:
    text = render(SMOLLM2, HISTORIES["a call"], [LOOK])
    assert text == (
        "<|im_start|>system\nYou may call these tools. Each has a JSON schema of its arguments.\n<tools>\n"
        + json.dumps(LOOK)
        + "\n</tools>\n\nWrite each call like this:\n<tool_call>\n"
        '{"name": "name of the tool", "arguments": {"name of a parameter": "its value"}}\n</tool_call>\n\n'
        "Its result follows between <tool_response> and </tool_response>. Where no tool helps, answer with text."
        "<|im_end|>\n<|im_start|>user\nHi.<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "look", "arguments": {"q": "Oslo"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nIt rains.<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(SMOLLM2, HISTORIES["turns"], [LOOK]).startswith("<|im_start|>system\nBe kind.\n\nYou may call")
    assert render(NO_SYSTEM, HISTORIES["a question"], [LOOK]).startswith("[user]You may call")
    assert render(GEMMA, HISTORIES["turns"], [LOOK]).startswith("<bos><start_of_turn>user\nBe kind.\n\nYou may call")


def test_a_tool_without_a_description_gets_one_only_where_a_template_needs_it() -> None:
    bare = {**LOOK, "function": {key: value for key, value in LOOK["function"].items() if key != "description"}}
    joins = "{% for tool in tools or [] %}[{{ tool.function.name + ': ' + tool.function.description }}]{% endfor %}"
    assert json.dumps(bare) in render(TOOL_TEMPLATE, [user("Hi.")], [bare])
    assert render(joins, [user("Hi.")], [bare, LOOK]) == "[look: ][look: Look something up.]"


@pytest.mark.parametrize(
    ("tool_format", "call"),
    [
        ("hermes", '<tool_call>\n{"name": "look", "arguments": {"q": "Oslo", "n": 1}}\n</tool_call>'),
        ("llama", '{"name": "look", "parameters": {"q": "Oslo", "n": 1}}'),
        ("mistral", '[TOOL_CALLS]look[ARGS]{"q": "Oslo", "n": 1}'),
        ("mistral_list", '[TOOL_CALLS][{"name": "look", "arguments": {"q": "Oslo", "n": 1}}]'),
        (
            "qwen_coder",
            "<tool_call>\n<function=look>\n<parameter=q>\nOslo\n</parameter>\n<parameter=n>\n1\n</parameter>\n"
            "</function>\n</tool_call>",
        ),
        (
            "harmony",
            '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"q": "Oslo", "n": 1}<|call|>',
        ),
    ],
)
def test_calls_are_written_in_the_format_of_the_model(tool_format: str, call: str) -> None:
    arguments = {"q": "Oslo", "n": 1}
    assert call_text(tool_format, "look", arguments) == call_text(tool_format, "look", json.dumps(arguments)) == call
    assert call in render(SMOLLM2, [user("Hi."), says("", (ONE, arguments)), result(ONE, "x")], tool_format=tool_format)
    assert CUT in call_text(tool_format, "look", CUT)
    assert "name of a parameter" in instructions(tool_format, [LOOK])


def test_a_template_that_refuses_everything_says_why_itself() -> None:
    with pytest.raises(TemplateFailed, match="not today"):
        render("{{ raise_exception('not today') }}", HISTORIES["system messages everywhere"])


def test_long_histories_take_no_quadratic_time() -> None:
    """Of a template that has single calls and turns that alternate."""
    one_call = (
        "{% for message in messages %}{% if message.role == messages[loop.index0 - 1].role and loop.index0 %}"
        "{{ raise_exception('turns alternate') }}{% endif %}{% if (message.tool_calls or []) | length > 1 %}"
        "{{ raise_exception('one call') }}{% endif %}{{ message.role }}{{ message.content }}"
        "{{ message.tool_calls or '' }}{% endfor %}"
    )
    template = ChatTemplate(compile_template(one_call), {})
    calls = [{"id": str(i), "function": {"name": "f", "arguments": {}}} for i in range(8000)]
    results = [{"role": "tool", "tool_call_id": str(i), "content": f"<{i}>"} for i in range(8000)]
    says = [{"role": "user", "content": f"({i})"} for i in range(8000)]
    messages = [*says, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    start_s = time.process_time()
    text = template.render({"messages": messages, "tools": None}, tool_format="hermes")
    assert time.process_time() - start_s < 1.5
    assert text.startswith("user(0)\n(1)\n(2)")
    assert "(7999)assistant" in text
    assert text.endswith("tool<7999>")
