"""Bugs at every depth of the gateway: no client meets a bare 500, no other request is hurt, and none goes unseen."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from pdmesh.model import Epoch
from pdmesh.wire.messages import Generation, TokenOut
from pdmesh_gateway.choices import Choice
from pdmesh_gateway.generate import Generator
from pdmesh_gateway.http.completions_endpoint import CompletionsEndpoint
from pdmesh_gateway.model_tokenizer import ModelTokenizer
from pdmesh_gateway.proto import pdmesh_pb2 as pb
from pdmesh_gateway.proto import pdmesh_pb2_grpc as pb_grpc
from pdmesh_gateway.request_transcript import Transcript
from pdmesh_testing.gateway import ready_gateway
from pdmesh_testing.scripted_mesh import echo_prompt

pytestmark = pytest.mark.anyio

BODY = {"prompt": "abc", "max_tokens": 6, "seed": 1}

#: Whatever may be raised: a plain error, a group that is no Exception, and what grpc.aio raises for no reason of ours.
RAISED: dict[str, Callable[[], BaseException]] = {
    "error": lambda: RuntimeError("a bug"),
    "group": lambda: BaseExceptionGroup("bugs", [asyncio.CancelledError()]),
    "bare cancellation": asyncio.CancelledError,
}

#: Where it is raised: in a handler, where a prompt is tokenized, where a request is submitted, in a transcript, where
#: tokens become text.
DEPTHS: dict[str, tuple[type[Any], str]] = {
    "handler": (CompletionsEndpoint, "prepare"),
    "tokenizer": (ModelTokenizer, "encode"),
    "submission": (Generator, "_submit"),
    "transcript": (Transcript, "offer"),
    "text": (Choice, "advance"),
}


def raising(device_class: Callable[[], BaseException]) -> Callable[..., None]:
    def broken(*_args: object, **_kwargs: object) -> None:
        raise device_class()

    return broken


def failures_in(logs: list[EventDict]) -> list[EventDict]:
    return [entry for entry in logs if entry["event"] == "request failed"]


async def counted(client: httpx.AsyncClient) -> float:
    text = (await client.get("/metrics")).text
    values = [line.split()[-1] for line in text.splitlines() if line.startswith("pdmesh:internal_errors_total{")]
    return sum(map(float, values))


@pytest.mark.parametrize(
    ("depth", "raised"),
    [(d, r) for d in DEPTHS for r in RAISED if d != "transcript" or r == "error"],  # nothing there is cancelled
)
@pytest.mark.parametrize("stream", [True, False])
async def test_whatever_is_raised_is_an_error_with_a_type_and_an_id(
    model: Path, monkeypatch: pytest.MonkeyPatch, depth: str, raised: str, stream: bool
) -> None:
    async with ready_gateway(model) as (client, _mesh, _running):
        with monkeypatch.context() as patched, capture_logs() as logs:
            patched.setattr(*DEPTHS[depth], raising(RAISED[raised]))
            response = await client.post("/v1/completions", json={**BODY, "stream": stream})
        assert response.status_code == 500
        assert response.headers["content-type"] == "application/json"
        error = response.json()["error"]
        request_id = response.headers["x-request-id"]
        assert (error["type"], error["code"]) == ("server_error", "internal_error")
        assert request_id in error["message"]
        (logged,) = failures_in(logs)
        assert logged["request_id"] == request_id
        assert isinstance(logged["exc_info"], BaseException)
        assert logged["exc_info"].__traceback__ is not None
        assert await counted(client) == 1
        after = await client.post("/v1/completions", json=BODY)
        assert after.json()["choices"][0]["text"] == "abcabc"


def tokens_of(generation: Generation) -> list[TokenOut]:
    return [message for message in echo_prompt(generation) if isinstance(message, TokenOut)]


def first_token(generation: Generation) -> list[TokenOut]:
    """A script: the answer begins, for a stream's headers come with its first token; the test sends the others."""
    return tokens_of(generation)[:1]


