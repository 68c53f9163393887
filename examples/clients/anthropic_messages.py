"""Anthropic's client: text, streaming, a tool and its result, and counting.

    pip install anthropic
    python examples/clients/anthropic_messages.py

PDMESH_URL and PDMESH_API_KEY name another gateway and its key.
"""

from __future__ import annotations

import os

from anthropic import Anthropic
from anthropic.types import MessageParam, ToolParam

WEATHER: ToolParam = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def main() -> None:
    client = Anthropic(
        base_url=os.environ.get("PDMESH_URL", "http://127.0.0.1:8000"),
        api_key=os.environ.get("PDMESH_API_KEY", "none"),
    )
    model = client.models.list().data[0].id
    hello: list[MessageParam] = [{"role": "user", "content": "Say hello."}]
    print("counted:", client.messages.count_tokens(model=model, messages=hello).input_tokens)
    message = client.messages.create(model=model, max_tokens=40, messages=hello)
    print("text:", [block.text for block in message.content if block.type == "text"], message.stop_reason)
    with client.messages.stream(model=model, max_tokens=40, messages=hello) as stream:
        print("streamed:", "".join(stream.text_stream))

    question: list[MessageParam] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    called = client.messages.create(
        model=model,
        max_tokens=200,
        messages=question,
        tools=[WEATHER],
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
    )
    [call] = [block for block in called.content if block.type == "tool_use"]
    print("calls:", call.name, call.input, called.stop_reason)
    question += [
        {"role": "assistant", "content": list(called.content)},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "It rains."}]},
    ]
    answer = client.messages.create(model=model, max_tokens=40, messages=question, tools=[WEATHER])
    print("answers:", [block.text for block in answer.content if block.type == "text"])


if __name__ == "__main__":
    main()
