"""OpenAI's own client: tools whole and streamed, results of tools, and a parsed answer."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any, Literal

from openai import OpenAI
from pydantic import BaseModel, Field

MODEL = os.environ.get("PDMESH_MODEL", "pdmesh-demo")
client = OpenAI(base_url=os.environ.get("PDMESH_URL", "http://127.0.0.1:8000") + "/v1", api_key="none")

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
        },
    },
}
QUESTION: Any = {"role": "user", "content": "How is the weather in Paris?"}


class City(BaseModel):
    name: Annotated[str, Field(max_length=20)]
    size: Literal["small", "large"]


# Called, answered, and asked again with the result.
called = client.chat.completions.create(
    model=MODEL, messages=[QUESTION], tools=[WEATHER], tool_choice="required", max_tokens=200
)
message = called.choices[0].message
calls: Any = message.tool_calls
assert json.loads(calls[0].function.arguments)["city"] in ("Paris", "Rome")
results: Any = [{"role": "tool", "tool_call_id": call.id, "content": "17 degrees, sunny"} for call in calls]
answer = client.chat.completions.create(
    model=MODEL, messages=[QUESTION, message.model_dump(exclude_none=True), *results], tools=[WEATHER], max_tokens=50
)
assert answer.choices[0].finish_reason in ("stop", "length")

# One call by name, streamed.
named: Any = {"type": "function", "function": {"name": "get_weather"}}
with client.chat.completions.stream(
    model=MODEL, messages=[QUESTION], tools=[WEATHER], tool_choice=named, max_tokens=100
) as stream:
    kinds = {event.type for event in stream}
    streamed: Any = stream.get_final_completion().choices[0]
assert "tool_calls.function.arguments.delta" in kinds
assert (streamed.finish_reason, streamed.message.tool_calls[0].function.name) == ("stop", "get_weather")

# An answer of a type.
parsed = client.chat.completions.parse(model=MODEL, messages=[QUESTION], response_format=City, max_tokens=100)
print(calls[0].function.arguments, parsed.choices[0].message.parsed)
