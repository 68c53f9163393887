"""Calls and results of tools as text, for models whose template does not show them.

Formats are selected by name and nothing else is imported, because a process that renders a client's template starts
anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def _hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'


def _llama(name: str, arguments: str) -> str:
    return f'{{"name": {json.dumps(name)}, "parameters": {arguments}}}'


def _mistral(name: str, arguments: str) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{arguments}"


def _mistral_list(name: str, arguments: str) -> str:
    return f'[TOOL_CALLS][{{"name": {json.dumps(name)}, "arguments": {arguments}}}]'


def _qwen_coder(name: str, arguments: str) -> str:
    try:
        given = json.loads(arguments)
    except ValueError:
        given = None
    values = given if isinstance(given, dict) else {"arguments": arguments}
    parameters = "".join(f"<parameter={key}>\n{to_json(value)}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def _harmony(name: str, arguments: str) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"


_WRITERS: Mapping[str, Callable[[str, str], str]] = {
    "hermes": _hermes,
    "llama": _llama,
    "mistral": _mistral,
    "mistral_list": _mistral_list,
    "qwen_coder": _qwen_coder,
    "harmony": _harmony,
}


def call_text(tool_format: str, name: str, arguments: Any) -> str:
    """Return a call as models of ``tool_format`` write it.

    Arguments that are text stay unchanged, even if they were cut.
    """
    return _WRITERS[tool_format](name, to_json(arguments))


def result_text(content: str) -> str:
    """Return a tool's result as text of a user's message."""
    return f"<tool_response>\n{content}\n</tool_response>"


def instructions(tool_format: str, tools: Iterable[Mapping[str, Any]]) -> str:
    """Return instructions that list a model's tools and explain how to call them."""
    listed = "\n".join(to_json(tool) for tool in tools)
    example = _WRITERS[tool_format]("name of the tool", '{"name of a parameter": "its value"}')
    return (
        "You may call these tools. Each has a JSON schema of its arguments.\n"
        f"<tools>\n{listed}\n</tools>\n\n"
        f"Write each call like this:\n{example}\n\n"
        "Its result follows between <tool_response> and </tool_response>. Where no tool helps, answer with text."
    )


def to_json(value: Any) -> str:
    """Return a value as templates write it. Text, which may be cut JSON, stays unchanged."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
