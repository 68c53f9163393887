"""litellm: tools and a JSON schema by its OpenAI-compatible provider."""

from __future__ import annotations

import json
import os
from typing import Any

import litellm

COMMON: dict[str, Any] = {
    "model": "hosted_vllm/" + os.environ.get("PDMESH_MODEL", "pdmesh-demo"),
    "api_base": os.environ.get("PDMESH_URL", "http://127.0.0.1:8000") + "/v1",
    "api_key": "none",
    "messages": [{"role": "user", "content": "How is the weather in Paris?"}],
    "max_tokens": 200,
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": dict(SCHEMA)}}

# litellm takes `additionalProperties` out of tools' schemas, in place.
called = litellm.completion(**COMMON, tools=[WEATHER], tool_choice="required").choices[0]
print(called.message.tool_calls)
assert called.finish_reason == "tool_calls"
assert json.loads(called.message.tool_calls[0].function.arguments)["city"] in ("Paris", "Rome")
answer = litellm.completion(
    **COMMON, response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
)
assert json.loads(answer.choices[0].message.content)["city"] in ("Paris", "Rome")
chunks = list(litellm.completion(**COMMON, tools=[WEATHER], tool_choice="required", stream=True))
assert litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls[0].function.name == "get_weather"
