"""pydantic-ai: an agent whose answer has a type, and one that streams text."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=os.environ.get("PDMESH_URL", "http://127.0.0.1:8000") + "/v1", api_key="none")
model = OpenAIChatModel(os.environ.get("PDMESH_MODEL", "pdmesh-demo"), provider=provider)


class City(BaseModel):
    name: Annotated[str, Field(max_length=20)]
    size: Literal["small", "large"]


async def main() -> None:
    for output in (City, NativeOutput(City)):  # by a call, and by a JSON schema
        result = await Agent(model, output_type=output, model_settings={"max_tokens": 200}).run("Name a city.")
        print(result.output)
        assert isinstance(result.output, City)
    async with Agent(model, model_settings={"max_tokens": 30}).run_stream("What is pdmesh?") as stream:
        assert await stream.get_output()


asyncio.run(main())
