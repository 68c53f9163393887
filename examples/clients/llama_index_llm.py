"""llama-index: a typed prediction by a tool call, tools, and streaming."""

import os
from typing import Annotated, Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

llm = OpenAILike(
    model=os.environ.get("PDMESH_MODEL", "pdmesh-demo"),
    api_base=os.environ.get("PDMESH_URL", "http://127.0.0.1:8000") + "/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    max_tokens=200,
)


class City(BaseModel):
    """A city."""

    name: Annotated[str, Field(max_length=20)]
    size: Literal["small", "large"]


def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Weather of a city."""
    return f"17 degrees in {city}"


question = ChatMessage(role="user", content="How is the weather in Paris?")
city = llm.as_structured_llm(City).chat([question]).raw
print(city)
assert isinstance(city, City)
weather = FunctionTool.from_defaults(get_weather)
called = llm.chat_with_tools([weather], chat_history=[question], tool_required=True)
print(llm.get_tool_calls_from_response(called))
assert llm.get_tool_calls_from_response(called)[0].tool_name == "get_weather"
assert "".join(piece.delta or "" for piece in llm.stream_chat([question]))
