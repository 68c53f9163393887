"""A streaming client that notes when each token comes."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import httpx


@dataclass(slots=True)
class Answer:
    """What a stream brought, and when, on the clock of `time.perf_counter`."""

    began_s: float
    token_ids: list[int] = field(default_factory=list[int])
    times_s: list[float] = field(default_factory=list[float])
    num_cached_tokens: int = 0
    response_id: str = ""

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.began_s

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.times_s, self.times_s[1:], strict=False)]


async def ask(
    client: httpx.AsyncClient,
    prompt: Sequence[int],
    max_tokens: int,
    headers: Mapping[str, str] | None = None,
    /,
    **fields: object,
) -> Answer:
    """Run one stream to its end; raise httpx.HTTPError if it is refused, and KeyError if it ends with an error."""
    body = {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **fields,
    }
    answer = Answer(time.perf_counter())
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            answer.response_id = event["id"]
            for choice in event["choices"]:
                answer.times_s += [time.perf_counter()] * bool(choice["token_ids"])
                answer.token_ids += choice["token_ids"]
            if event.get("usage"):
                details = event["usage"].get("prompt_tokens_details") or {}  # another server may tell nothing
                answer.num_cached_tokens = details.get("cached_tokens", 0)
    return answer