async def first_event(lines: Any) -> dict[str, Any]:
    async for line in lines:
        if line.startswith("data: "):
            return dict(json.loads(line[6:]))
    raise AssertionError("no event")


@pytest.mark.parametrize("depth", ["transcript", "text", "scheduler's word", "rendering"])
async def test_a_stream_that_has_begun_ends_with_an_error_event(
    model: Path, monkeypatch: pytest.MonkeyPatch, depth: str
) -> None:
    """And another that shares the worker's and the scheduler's streams goes on."""
    async with ready_gateway(model, first_token) as (client, mesh, _running), asyncio.TaskGroup() as tasks:
        other = tasks.create_task(client.post("/v1/completions", json=BODY))
        beside = (await mesh.next_submit(0)).generation
        with monkeypatch.context() as patched, capture_logs() as logs:
            async with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
                generation = (await mesh.next_submit(1)).generation
                lines = response.aiter_lines()
                assert (await first_event(lines))["choices"][0]["text"] == "a"
                break_at(depth, patched, generation)
                if depth == "scheduler's word":
                    mesh.lose(generation)
                else:
                    mesh.send_tokens(tokens_of(generation)[1])
                last = await first_event(lines)
                assert [line async for line in lines if line] == [], "nothing comes after it, no [DONE] either"
        assert (last["error"]["type"], last["error"]["code"]) == ("server_error", "internal_error")
        assert response.headers["x-request-id"] in last["error"]["message"]
        assert len(failures_in(logs)) == 1
        await mesh.until(lambda: (generation.request_id, Epoch(0)) in mesh.cancelled)
        assert await counted(client) == 1
        mesh.send_tokens(*tokens_of(beside)[1:])
        assert (await other).json()["choices"][0]["text"] == "abcabc"


def break_at(depth: str, patched: pytest.MonkeyPatch, generation: Generation) -> None:
    """Let what is done for this request fail from now on."""
    match depth:
        case "transcript":
            offer = Transcript.offer

            def offered(transcript: Transcript, token: TokenOut, source: Any) -> None:
                if transcript.request_id == generation.request_id:
                    raise RuntimeError("a bug")
                offer(transcript, token, source)

            patched.setattr(Transcript, "offer", offered)
        case "text":
            patched.setattr(Choice, "advance", raising(RAISED["bare cancellation"]))
        case "rendering":
            patched.setattr("pdmesh_gateway.http.sse.ChunkWriter.text", raising(RAISED["error"]))
        case _:
            patched.setattr(Generator, "resume", raising(RAISED["error"]))


@pytest.mark.parametrize("raised", RAISED)
@pytest.mark.parametrize("depth", [depth for depth in DEPTHS if depth not in ("handler", "transcript")])
async def test_over_grpc_it_is_a_status_with_type_and_id(
    model: Path, monkeypatch: pytest.MonkeyPatch, depth: str, raised: str
) -> None:
    async with ready_gateway(model) as (client, _mesh, running):
        channel = grpc.aio.insecure_channel(running.facts["grpc_address"])
        async with channel:
            stub: Any = pb_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
            request = pb.GenerateRequest(text="abc", sampling=pb.SamplingOptions(max_tokens=6))
            with monkeypatch.context() as patched, capture_logs() as logs:
                patched.setattr(*DEPTHS[depth], raising(RAISED[raised]))
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    [response async for response in stub.Generate(request)]
            metadata = dict(failed.value.trailing_metadata() or ())
            assert failed.value.code() is grpc.StatusCode.INTERNAL
            assert metadata["error-type"] == "server_error"
            assert str(metadata["x-request-id"]) in (failed.value.details() or "")
            (logged,) = failures_in(logs)
            assert logged["request_id"] == metadata["x-request-id"]
            assert await counted(client) == 1
            assert "".join([response.text async for response in stub.Generate(request)]) == "abcabc"
