"""OpenAI's responses API: text, streaming, a tool, a typed answer, and a conversation that goes on.

    pip install openai
    python examples/clients/openai_responses.py

PDMESH_URL and PDMESH_API_KEY name another gateway and its key.
"""

from __future__ import annotations

import json
import os
from typing import Annotated

from openai import OpenAI
from openai.types.responses import FunctionToolParam
from pydantic import BaseModel, Field

WEATHER: FunctionToolParam = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


class City(BaseModel):
    name: Annotated[str, Field(max_length=20)]
    inhabitants: Annotated[int, Field(ge=0, le=50_000_000)]


def main() -> None:
    url = os.environ.get("PDMESH_URL", "http://127.0.0.1:8000")
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("PDMESH_API_KEY", "none"))
    model = client.models.list().data[0].id

    response = client.responses.create(model=model, input="Say hello.", max_output_tokens=40)
    print("text:", response.output_text)
    again = client.responses.create(
        model=model, input="And now goodbye.", previous_response_id=response.id, max_output_tokens=40
    )
    print("goes on:", again.output_text)

    with client.responses.create(model=model, input="Count to three.", max_output_tokens=40, stream=True) as stream:
        print("events:", sorted({event.type for event in stream}))

    called = client.responses.create(
        model=model,
        input="What is the weather in Oslo?",
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=200,
    )
    for item in called.output:
        if item.type == "function_call":
            print("calls:", item.name, json.loads(item.arguments))

    typed = client.responses.parse(
        model=model, input="Which city is the largest?", text_format=City, max_output_tokens=200
    )
    print("typed:", typed.output_parsed)


if __name__ == "__main__":
    main()
