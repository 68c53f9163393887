"""What happens to a gateway's streams when clients leave, workers break, schedulers restart and strangers knock."""

import contextlib
import json
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import grpc
import grpc.aio
import httpx
import msgspec
import openai
import pytest

from pdmesh.config import GatewayConfig, SecurityConfig
from pdmesh.model import Epoch, RejectReason, RequestId
from pdmesh.wire import session
from pdmesh.wire.endpoint import bind_socket, open_channel, serving
from pdmesh.wire.link import FrameLink, serve_link
from pdmesh.wire.messages import GatewayDown, GatewayUp, Generation, TokenOut, unpack_token_ids
from pdmesh_gateway import generate, token_server
from pdmesh_gateway import request_transcript as transcript
from pdmesh_gateway.gateway_session import GatewaySession, Outlook
from pdmesh_gateway.http import server
from pdmesh_gateway.request_transcript import MAX_BLAME
from pdmesh_testing.running_gateway import RunningGateway, running_gateway
from pdmesh_testing.scripted_mesh import READY, ScriptedMesh, echo_prompt, scripted_mesh, silence

pytestmark = pytest.mark.anyio

BODY = {"prompt": "abc", "max_tokens": 6, "stream": True, "seed": 1}
WHOLE = "abcabc"


@asynccontextmanager
async def served(
    model: Path, mesh: ScriptedMesh, *, gateway: GatewayConfig | None = None
) -> AsyncGenerator[RunningGateway]:
    async with running_gateway(model, mesh.address, gateway=gateway) as running:
        await mesh.until(lambda: len(mesh.registrations) == 1)
        yield running


async def until_ready(client: httpx.AsyncClient, url: str = "") -> None:
    """Wait until a gateway has heard the scheduler's welcome."""
    with anyio.fail_after(30):
        while (await client.get(f"{url}/ready")).status_code != 200:
            pass


async def complete(running: RunningGateway, **fields: Any) -> str:
    """The text of a streamed completion that ends well."""
    async with httpx.AsyncClient(base_url=running.url, timeout=30) as client:
        response = await client.post("/v1/completions", json={**BODY, **fields})
    assert response.status_code == 200, response.text
    *chunks, done = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert done == "[DONE]", response.text
    return "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks)


async def complete_into(texts: list[str], running: RunningGateway) -> None:
    texts.append(await complete(running))


@asynccontextmanager
async def completing(running: RunningGateway, mesh: ScriptedMesh) -> AsyncGenerator[Generation]:
    """A streamed completion, submitted and under way within the block, that ends well."""
    texts: list[str] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(complete_into, texts, running)
        yield (await mesh.next_submit(len(mesh.submitted))).generation
    assert texts == [WHOLE]


@asynccontextmanager
async def under_way(
    model: Path, gateway: GatewayConfig | None = None
) -> AsyncGenerator[tuple[ScriptedMesh, RunningGateway, Generation]]:
    """The same, whose tokens the test sends."""
    async with (
        scripted_mesh(silence) as mesh,
        served(model, mesh, gateway=gateway) as running,
        completing(running, mesh) as generation,
    ):
        yield mesh, running, generation


