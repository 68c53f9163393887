"""instructor: pydantic models by a tool call (its default) and by a JSON schema."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field

MODEL = os.environ.get("PDMESH_MODEL", "pdmesh-demo")
openai = OpenAI(base_url=os.environ.get("PDMESH_URL", "http://127.0.0.1:8000") + "/v1", api_key="none")


class City(BaseModel):
    name: Annotated[str, Field(max_length=20)]
    size: Literal["small", "large"]


for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai, mode=mode)
    city = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Name a city."}], response_model=City, max_tokens=200
    )
    print(mode.name, city)
    assert isinstance(city, City)
