"""Tokenizers and chat templates of published models, against transformers: ids, text as it streams, renders."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from tokenizers import pre_tokenizers

from pdmesh.engine.gguf.directory import gguf_directory
from pdmesh_gateway.model_tokenizer import ModelTokenizer
from pdmesh_gateway.templates import TemplateFailed, compile_template
from pdmesh_testing.real_models import TOKENIZERS, real_model, real_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.anyio, pytest.mark.timeout(600)]

NUM_TEXTS = 500

#: Each text is made of some of these.
PIECES: Sequence[str] = (
    "Hello, world!", "don't", "I'LL", "naïve café", "cafe\u0301", "\u1e9b\u0323", "ﬁ", "Straße", "İstanbul",
    "你好\uff0c世界", "こんにちは", "カタカナ", "한국어", "\u1112\u1161\u11ab", "مرحبا بالعالم", "שלום", "नमस्ते", "ไทย",
    "👍", "👨‍👩‍👧‍👦", "🏳️‍🌈", "👩🏽‍🚀", "🇩🇪🇫🇷", "\u200d", "\u200b", "\ufeff", "\u00ad", "\u202e", "\u2028",
    " ", "  ", "   ", "\n", "\n\n\n", "\r\n", "\t", "\t\t", "\u00a0", "\u3000", " \n \t ",
    "0", "12", "123", "1234567", "3.14159", "1,000,000", "٣٤٥", "Ⅷ", "½",
    "def f(x):\n    return x ** 2", "if (a && b) { c(); }", "SELECT * FROM t;", "https://a.example/?q=1#s", "a_b-c.d",
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|begin_of_text|>", "<start_of_turn>", "<bos>",
    "<|start|>assistant<|channel|>final<|message|>", "<think>", "</think>", "<tool_call>", "</s>", "[INST]", "<unk>",
    "\x00", "\x07", "\x1b[31m", "\x7f", "\x85", "...", "!!!???", "\u2014\u2013-", "“quoted”", "$%^&*()", "\\n", "`",
)  # fmt: skip


def odd_texts() -> Sequence[str]:
    rng = random.Random(7)
    made: list[str] = ["", *PIECES]
    while len(made) < NUM_TEXTS:
        pieces = rng.choices(PIECES, k=rng.randrange(2, 9))
        if rng.random() < 0.2:
            pieces.append(chr(rng.choice([rng.randrange(0x80, 0xD800), rng.randrange(0x10000, 0x20000)])))
        made.append(rng.choice(["", " "]).join(pieces))
    return made[:NUM_TEXTS]


def of_npm(name: str) -> tuple[ModelTokenizer, Any]:
    directory = real_tokenizer(name)
    return ModelTokenizer.load(directory), hf_tokenizer(directory)


def of_smollm2() -> tuple[ModelTokenizer, Any]:
    """Transformers knows no `tokenizer.ggml.pre`: texts are split as SmolLM2's own tokenizer.json says."""
    file = real_model("smollm2")
    theirs = hf_tokenizer(file.parent, gguf_file=file.name)
    splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    return ModelTokenizer.load(gguf_directory(file)), theirs


def of_gemma() -> tuple[ModelTokenizer, Any]:
    """The tokenizer of the GGUF file, and the model's own."""
    return ModelTokenizer.load(gguf_directory(real_model("gemma3-270m"))), of_npm("gemma3")[1]


def hf_tokenizer(directory: Path, **options: object) -> Any:
    import transformers

    hf: Any = transformers
    return hf.AutoTokenizer.from_pretrained(directory, **options)


SOURCES: Mapping[str, Callable[[], tuple[ModelTokenizer, Any]]] = {
    **{name: partial(of_npm, name) for name in TOKENIZERS},
    "smollm2 from GGUF": of_smollm2,
    "gemma3 from GGUF": of_gemma,
}


@cache
def loaded(source: str) -> tuple[ModelTokenizer, Any]:
    return SOURCES[source]()


@pytest.mark.parametrize("source", SOURCES)
async def test_odd_texts_are_the_tokens_of_transformers(source: str) -> None:
    ours, theirs = loaded(source)
    for text in odd_texts():
        for special in (False, True):
            found = await ours.encode(text, add_special_tokens=special)
            assert found == theirs(text, add_special_tokens=special).input_ids, repr(text)


