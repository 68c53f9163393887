"""Which of a checkpoint's chat templates renders a conversation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from pdmesh.engine.gguf.gguf_tokenizer import write_tokenizer
from pdmesh_gateway.answer_format import find_format
from pdmesh_gateway.model_tokenizer import ModelTokenizer
from pdmesh_testing.checkpoints import write_checkpoint

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TOOL_USE = (
    "{% for t in tools %}{{ t.function.name }}\n{% endfor %}<tool_call>\n"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}
MESSAGES = [{"role": "user", "content": "Hi"}]


def in_list(directory: Path) -> None:
    path = directory / "tokenizer_config.json"
    templates = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": TOOL_USE}]
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": templates}))


def in_files(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text(PLAIN)
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text(TOOL_USE)


@pytest.mark.parametrize("write", [in_list, in_files])
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["plain", "tools"])
@pytest.mark.anyio
async def test_tools_are_rendered_by_the_template_of_that_name(
    tmp_path: Path, write: Any, tools: list[dict[str, Any]] | None
) -> None:
    write(write_checkpoint(tmp_path))
    tokenizer = ModelTokenizer.load(tmp_path)
    answer_format = find_format(tokenizer, "")
    assert not answer_format.tells_tools
    assert answer_format.tools.name == "hermes"  # calls look as that template says
    reference: Any = AutoTokenizer.from_pretrained(tmp_path)
    expected = reference.apply_chat_template(MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True)
    assert await tokenizer.render_chat(MESSAGES, tools=tools) == expected
    assert ("look\n" in expected) is bool(tools)


@pytest.mark.anyio
async def test_a_gguf_file_may_have_several_templates(tmp_path: Path) -> None:
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.merges": [],
        "tokenizer.chat_template": PLAIN,
        "tokenizer.chat_template.tool_use": TOOL_USE,
        "tokenizer.chat_templates": ["tool_use"],
    }
    write_tokenizer(tmp_path, fields, "model.gguf")
    tokenizer = ModelTokenizer.load(tmp_path)
    assert (await tokenizer.render_chat(MESSAGES, tools=[TOOL])).startswith("look\n<tool_call>")
    assert await tokenizer.render_chat(MESSAGES) == "user: Hi\n"