@asynccontextmanager
async def raw_request(running: RunningGateway, **fields: Any) -> AsyncGenerator[anyio.abc.SocketStream]:
    """A request over a bare socket, closed at the end of the block."""
    host, port = running.facts["http_address"].split(":")
    body = json.dumps({**BODY, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    async with await anyio.connect_tcp(host, int(port)) as stream:
        await stream.send(head + body)
        yield stream


def first_tokens(generation: Generation, count: int) -> list[TokenOut]:
    return [message for message in echo_prompt(generation) if isinstance(message, TokenOut)][:count]


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_cancels_its_request(model: Path, num_tokens: int, stream: bool) -> None:
    async with scripted_mesh(silence) as mesh, served(model, mesh) as running:
        async with raw_request(running, stream=stream, n=2) as client:
            submits = [await mesh.next_submit(i) for i in range(2)]
            for submit in submits:
                mesh.send_tokens(*first_tokens(submit.generation, num_tokens))
            if num_tokens and stream:
                await client.receive()
        await mesh.until(lambda: len(mesh.cancelled) == 2)
        assert sorted(mesh.cancelled) == sorted((s.generation.request_id, Epoch(0)) for s in submits)


async def test_a_client_that_leaves_between_two_does_not_disturb_the_other(model: Path) -> None:
    async with under_way(model) as (mesh, running, generation):
        async with raw_request(running):
            await mesh.next_submit(1)
        await mesh.until(lambda: len(mesh.cancelled) == 1)
        mesh.send_tokens(*first_tokens(generation, 6))


async def test_a_restarted_request_goes_on_where_it_was(model: Path) -> None:
    def dies_twice(generation: Generation) -> list[TokenOut]:
        if generation.epoch < 2:
            mesh.send_tokens(*first_tokens(generation, 2))
            return []
        return first_tokens(generation, 6)

    async with scripted_mesh(dies_twice) as mesh, served(model, mesh) as running:
        async with completing(running, mesh):
            for epoch in range(2):
                generation = (await mesh.next_submit(epoch)).generation
                assert generation.epoch == epoch
                await delivered(running, 2 * epoch + 2)
                mesh.lose(generation)
            await mesh.next_submit(2)
        last = mesh.submitted[2].generation
        assert last.num_output_tokens == 4
        assert last.num_prompt_tokens == 3
        token_ids = list(unpack_token_ids(last.token_ids))
        assert token_ids[3:] == [*token_ids[:3], token_ids[0]]


async def delivered(running: RunningGateway, num_tokens: int) -> None:
    """Until the gateway has counted so many tokens."""
    async with httpx.AsyncClient(base_url=running.url, timeout=30) as client:
        wanted = f'pdmesh:generation_tokens_total{{model_name="tiny"}} {float(num_tokens)}'
        while wanted not in (await client.get("/metrics")).text:
            pass


async def test_a_request_that_causes_one_restart_after_another_ends_with_503(model: Path) -> None:
    def restart(generation: Generation) -> list[TokenOut]:
        mesh.lose(generation)
        return []

    async with scripted_mesh(restart) as mesh, served(model, mesh) as running:
        async with httpx.AsyncClient(base_url=running.url, timeout=30) as client:
            response = await client.post("/v1/completions", json=BODY)
        assert response.status_code == 503
        assert "retry-after" in response.headers
        assert len(mesh.submitted) == MAX_BLAME + 1, "all of the blame each time"


async def test_a_lost_token_resumes_the_request(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcript, "STALL_GRACE_S", 0.01)

    def loses_one(generation: Generation) -> list[TokenOut]:
        tokens = first_tokens(generation, 6)
        return tokens if generation.epoch else [*tokens[:2], *tokens[3:]]

    async with scripted_mesh(loses_one) as mesh, served(model, mesh) as running:
        assert await complete(running) == WHOLE
        assert mesh.cancelled == [(mesh.submitted[0].generation.request_id, Epoch(0))]
        assert mesh.submitted[1].generation.num_output_tokens == 2
        assert [submit.silent_source_id for submit in mesh.submitted] == [None, "scripted"]  # so that it goes elsewhere


async def test_a_broken_worker_stream_resumes_its_requests(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcript, "BREAK_GRACE_S", 0.01)

    def breaks_once(generation: Generation) -> list[TokenOut]:
        return first_tokens(generation, 6) if generation.epoch else first_tokens(generation, 2)

    async with scripted_mesh(breaks_once) as mesh, served(model, mesh) as running, completing(running, mesh):
        await delivered(running, 2)
        mesh.drop_worker()


async def test_tokens_that_overtake_each_other_or_come_late_are_put_right(model: Path) -> None:
    def disorder(generation: Generation) -> list[TokenOut]:
        tokens = first_tokens(generation, 6)
        stale = [msgspec.structs.replace(token, epoch=Epoch(7), token_id=80) for token in tokens]
        foreign = [msgspec.structs.replace(token, request_id=RequestId("nobody")) for token in tokens]
        return [tokens[1], tokens[0], *stale, tokens[0], tokens[1], tokens[3], *foreign, tokens[2], *tokens[4:]]

    async with scripted_mesh(disorder) as mesh, served(model, mesh) as running:
        assert await complete(running) == WHOLE
        assert len(mesh.submitted) == 1


async def test_running_generations_survive_a_scheduler_restart(model: Path) -> None:
    async with under_way(model) as (mesh, _running, generation):
        mesh.send_tokens(*first_tokens(generation, 2))
        mesh.drop_gateway()
        await mesh.until(lambda: len(mesh.registrations) == 2)
        assert mesh.registrations[1].waiting == ((generation.request_id, Epoch(0)),)
        assert mesh.registrations[1].gateway_id == mesh.registrations[0].gateway_id
        mesh.send_tokens(*first_tokens(generation, 6)[2:])


async def test_a_new_scheduler_hears_of_what_nobody_works_on(model: Path) -> None:
    async with under_way(model) as (mesh, _running, first):
        mesh.drop_gateway()
        again = (await mesh.next_submit(1)).generation
        assert again == first
        mesh.send_tokens(*first_tokens(again, 6))


async def test_the_same_scheduler_hears_what_it_was_sent_and_nothing_came_of(model: Path) -> None:
    """Of two requests one has its first token. The other may be lost with the stream: the scheduler knows."""
    texts: list[str] = []
    async with scripted_mesh(silence) as mesh:
        mesh.scheduler_id = "the same"
        async with served(model, mesh) as running, anyio.create_task_group() as tasks:
            tasks.start_soon(complete_into, texts, running)
            begun = (await mesh.next_submit(0)).generation
            mesh.send_tokens(*first_tokens(begun, 1))
            await delivered(running, 1)
            tasks.start_soon(complete_into, texts, running)
            lost = (await mesh.next_submit(1)).generation
            mesh.drop_gateway()
            await mesh.until(lambda: len(mesh.registrations) == 2)
            again = mesh.registrations[1]
            assert set(again.waiting) == {(begun.request_id, Epoch(0)), (lost.request_id, Epoch(0))}
            assert (again.scheduler_id, again.unbegun) == ("the same", (lost.request_id,))
            mesh.lose(lost)
            resumed = (await mesh.next_submit(2)).generation
            assert (resumed.request_id, resumed.epoch) == (lost.request_id, Epoch(1))
            mesh.send_tokens(*first_tokens(begun, 6)[1:], *first_tokens(resumed, 6))
    assert texts == [WHOLE, WHOLE]


async def test_a_resume_waits_for_a_scheduler(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scheduler and decode instance die together: the stream goes on when there is a scheduler again."""
    monkeypatch.setattr(transcript, "BREAK_GRACE_S", 0.01)
    monkeypatch.setattr(session, "FIRST_PAUSE_S", 1.0)
    async with under_way(model) as (mesh, running, generation):
        mesh.send_tokens(*first_tokens(generation, 2))
        await delivered(running, 2)
        mesh.drop_gateway()
        mesh.drop_worker()
        resumed = (await mesh.next_submit(1)).generation
        assert (resumed.request_id, resumed.epoch) == (generation.request_id, Epoch(1))
        assert mesh.registrations[1].waiting == ()  # the scheduler is to look for nothing
        mesh.send_tokens(*first_tokens(resumed, 4))


async def test_a_scheduler_that_stands_still_does_not_end_the_gateway(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes streams, and never says a word on them."""
    monkeypatch.setattr(session, "ANSWER_LIMIT_S", 0.05)
    monkeypatch.setattr(session, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(generate, "CONNECT_GRACE_S", 0.01)
    num_attempts, several = 0, anyio.Event()

    async def stand_still(link: FrameLink[GatewayDown, GatewayUp], _peer: str) -> None:
        nonlocal num_attempts
        num_attempts += 1
        if num_attempts == 3:
            several.set()
        await anyio.sleep_forever()

    methods = {"Gateway": serve_link(stand_still, GatewayUp)}
    async with (
        serving("pdmesh.v1.Scheduler", methods, host="127.0.0.1", port=0, security=SecurityConfig()) as port,
        running_gateway(model, f"127.0.0.1:{port}") as running,
        httpx.AsyncClient(base_url=running.url, timeout=30) as client,
    ):
        with anyio.fail_after(30):
            await several.wait()
        response = await client.post("/v1/completions", json=BODY)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")


async def test_without_a_scheduler_requests_wait_a_little_and_get_503(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "CONNECT_GRACE_S", 0.01)
    async with (
        running_gateway(model, "127.0.0.1:1") as running,
        httpx.AsyncClient(base_url=running.url, timeout=30) as client,
    ):
        response = await client.post("/v1/completions", json=BODY)
        assert response.status_code == 503
        assert "retry-after" in response.headers
        assert (await client.get("/ready")).status_code == 503


NOT_READY = msgspec.structs.replace(READY, ready=False, reason="no decode instance is running", instances=())


async def test_without_a_usable_instance_a_new_request_gets_503_in_seconds(model: Path) -> None:
    config = GatewayConfig(no_instance_grace_s=0.01)
    async with scripted_mesh(silence) as mesh:
        mesh.state = NOT_READY
        async with (
            served(model, mesh, gateway=config) as running,
            httpx.AsyncClient(base_url=running.url, timeout=30) as client,
        ):
            for stream in (True, False):
                response = await client.post("/v1/completions", json={**BODY, "stream": stream})
                assert response.status_code == 503
                assert "no decode instance is running" in response.json()["error"]["message"]
                assert int(response.headers["retry-after"]) >= 1
        assert not mesh.submitted


def noticed_waiting(monkeypatch: pytest.MonkeyPatch) -> anyio.Event:
    """Set when a request begins to wait for the mesh."""
    waiting = anyio.Event()
    wait_changed = GatewaySession.wait_changed

    async def noticed(link: GatewaySession, outlook: Outlook) -> None:
        waiting.set()
        await wait_changed(link, outlook)

    monkeypatch.setattr(GatewaySession, "wait_changed", noticed)
    return waiting


@pytest.mark.parametrize("num_coming", [0, 1])
async def test_a_request_does_not_hear_of_an_instance_that_is_back_within_the_grace_or_known_to_come(
    model: Path, monkeypatch: pytest.MonkeyPatch, num_coming: int
) -> None:
    waiting = noticed_waiting(monkeypatch)
    async with scripted_mesh() as mesh:
        mesh.state = msgspec.structs.replace(NOT_READY, num_coming=num_coming)
        grace_s = 1e-6 if num_coming else 60
        async with served(model, mesh, gateway=GatewayConfig(no_instance_grace_s=grace_s)) as running:
            texts: list[str] = []
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(complete_into, texts, running)
                with anyio.fail_after(20):
                    await waiting.wait()
                assert not mesh.submitted
                mesh.set_state(READY)
            assert texts == [WHOLE]


async def test_a_request_that_waits_hears_at_last_that_nobody_comes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instance that was being started again could not be."""
    waiting = noticed_waiting(monkeypatch)
    async with scripted_mesh(silence) as mesh:
        mesh.state = msgspec.structs.replace(NOT_READY, num_coming=1)
        statuses: list[int] = []
        async with (
            served(model, mesh, gateway=GatewayConfig(no_instance_grace_s=0.01)) as running,
            httpx.AsyncClient(base_url=running.url, timeout=30) as client,
            anyio.create_task_group() as tasks,
        ):

            async def ask() -> None:
                statuses.append((await client.post("/v1/completions", json=BODY)).status_code)

            tasks.start_soon(ask)
            with anyio.fail_after(20):
                await waiting.wait()
            mesh.set_state(NOT_READY)
        assert statuses == [503]


async def test_a_request_under_way_outlasts_a_mesh_without_instances(model: Path) -> None:
    async with under_way(model, GatewayConfig(no_instance_grace_s=0.01)) as (mesh, running, generation):
        mesh.send_tokens(*first_tokens(generation, 2))
        await delivered(running, 2)
        mesh.set_state(NOT_READY)
        mesh.lose(generation)
        again = (await mesh.next_submit(1)).generation
        mesh.set_state(READY)
        mesh.send_tokens(*first_tokens(again, 6)[2 - again.num_output_tokens :])


async def test_a_stream_that_waits_says_that_it_lives(model: Path) -> None:
    config = GatewayConfig(sse_keep_alive_s=0.01)
    async with (
        scripted_mesh(silence) as mesh,
        served(model, mesh, gateway=config) as running,
        httpx.AsyncClient(base_url=running.url, timeout=30) as client,
        client.stream("POST", "/v1/completions", json=BODY) as response,
    ):
        generation = (await mesh.next_submit(0)).generation
        lines = response.aiter_lines()
        assert [await anext(lines) for _ in range(4)] == [": keep-alive", ""] * 2  # before the first token
        mesh.send_tokens(*first_tokens(generation, 2))
        while not (line := await anext(lines)).startswith("data: "):
            assert line in (": keep-alive", "")
        while await anext(lines) != ": keep-alive":  # and between two
            pass
        mesh.send_tokens(*first_tokens(generation, 6)[2:])
        rest = [line async for line in lines]
        assert "data: [DONE]" in rest


async def test_keep_alives_are_nothing_to_the_openai_client(model: Path) -> None:
    async with (
        scripted_mesh(silence) as mesh,
        served(model, mesh, gateway=GatewayConfig(sse_keep_alive_s=0.01)) as running,
        openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="-", max_retries=0) as client,
    ):
        # The response begins with a keep-alive: there is no token yet.
        stream = await client.completions.create(model="tiny", prompt="abc", max_tokens=6, stream=True)
        mesh.send_tokens(*first_tokens((await mesh.next_submit(0)).generation, 6))
        assert "".join([chunk.choices[0].text async for chunk in stream]) == WHOLE


@pytest.mark.parametrize("keep_alive_s", [0.0, 0.01])
async def test_an_error_before_the_first_token_is_a_status_until_a_keep_alive_was_sent(
    model: Path, keep_alive_s: float
) -> None:
    async with (
        scripted_mesh(silence) as mesh,
        served(model, mesh, gateway=GatewayConfig(sse_keep_alive_s=keep_alive_s)) as running,
        httpx.AsyncClient(base_url=running.url, timeout=30) as client,
    ):

        async def refuse() -> None:
            mesh.refuse((await mesh.next_submit(0)).generation, RejectReason.QUEUE_TIMEOUT)

        async with anyio.create_task_group() as tasks:
            if not keep_alive_s:
                tasks.start_soon(refuse)
            async with client.stream("POST", "/v1/completions", json=BODY) as response:
                if keep_alive_s:
                    await refuse()
                text = (await response.aread()).decode()
                assert response.status_code == (200 if keep_alive_s else 503)
                assert '"code":"queue_timeout"' in text
                assert "[DONE]" not in text


@pytest.mark.parametrize("reason", [RejectReason.QUEUE_TIMEOUT, RejectReason.OVERLOADED])
async def test_a_choice_without_room_does_not_end_the_answer_of_another(model: Path, reason: RejectReason) -> None:
    """Seed 419178 of the simulation. It waits on, as a resumed request does, until the deadline."""

    async with scripted_mesh(silence) as mesh, served(model, mesh) as running:
        texts: list[str] = []
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                async with httpx.AsyncClient(base_url=running.url, timeout=30) as client:
                    response = await client.post("/v1/completions", json={**BODY, "n": 2, "stream": False})
                assert response.status_code == 200, response.text
                texts.extend(choice["text"] for choice in response.json()["choices"])

            tasks.start_soon(ask)
            first, other = [(await mesh.next_submit(i)).generation for i in range(2)]
            mesh.send_tokens(*first_tokens(first, 2))
            await delivered(running, 2)
            mesh.refuse(other, reason)
            again = (await mesh.next_submit(2)).generation
            assert (again.request_id, again.epoch) == (other.request_id, 1)
            mesh.send_tokens(*first_tokens(first, 6)[2:])
            mesh.send_tokens(*first_tokens(again, 6))
        assert texts == [WHOLE, WHOLE]


async def test_a_worker_of_whom_nothing_is_heard_is_done_without(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network loses what it sends without a word: its stream is as whole as ever."""
    monkeypatch.setattr(token_server, "HEARTBEAT_S", 0.02)
    async with under_way(model) as (mesh, running, generation):
        mesh.send_tokens(*first_tokens(generation, 2))
        await delivered(running, 2)
        mesh.worker_beats = False
        resumed = await mesh.next_submit(1)
        assert (resumed.generation.epoch, resumed.silent_source_id) == (1, "scripted")
        mesh.worker_beats = True
        await mesh.connect_worker(generation.token_address)
        mesh.send_tokens(*first_tokens(resumed.generation, 4))


async def test_garbage_on_any_port_disturbs_nobody(model: Path) -> None:
    async with under_way(model) as (mesh, running, generation):
        mesh.send_tokens(*first_tokens(generation, 2))
        for name in ("http_address", "grpc_address", "token_address"):
            host, port = running.facts[name].split(":")
            async with await anyio.connect_tcp(host, int(port)) as stream:
                await stream.send(os.urandom(4096))
                with anyio.fail_after(20):
                    try:
                        while True:
                            await stream.receive()
                    except (anyio.EndOfStream, anyio.BrokenResourceError):
                        pass
        for frame in (b"", b"\xff" * 50, msgspec.msgpack.encode([{"type": "TokensAccepted"}])):
            await expect_refusal(running, frame)
        version = msgspec.msgpack.encode([{"type": "RegisterTokens", "instance_id": "x", "version": 99}])
        await expect_refusal(running, version)
        mesh.send_tokens(*first_tokens(generation, 6)[2:])


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHost:"])
async def test_a_client_whose_request_does_not_come_is_hung_up_on(
    model: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """And no other, whose answer takes longer than that."""
    monkeypatch.setattr(server, "HEAD_LIMIT_S", 0.5)
    async with under_way(model) as (mesh, running, generation):
        host, port = running.facts["http_address"].split(":")
        async with await anyio.connect_tcp(host, int(port)) as stream:
            await stream.send(sent)
            with anyio.fail_after(20), pytest.raises(anyio.EndOfStream):
                await stream.receive()
        mesh.send_tokens(*first_tokens(generation, 6))


async def expect_refusal(running: RunningGateway, frame: bytes) -> None:
    async with open_channel(running.facts["token_address"], SecurityConfig()) as channel:
        call: Any = channel.stream_stream("/pdmesh.v1.Gateway/Tokens")()
        await call.write(frame)
        with anyio.fail_after(20), pytest.raises(grpc.aio.AioRpcError) as failed:
            await call.read()
        assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_draining_lets_streams_end_and_takes_no_new_ones(model: Path) -> None:
    async with under_way(model) as (mesh, running, generation):
        mesh.send_tokens(*first_tokens(generation, 2))
        await delivered(running, 2)
        running.stopping.set()
        host, port = running.facts["http_address"].split(":")
        with anyio.fail_after(20):
            while True:  # until the listener is closed
                try:
                    await (await anyio.connect_tcp(host, int(port))).aclose()
                except OSError:
                    break
        mesh.send_tokens(*first_tokens(generation, 6)[2:])


async def test_a_gateway_that_stops_is_not_ready_at_once_and_answers_what_is_on_its_way(model: Path) -> None:
    async with (
        scripted_mesh(silence) as mesh,
        served(model, mesh) as running,
        httpx.AsyncClient(base_url=running.url, timeout=30) as client,
    ):
        await until_ready(client)
        running.stopping.set()
        answer = await client.get("/ready")  # on the connection that was idle
        assert answer.status_code == 503
        assert "the gateway is stopping" in answer.text
        assert answer.headers["connection"] == "close"


async def test_gateways_that_share_a_port_lose_no_connection_when_one_goes(model: Path) -> None:
    holder = bind_socket("127.0.0.1", 0, setting="test")
    configs = [GatewayConfig(listen_fd=os.dup(holder.fileno())) for _ in range(2)]
    url = f"http://127.0.0.1:{holder.getsockname()[1]}"
    async with scripted_mesh(silence) as mesh, running_gateway(model, mesh.address, gateway=configs[0]) as stays:
        async with running_gateway(model, mesh.address, gateway=configs[1]) as goes:
            await mesh.until(lambda: len(mesh.registrations) == 2)
            assert stays.facts["http_address"] == goes.facts["http_address"] != goes.facts["own_address"]
            async with httpx.AsyncClient(timeout=30) as client:
                for each in (stays, goes):
                    await until_ready(client, f"http://{each.facts['own_address']}")
            goes.stopping.set()
            for _ in range(20):
                async with httpx.AsyncClient(base_url=url, timeout=30) as client:
                    assert (await client.get("/ready")).status_code == 200
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            assert (await client.get("/ready")).status_code == 200
    holder.close()


async def test_a_stream_that_must_end_ends_with_an_error_event(model: Path) -> None:
    """Once draining has taken as long as it may."""
    async with scripted_mesh(silence) as mesh, served(model, mesh) as running:
        async with raw_request(running) as client:
            submit = await mesh.next_submit(0)
            mesh.send_tokens(*first_tokens(submit.generation, 2))
            received = b""
            with anyio.fail_after(20):
                while b"data: " not in received:
                    received += await client.receive()
                running.stopping.set()
                running.ending.set()
                with contextlib.suppress(anyio.EndOfStream):
                    while True:
                        received += await client.receive()
        events = [line for line in received.decode().splitlines() if line.startswith("data: ")]
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "stopping"
        assert "[DONE]" not in received.decode()


async def says(client: httpx.AsyncClient, max_model_len: int) -> None:
    """Wait until a gateway says that contexts may be so long."""
    with anyio.fail_after(20):
        while (await client.get("/v1/models")).json()["data"][0]["max_model_len"] != max_model_len:  # noqa: ASYNC110
            await anyio.sleep(0.01)  # its scheduler's word is on its way


@pytest.mark.parametrize("scheduler_id", ["", "the same"])
async def test_what_fitted_before_a_scheduler_was_started_again_is_not_refused_while_instances_register(
    model: Path, scheduler_id: str
) -> None:
    """Where contexts are spread, the longest that is served follows from how many instances have registered."""
    async with (
        scripted_mesh() as mesh,
        served(model, mesh) as running,
        httpx.AsyncClient(base_url=running.url, timeout=30) as client,
    ):
        mesh.scheduler_id = scheduler_id
        for max_model_len in (400, 100, 200):  # the second one is started again before all have registered with it
            mesh.state = msgspec.structs.replace(READY, max_model_len=max_model_len)
            num_registrations = len(mesh.registrations)
            mesh.drop_gateway()
            await mesh.until(lambda num=num_registrations: len(mesh.registrations) > num)  # type: ignore[misc]
            await says(client, max_model_len if scheduler_id else 400)
        body = {"prompt": [7] * 300, "max_tokens": 20}
        assert (await client.post("/v1/completions", json=body)).status_code == (400 if scheduler_id else 200)
        mesh.set_state(msgspec.structs.replace(READY, max_model_len=500))
        await says(client, 500)
