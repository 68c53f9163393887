"""The streaming client of benchmarks and live runs, and turns that it sends."""

from __future__ import annotations

import json
from collections.abc import Sequence

import httpx
import pytest

from pdmesh_testing.live_agents import REFUSED, stream_turn
from pdmesh_testing.streaming import ask

pytestmark = pytest.mark.anyio

CHUNK = {"id": "cmpl-1", "choices": [{"token_ids": [5, 6]}]}
USAGE = {"id": "cmpl-1", "choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 2}}}


def client(events: Sequence[object], status: int = 200) -> httpx.AsyncClient:
    """Return a client of a server that answers each request with these events, and notes the requests."""
    lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events)

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["x-session-id"] == "agent"
        assert json.loads(request.content)["prompt"] == [1, 2, 3]
        return httpx.Response(status, text=f": waits\n\n{lines}data: [DONE]\n\n")

    return httpx.AsyncClient(base_url="http://mesh", transport=httpx.MockTransport(answer))


async def test_an_answer_has_all_tokens_with_times_and_what_was_cached() -> None:
    answer = await ask(client([CHUNK, CHUNK, USAGE]), [1, 2, 3], 4, {"x-session-id": "agent"})
    assert answer.token_ids == [5, 6, 5, 6]
    assert len(answer.times_s) == 2
    assert answer.ttft_s >= 0
    assert (answer.num_cached_tokens, answer.response_id) == (2, "cmpl-1")


async def test_a_turn_that_is_refused_at_once_or_while_it_waits_is_no_error() -> None:
    for events, status in (([], 429), ([{"error": {"message": "No instance had room."}}], 200)):
        assert await stream_turn(client(events, status), [1, 2, 3], 4, {"x-session-id": "agent"}) is REFUSED
    turn = await stream_turn(client([CHUNK, USAGE]), [1, 2, 3], 2, {"x-session-id": "agent"})
    assert (turn.num_prompt_tokens, turn.num_cached_tokens) == (3, 2)


async def test_a_turn_raises_an_error_that_is_no_refusal() -> None:
    with pytest.raises(httpx.HTTPStatusError):
        await stream_turn(client([], 500), [1, 2, 3], 4, {"x-session-id": "agent"})
