"""langchain-openai: tools bound to a model, structured output, and streaming."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field, SecretStr

MODEL = os.environ.get("PDMESH_MODEL", "pdmesh-demo")
model = ChatOpenAI(
    model=MODEL,
    base_url=os.environ.get("PDMESH_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=SecretStr("none"),
    max_completion_tokens=200,
)


class City(BaseModel):
    """A city."""

    name: Annotated[str, Field(max_length=20)]
    size: Literal["small", "large"]


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Weather of a city."""
    return f"17 degrees in {city}"


called = model.bind_tools([get_weather], tool_choice="any").invoke("How is the weather in Paris?")
print(called.tool_calls)
assert get_weather.invoke(called.tool_calls[0]).content.startswith("17 degrees")
for method in ("json_schema", "function_calling"):
    city = model.with_structured_output(City, method=method).invoke("Name a city.")
    print(method, city)
    assert isinstance(city, City)
pieces = list(model.bind_tools([get_weather], tool_choice="get_weather").stream("And in Rome?"))
whole = pieces[0]
for piece in pieces[1:]:
    whole += piece
assert whole.tool_calls[0]["name"] == "get_weather"
