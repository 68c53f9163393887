"""The protobuf edge: Generate, health, reflection."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import grpc
import grpc.aio
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from pdmesh.config import SecurityConfig
from pdmesh.wire.messages import TokenOut
from pdmesh_gateway import grpc_guard
from pdmesh_gateway.proto import pdmesh_pb2 as pb
from pdmesh_gateway.proto import pdmesh_pb2_grpc as pb_grpc
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.running_gateway import running_gateway
from pdmesh_testing.scripted_mesh import READY, ScriptedMesh, echo_prompt, scripted_mesh, silence

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def served(
    model: Path, security: SecurityConfig | None = None
) -> AsyncGenerator[tuple[grpc.aio.Channel, ScriptedMesh]]:
    async with scripted_mesh() as mesh, running_gateway(model, mesh.address, security=security) as running:
        await mesh.until(lambda: len(mesh.registrations) == 1)
        async with grpc.aio.insecure_channel(running.facts["grpc_address"]) as channel:
            yield channel, mesh


def stub(channel: grpc.aio.Channel) -> Any:
    return pb_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]


async def test_generate_streams_text_and_tokens(model: Path) -> None:
    async with served(model) as (channel, mesh):
        sampling = pb.SamplingOptions(max_tokens=9, stop=["ca"], logprobs=1, seed=3, top_p=0.0)
        request = pb.GenerateRequest(request_id="mine", text="abc", sampling=sampling, priority=2, slo_ttft_ms=500)
        responses = [response async for response in stub(channel).Generate(request)]
        assert "".join(response.text for response in responses) == "ab"
        token_ids = [token_id for response in responses for token_id in response.token_ids]
        assert len(token_ids) == 4
        assert sum(len(response.logprobs) for response in responses) == 4
        last = responses[-1]
        assert (last.finish_reason, last.stop_string) == (pb.FINISH_REASON_STOP, "ca")
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 4)
        assert mesh.submitted[0].priority == 2
        assert (mesh.submitted[0].slo_ttft_s, mesh.submitted[0].slo_tpot_s) == (0.5, None)
        params = mesh.submitted[0].generation.params
        assert (params.seed, params.top_p) == (3, 0.0)  # the smallest nucleus

        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=token_ids[:3]), sampling=pb.SamplingOptions(max_tokens=6)
        )
        responses = [response async for response in stub(channel).Generate(request)]
        assert "".join(response.text for response in responses) == "abcabc"
        assert responses[-1].finish_reason == pb.FINISH_REASON_LENGTH


async def test_bad_requests_have_a_status_and_a_reason(model: Path) -> None:
    async with served(model, SecurityConfig(api_key="secret")) as (channel, _mesh):
        authorized = (("authorization", "Bearer secret"),)
        cases = [
            (pb.GenerateRequest(text="a"), None, grpc.StatusCode.UNAUTHENTICATED),
            (pb.GenerateRequest(), authorized, grpc.StatusCode.INVALID_ARGUMENT),
            (pb.GenerateRequest(text="a", model="other"), authorized, grpc.StatusCode.NOT_FOUND),
            (
                pb.GenerateRequest(text="a", sampling=pb.SamplingOptions(temperature=-1)),
                authorized,
                grpc.StatusCode.INVALID_ARGUMENT,
            ),
            (
                pb.GenerateRequest(text="a", slo_tpot_ms=float("nan")),
                authorized,
                grpc.StatusCode.INVALID_ARGUMENT,
            ),
            (
                pb.GenerateRequest(text="a", sampling=pb.SamplingOptions(max_tokens=1000)),
                authorized,
                grpc.StatusCode.INVALID_ARGUMENT,
            ),
        ]
        for request, metadata, code in cases:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                async for _response in stub(channel).Generate(request, metadata=metadata):
                    pass
            assert failed.value.code() is code, failed.value.details()
            assert failed.value.details()


async def test_a_client_that_leaves_cancels_its_request(model: Path) -> None:
    async with served(model) as (channel, mesh):
        mesh.script = silence
        call = stub(channel).Generate(pb.GenerateRequest(text="abc"))
        await mesh.next_submit()
        call.cancel()
        await mesh.until(lambda: len(mesh.cancelled) == 1)


async def test_health_follows_the_mesh(model: Path) -> None:
    async with served(model) as (channel, mesh):
        health: Any = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service="pdmesh.api.v1.Inference"))
        statuses = [(await watch.read()).status]
        while statuses[-1] != health_pb2.HealthCheckResponse.SERVING:
            statuses.append((await watch.read()).status)
        mesh.set_state(msgspec.structs.replace(READY, ready=False, reason="gone"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()


async def test_probes_without_a_key_are_few_and_take_no_place_from_requests(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_guard, "MAX_PROBES", 2)
    async with served(model, SecurityConfig(api_key="secret")) as (channel, _mesh):
        health: Any = health_pb2_grpc.HealthStub(channel)
        watches = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for watch in watches:
            await watch.read()
        assert await code_of(health.Watch(health_pb2.HealthCheckRequest())) is grpc.StatusCode.RESOURCE_EXHAUSTED
        await health.Check(health_pb2.HealthCheckRequest())  # a method's places are its own
        for watch in watches:
            watch.cancel()
        while await code_of(again := health.Watch(health_pb2.HealthCheckRequest())) is not grpc.StatusCode.OK:
            pass  # until the server has heard
        again.cancel()


async def test_a_probe_that_asks_nothing_is_hung_up_on(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_guard, "PROBE_LIMIT_S", 0.05)
    async with served(model) as (channel, _mesh):
        for method in ("Check", "Watch"):
            call: Any = channel.stream_stream(f"/grpc.health.v1.Health/{method}")()  # sends nothing
            assert await code_of(call) is grpc.StatusCode.INVALID_ARGUMENT


async def code_of(call: Any) -> grpc.StatusCode:
    """OK if it has an answer."""
    with anyio.fail_after(20):
        try:
            assert await call.read() is not grpc.aio.EOF
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_reflection_names_the_services(model: Path) -> None:
    async with served(model) as (channel, _mesh):
        stub_type: Any = reflection_pb2_grpc.ServerReflectionStub
        call = stub_type(channel).ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        response = await call.read()
        names = {service.name for service in response.list_services_response.service}
        assert {"pdmesh.api.v1.Inference", "grpc.health.v1.Health"} <= names
        call.cancel()


@pytest.mark.parametrize("key", [None, "wrong"])
async def test_without_a_key_not_one_message_is_read(model: Path, key: str | None) -> None:
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    async with served(model, SecurityConfig(api_key="secret")) as (channel, mesh):
        for method in ("/pdmesh.api.v1.Inference/Generate", f"/{reflection.SERVICE_NAME}/ServerReflectionInfo"):
            call: Any = channel.stream_stream(method)(metadata=metadata)  # sends nothing, and has its answer
            with anyio.fail_after(20), pytest.raises(grpc.aio.AioRpcError) as failed:
                await call.read()
            assert failed.value.code() is grpc.StatusCode.UNAUTHENTICATED
        health: Any = health_pb2_grpc.HealthStub(channel)
        await health.Check(health_pb2.HealthCheckRequest())  # probes carry no key
        assert not mesh.submitted


@pytest.mark.parametrize(
    "method",
    [
        "/pdmesh.api.v1.Inference/Generate",
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        f"/{reflection.SERVICE_NAME}/ServerReflectionInfo",
    ],
)
async def test_a_malformed_message_is_the_clients_mistake(model: Path, method: str) -> None:
    async with served(model) as (channel, _mesh):
        call: Any = channel.stream_stream(method)()
        await call.write(b"\xff" * 50)
        await call.done_writing()
        with anyio.fail_after(20):
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_message_is_no_longer_than_a_prompt_can_be(model: Path) -> None:
    async with served(model) as (channel, mesh):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            async for _response in stub(channel).Generate(pb.GenerateRequest(text="a" * 1_100_000)):
                pass
        assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not mesh.submitted


async def test_a_chat_is_answered_with_items(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    template += "{# <tool_call> #}"
    model = write_checkpoint(tmp_path / "tiny", max_position_embeddings=512, template=template)
    call = '{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
    async with served(model) as (channel, mesh):
        chat = pb.Chat(
            messages=[pb.Message(role="user", content=f"<tool_call>\n{call}END")],
            tools=[pb.Tool(name="f", parameters=schema)],
            tool_choice=pb.ToolChoice(mode=pb.ToolChoice.REQUIRED),
        )
        stops = ["</tool_call>", "}", '"a"', "END"]  # the prompt is echoed, and stop strings do not act within calls
        request = pb.GenerateRequest(chat=chat, sampling=pb.SamplingOptions(max_tokens=100, stop=stops))
        responses = [response async for response in stub(channel).Generate(request)]
        events = [event for response in responses for event in response.events]
        begun = events[0].begun
        assert (begun.kind, begun.name, len(begun.id)) == (pb.ITEM_KIND_CALL, "f", 29)
        assert "".join(event.arguments for event in events) == '{"a": 1}'
        assert events[-1].ended
        assert not "".join(response.text for response in responses)
        assert (responses[-1].finish_reason, responses[-1].stop_string) == (pb.FINISH_REASON_STOP, "END")
        assert "<tool_call>" in mesh.submitted[0].generation.params.grammar


async def test_a_grammar_reaches_the_engine_and_a_bad_one_its_client(model: Path) -> None:
    async with served(model) as (channel, mesh):
        request = pb.GenerateRequest(text="a", sampling=pb.SamplingOptions(max_tokens=1))
        for grammar in (
            pb.Grammar(json_schema='{"type": "integer"}'),
            pb.Grammar(regex="[0-9]+"),
            pb.Grammar(choice=pb.Choices(texts=["a", "b"])),
            pb.Grammar(grammar='start: "a"'),
        ):
            request.grammar.CopyFrom(grammar)
            assert [response async for response in stub(channel).Generate(request)]
            assert mesh.submitted[-1].generation.params.grammar
        for wrong in (pb.Grammar(regex="("), pb.Grammar(json_schema="{")):
            request.grammar.CopyFrom(wrong)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                [response async for response in stub(channel).Generate(request)]
            assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        for chat in (
            pb.Chat(),
            pb.Chat(messages=[pb.Message(role="user")], tools=[pb.Tool(name="f", parameters="[")]),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                [response async for response in stub(channel).Generate(pb.GenerateRequest(chat=chat))]
            assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_gateway_that_stops_lets_its_calls_end(model: Path) -> None:
    """Clients that watch the health service do not hold it up."""
    async with scripted_mesh(silence) as mesh, running_gateway(model, mesh.address) as running:
        await mesh.until(lambda: len(mesh.registrations) == 1)
        async with grpc.aio.insecure_channel(running.facts["grpc_address"]) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            call = stub(channel).Generate(pb.GenerateRequest(text="abc", sampling=pb.SamplingOptions(max_tokens=6)))
            submit = await mesh.next_submit(0)
            first, *others = [each for each in echo_prompt(submit.generation) if isinstance(each, TokenOut)]
            mesh.send_tokens(first)
            text = (await call.read()).text
            running.stopping.set()
            await anyio.sleep(0.3)  # it has had time to cut the call
            mesh.send_tokens(*others)
            while (response := await call.read()) is not grpc.aio.EOF:
                text += response.text
            assert text == "abcabc"
            assert await call.code() is grpc.StatusCode.OK
            with anyio.fail_after(20):
                assert await watch.code() is grpc.StatusCode.UNAVAILABLE
