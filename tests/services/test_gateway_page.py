"""The page's files, its stream and its access, in front of a scripted mesh."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from pdmesh.config import GatewayConfig, SecurityConfig
from pdmesh.model import InstanceId, RequestId
from pdmesh.wire.messages import Activity, RequestActivity, StepBar
from pdmesh_gateway.gateway_metrics import NUM_NEW, RecentLatencies
from pdmesh_gateway.page_activity import MAX_FRAMES_AHEAD, MAX_WATCHERS, ActivityHub
from pdmesh_testing.gateway import ready_gateway
from pdmesh_testing.scripted_mesh import READY, ScriptedMesh

pytestmark = pytest.mark.anyio


def activity(now_s: float = 1.0) -> Activity:
    return Activity(
        now_s=now_s,
        state=READY,
        requests=(
            RequestActivity(
                id=RequestId("r"),
                label="mine",
                phase="decoding",
                where=(InstanceId("p"), InstanceId("d")),
                num_prompt_tokens=3,
                num_planned_tokens=3,
                age_s=0.5,
            ),
        ),
        steps=(StepBar(InstanceId("p"), 0.1, 0.2, 3, 0, False),),
        moves=(),
        marks=(),
    )


# --- who watches ---


async def test_the_scheduler_is_asked_once_for_the_first_watcher() -> None:
    asked: list[None] = []
    hub = ActivityHub("m", RecentLatencies(), lambda: asked.append(None))
    assert not hub.is_watched
    async with hub.frames(), hub.frames():
        assert hub.is_watched
        assert len(asked) == 1
    assert not hub.is_watched
    async with hub.frames():
        assert len(asked) == 2


async def test_a_watcher_that_does_not_read_misses_frames_and_holds_up_nobody() -> None:
    hub = ActivityHub("m", RecentLatencies(), lambda: None)
    async with hub.frames() as slow, hub.frames() as quick:
        for number in range(3 * MAX_FRAMES_AHEAD):
            hub.publish(activity(float(number)))
            frame = json.loads((await quick.receive()).removeprefix(b"data: "))
            assert frame["now_s"] == number
        waiting = slow.statistics().current_buffer_used
        assert waiting == MAX_FRAMES_AHEAD


async def test_a_watcher_that_has_gone_does_not_disturb_the_others() -> None:
    hub = ActivityHub("m", RecentLatencies(), lambda: None)
    async with hub.frames() as gone, hub.frames() as there:
        await gone.aclose()
        hub.publish(activity())
        assert b'"now_s":1.0' in await there.receive()


async def test_percentiles_are_of_the_latest_tokens() -> None:
    latencies = RecentLatencies()
    assert latencies.percentiles() == {"ttft_s": None, "itl_s": None}
    latencies.first_token(3.0)
    assert latencies.percentiles()["ttft_s"] == {"p50": 3.0, "p99": 3.0}
    latencies = RecentLatencies()
    for value in range(101):
        latencies.first_token(float(value))
        latencies.next_token(value / 100)
    assert latencies.percentiles()["ttft_s"] == pytest.approx({"p50": 50.0, "p99": 99.0})
    for _ in range(4096):
        latencies.next_token(7.0)
    assert latencies.percentiles()["itl_s"] == pytest.approx({"p50": 7.0, "p99": 7.0})


async def test_a_frame_has_what_is_new_since_the_last_one() -> None:
    latencies = RecentLatencies()
    latencies.first_token(9.0)  # before anybody watched
    hub = ActivityHub("m", latencies, lambda: None)
    async with hub.frames() as watcher:

        async def frame() -> dict[str, Any]:
            hub.publish(activity())
            fields: dict[str, Any] = json.loads((await watcher.receive()).removeprefix(b"data: "))
            return {name: fields[name] for name in ("ttfts_s", "tpots_s", "num_output_tokens")}

        latencies.num_output_tokens += 3
        latencies.first_token(0.5)
        latencies.finished(0.25)
        assert await frame() == {"ttfts_s": [0.5], "tpots_s": [0.25], "num_output_tokens": 3}
        latencies.num_output_tokens += 4
        assert await frame() == {"ttfts_s": [], "tpots_s": [], "num_output_tokens": 7}
        for _ in range(NUM_NEW + 1):
            latencies.finished(1.0)
        assert len((await frame())["tpots_s"]) == NUM_NEW


# --- over HTTP ---


async def first_event(client: httpx.AsyncClient, mesh: ScriptedMesh, **request: Any) -> dict[str, Any]:
    """The first frame that a page gets: the mesh answers once it was asked."""
    with anyio.fail_after(20):
        async with client.stream("GET", "/ui/events", **request) as response:
            assert response.status_code == 200, await response.aread()
            assert response.headers["content-type"].startswith("text/event-stream")
            await mesh.until(lambda: mesh.num_activity_asked > 0)
            mesh.say(activity())
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    frame: dict[str, Any] = json.loads(line[6:])
                    return frame
    raise AssertionError("the stream ended")


async def test_the_page_gets_the_meshs_activity_as_it_reads_it(model: Path) -> None:
    async with ready_gateway(model) as (client, mesh, _running):
        frame = await first_event(client, mesh)
    assert frame["model"] == "tiny"
    assert frame["unready_reason"] is None
    assert {instance["id"] for instance in frame["instances"]} == {i.instance_id for i in READY.instances}
    assert all(instance["state"] == "serving" for instance in frame["instances"])
    assert frame["requests"][0]["label"] == "mine"
    assert frame["steps"] == [["p", 0.1, 0.2, 3, 0, False]]


async def test_files_come_with_headers_that_let_nothing_else_in(model: Path) -> None:
    async with ready_gateway(model) as (client, _mesh, _running):
        page = await client.get("/ui")
        assert page.status_code == 200
        assert page.headers["content-security-policy"].startswith("default-src 'self'")
        assert page.headers["x-content-type-options"] == "nosniff"
        for name, kind in (
            ("style.css", "text/css"),
            ("page.js", "text/javascript"),
            ("timeline.js", "text/javascript"),
        ):
            file = await client.get(f"/ui/{name}")
            assert (file.status_code, file.headers["content-type"]) == (200, f"{kind}; charset=utf-8")
        for path in ("/", "/ui/"):  # where a person looks who has only the address
            there = await client.get(path, follow_redirects=True)
            assert (there.status_code, there.url.path, there.content) == (200, "/ui", page.content)
        for name in ("nothing.js", "..%2Fmain.py", "%2e%2e", "ui.py"):
            assert (await client.get(f"/ui/{name}")).status_code == 404


async def test_with_keys_the_mesh_is_shown_to_those_who_have_one(model: Path) -> None:
    security = SecurityConfig(api_key="secret")
    async with ready_gateway(model, security=security) as (client, mesh, _running):
        assert (await client.get("/ui")).status_code == 200  # it asks for the key
        assert (await client.get("/ui/events")).status_code == 401
        assert (await client.get("/ui/requests/r")).status_code == 401
        frame = await first_event(client, mesh, headers={"Authorization": "Bearer secret"})
        assert frame["model"] == "tiny"


async def test_there_is_no_page_where_it_is_turned_off(model: Path) -> None:
    gateway = GatewayConfig(port=0, ui=False)
    async with ready_gateway(model, gateway=gateway) as (client, _mesh, _running):
        for path in ("/ui", "/ui/page.js", "/ui/events", "/ui/requests/r"):
            assert (await client.get(path)).status_code == 404


async def test_too_many_watchers_are_told_so(model: Path) -> None:
    async with ready_gateway(model) as (client, _mesh, _running), anyio.create_task_group() as tasks:
        for _ in range(MAX_WATCHERS):
            tasks.start_soon(_watch, client, started := anyio.Event())
            await started.wait()
        refused = await client.get("/ui/events")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_watchers")
        tasks.cancel_scope.cancel()


async def _watch(client: httpx.AsyncClient, started: anyio.Event) -> None:
    async with client.stream("GET", "/ui/events") as response:
        started.set()
        async for _ in response.aiter_bytes():
            pass


async def test_a_requests_life_is_the_schedulers_to_tell(model: Path) -> None:
    async with ready_gateway(model) as (client, _mesh, _running):
        answer = await client.get("/ui/requests/nobodys")
        assert answer.status_code == 503  # the scripted scheduler has no Admin method
