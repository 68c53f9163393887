"""smolagents: a model that must call one of its tools."""

from __future__ import annotations

import os
from typing import Literal

from smolagents import ChatMessage, MessageRole, OpenAIServerModel, tool


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Weather of a city.

    Args:
        city: The city.
    """
    return f"17 degrees in {city}"


model = OpenAIServerModel(
    model_id=os.environ.get("PDMESH_MODEL", "pdmesh-demo"),
    api_base=os.environ.get("PDMESH_URL", "http://127.0.0.1:8000") + "/v1",
    api_key="none",
    max_tokens=200,
)
question = [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": "How is the weather in Paris?"}])]
message = model.generate(question, tools_to_call_from=[get_weather])
print(message.tool_calls)
assert message.tool_calls
assert message.tool_calls[0].function.name == "get_weather"
assert model.generate(question, stop_sequences=["\n\n"]).content is not None