@pytest.mark.parametrize("source", SOURCES)
async def test_what_streams_is_the_whole_that_is_decoded(source: str) -> None:
    ours, _ = loaded(source)
    for text in odd_texts():
        token_ids = await ours.encode(text, add_special_tokens=False)
        for skips in (False, True):
            stream = ours.detokenizer((), skip_special_tokens=skips)
            streamed = "".join([*map(stream.push, token_ids), stream.flush()])
            assert streamed == await ours.decode(token_ids, skip_special_tokens=skips), repr(text)


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": 'a "name"'}},
            "required": ["city"],
        },
    },
}
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi! <b>&</b> 'x' \u00e9"}
ANSWER = {"role": "assistant", "content": "Hello.\n"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln"}}}],
}
RESULT = {"role": "tool", "name": "get_weather", "content": '{"sky": "grey"}'}
CONVERSATIONS: Mapping[str, list[dict[str, Any]]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, USER],
    "ends with an answer": [USER, ANSWER],
    "empty content": [{"role": "user", "content": ""}],
    "two users": [USER, USER],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]}],
    "thinking": [USER, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."}, USER],
    "reasoning": [USER, {"role": "assistant", "reasoning_content": "Hm.", "content": "Yes."}, USER],
    "tool": [USER, CALL, RESULT],
    "tool, then on": [SYSTEM, USER, CALL, RESULT, ANSWER, USER],
    "two results": [USER, CALL, RESULT, RESULT],
    "unknown role": [{"role": "critic", "content": "No."}],
}
OPTIONS: Mapping[str, dict[str, Any]] = {"plain": {}, "no thinking": {"enable_thinking": False}}
WITH_TEMPLATES = ["qwen3", "llama3.1", "gemma3", "smollm2 from GGUF"]


def renders() -> Iterator[tuple[str, dict[str, Any], bool, dict[str, Any]]]:
    for conversation in CONVERSATIONS:
        for tools in ({}, {"tools": [WEATHER]}):
            for prompts in (False, True):
                for options in OPTIONS.values():
                    yield conversation, tools, prompts, options


@pytest.mark.parametrize("source", WITH_TEMPLATES)
async def test_templates_render_as_in_transformers(source: str) -> None:
    """What one refuses the other refuses."""
    ours, theirs = loaded(source)
    render = compile_template(ours.template_source)
    num_rendered = 0
    for name, tools, prompts, options in renders():
        expected = theirs_of(theirs, CONVERSATIONS[name], tools, prompts, options)
        variables = {**tools, **options, "messages": CONVERSATIONS[name], "add_generation_prompt": prompts}
        try:
            found = render({**theirs.special_tokens_map, "documents": None, **variables})
        except TemplateFailed:
            assert expected is None, (name, tools)
        else:
            assert found == expected, (name, tools)
            num_rendered += 1
    assert num_rendered >= 48


@pytest.mark.parametrize("source", WITH_TEMPLATES)
async def test_conversations_are_rendered_whole(source: str) -> None:
    """As in transformers, unless that refuses or drops a part of the conversation or its tools."""
    ours, theirs = loaded(source)
    num_equal = 0
    for name, tools, prompts, options in renders():
        if name in ("parts", "unknown role"):  # dialects give text; a template may do what it likes with the other
            continue
        given = CONVERSATIONS[name]
        expected = theirs_of(theirs, given, tools, prompts, options)
        found = await ours.render_chat(given, add_generation_prompt=prompts, variables=options, **tools)
        texts = [text for message in given for text in texts_of(message)]
        texts += ["Weather of a city."] if tools else []
        assert all(text in found for text in texts), (name, tools)
        if expected is not None and all(text in expected for text in texts):
            assert found == expected, (name, tools)
            num_equal += 1
    assert num_equal >= 24


def theirs_of(
    theirs: Any, conversation: list[dict[str, Any]], tools: dict[str, Any], prompts: bool, options: dict[str, Any]
) -> str | None:
    with suppress(TemplateError, TypeError, IndexError):
        text: str = theirs.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=prompts, **tools, **options
        )
        return text
    return None


def texts_of(message: dict[str, Any]) -> list[str]:
    """What a rendered conversation must show of a message; reasoning may be left out."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    texts = [message.get("content", "").rpartition("</think>")[2].strip()]
    return texts + [text for call in calls for text in (call["name"], *call["arguments"].values())]
