"""Chat with a mesh through the openai package: ``python examples/openai_client.py "Why is the sky blue?"``.

Needs ``pip install openai``. PDMESH_URL and PDMESH_API_KEY name another gateway and its key.
"""

from __future__ import annotations

import os
import sys

from openai import OpenAI


def main() -> None:
    prompt = " ".join(sys.argv[1:]) or "Say hello."
    client = OpenAI(
        base_url=os.environ.get("PDMESH_URL", "http://127.0.0.1:8000") + "/v1",
        api_key=os.environ.get("PDMESH_API_KEY", "none"),
    )
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n[{model}: {chunk.usage.prompt_tokens} prompt and {chunk.usage.completion_tokens} output tokens]")


if __name__ == "__main__":
    main()
