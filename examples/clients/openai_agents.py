"""OpenAI's agents: one with a tool, over the responses API.

    pip install openai-agents
    python examples/clients/openai_agents.py

PDMESH_URL and PDMESH_API_KEY name another gateway and its key.
"""

from __future__ import annotations

import asyncio
import os
from typing import Annotated

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import Field


@function_tool
def weather(city: Annotated[str, Field(max_length=20)]) -> str:
    """Return the weather of a city."""
    return f"It rains in {city}."


async def main() -> None:
    set_tracing_disabled(True)
    url = os.environ.get("PDMESH_URL", "http://127.0.0.1:8000")
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=os.environ.get("PDMESH_API_KEY", "none"))
    model = (await client.models.list()).data[0].id
    agent = Agent(
        name="Forecaster",
        instructions="Answer briefly.",
        model=OpenAIResponsesModel(model=model, openai_client=client),
        model_settings=ModelSettings(max_tokens=200, tool_choice="required", parallel_tool_calls=False),
        tools=[weather],
    )
    result = await Runner.run(agent, "What is the weather in Oslo?", max_turns=4)
    print("items:", [item.type for item in result.new_items])
    print("answers:", result.final_output)
    streamed = Runner.run_streamed(agent, "What is the weather in Oslo?", max_turns=4)
    print("streamed:", [event.type async for event in streamed.stream_events()].count("raw_response_event"), "events")


if __name__ == "__main__":
    asyncio.run(main())
