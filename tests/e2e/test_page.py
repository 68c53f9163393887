"""The page in a real Chromium, in front of a real mesh."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from pdmesh_testing.browser import find_chromium, open_page
from pdmesh_testing.exactness import complete
from pdmesh_testing.examples import slow_beyond
from pdmesh_testing.mesh import RunningMesh, running_mesh

CHROMIUM = find_chromium()

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.e2e,
    pytest.mark.ucx,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningMesh]:
    with running_mesh(tmp_path_factory.mktemp("page"), model=None) as mesh:
        yield mesh


@pytest.mark.parametrize("dark", slow_beyond(1, [False, True]), ids=["light", "dark"])
async def test_one_sees_the_own_request_travel(mesh: RunningMesh, tmp_path: Path, dark: bool) -> None:
    assert CHROMIUM is not None
    async with open_page(CHROMIUM) as page:
        await page.open(f"{mesh.base_url}/chat", dark=dark)
        await page.until("document.getElementById('model').textContent !== ''")
        await page.run(
            "document.getElementById('question').value = 'Why separate prefill and decode?';"
            "document.getElementById('ask').requestSubmit()"
        )
        await page.until("document.querySelector('.foot a') !== null")
        answer = await page.run("document.querySelector('.text').textContent")
        assert answer.startswith("Because they want different things.")
        await page.open(await page.run("document.querySelector('.foot a').href"), dark=dark)
        await page.until("document.querySelectorAll('.instance').length === 2")
        await page.until("document.getElementById('health').textContent === 'serving'")
        # its life: from the queue to the end, with the KV's way if it moved
        await page.until("document.getElementById('life-title').textContent.endsWith('finished')")
        life = await page.run(
            "[...document.querySelectorAll('#life-rows tr')].map((row) => row.children[1].textContent)"
        )
        assert life[0] == "queued"
        assert "chunk" in life
        assert "finished" in life
        async with mesh.client() as client:  # on a busy machine all tokens of the short answer may come at once
            await complete(client, mesh.model, [5, 6, 7], max_tokens=500)
        # steps are on the timeline, and the figures have been filled in
        await page.until("pdmesh.timeline.steps.some((step) => step[3] > 0)")
        await page.until("pdmesh.timeline.steps.some((step) => step[3] === 0 && step[4] > 0)")  # decodes
        await page.until("document.getElementById('figures').textContent.includes('ms')")
        # its way is drawn: it waited, was computed and decoded; charts have its first token
        for kind in ("prefill", "decode"):
            assert await page.run(f"document.querySelectorAll('#way rect.{kind}').length") >= 1
        await page.until("pdmesh.charts.ttft[0].points.length > 0 && pdmesh.charts.output.points.length > 0")
        # pointing at a step says what it was
        await page.run("pdmesh.timeline.pause(true)")
        at_a_step = (
            "(({ steps, rows, geometry: { x, row, top } }) => steps.some(([name, begin_s, end_s]) =>"
            " pdmesh.timeline.linesAt(x((begin_s + end_s) / 2), rows.get(name) * row + top).join().includes('tokens')))"
            "(pdmesh.timeline)"
        )
        await page.until(at_a_step)
        # rows of the timeline fill their panel, and nothing scrolls sideways, on a small screen neither
        await page.until("(r => r.children[1].clientHeight > 0.8 * r.clientHeight)(document.querySelector('.rows'))")
        assert await page.run("document.documentElement.scrollWidth <= innerWidth")
        background = await page.run("getComputedStyle(document.body).backgroundColor")
        assert await page.run("(b => b.scrollWidth <= b.clientWidth)(document.querySelector('#life .scroll'))")
        assert background == ("rgb(15, 18, 22)" if dark else "rgb(255, 255, 255)")
        await page.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 10_000
        await page.open(f"{mesh.base_url}/ui", width=390, height=800, dark=dark)
        await page.until("document.querySelectorAll('.instance').length === 2")
        assert await page.run("document.documentElement.scrollWidth <= innerWidth")
        assert page.console == []


async def test_what_clients_call_their_requests_is_text_to_the_page(mesh: RunningMesh) -> None:
    assert CHROMIUM is not None
    async with open_page(CHROMIUM) as page, mesh.client() as client:
        await page.open(f"{mesh.base_url}/ui")
        await page.until("document.getElementById('health').textContent === 'serving'")
        body = {"model": mesh.model, "prompt": [5] * 50, "max_tokens": 400, "ignore_eos": True, "stream": True}
        async with client.stream(
            "POST", "/v1/completions", json=body, headers={"X-Request-Id": "a/b:c@d=e+f"}
        ) as response:
            assert response.status_code == 200
            await page.until("[...document.querySelectorAll('td.id')].some((id) => id.textContent === 'a/b:c@d=e+f')")
        assert page.console == []


async def test_the_documentation_sends_its_examples(mesh: RunningMesh) -> None:
    assert CHROMIUM is not None
    box = "document.getElementById('post/v1/chat/completions')"
    async with open_page(CHROMIUM) as page:
        await page.open(f"{mesh.base_url}/docs", width=390)
        await page.until(f"{box} !== null")
        await page.run(f"{box}.open = true")
        await page.until(f"[...{box}.querySelectorAll('td')].some((cell) => cell.textContent === 'temperature')")
        await page.run(f"{box}.querySelector('button').click()")
        await page.until(f"{box}.querySelector('pre').textContent.includes('chat.completion')")
        assert await page.run("document.documentElement.scrollWidth <= innerWidth")
        assert page.console == []


async def test_an_instance_that_is_killed_stays_with_its_cause(mesh: RunningMesh) -> None:
    assert CHROMIUM is not None
    pid = mesh.pids()["decode-0"]
    async with open_page(CHROMIUM) as page:
        await page.open(f"{mesh.base_url}/ui")
        await page.until("document.querySelectorAll('.instance').length === 2")
        os.kill(pid, signal.SIGKILL)
        note = "document.getElementById('notes').textContent"
        row = "document.querySelectorAll('.instance').length === 2"
        await page.until(f"{note}.includes('decode-0 was killed by SIGKILL') && {row}")
        await page.until(f"{note}.includes(' serves since ') && {row}", timeout_s=60)
        assert not await page.run("document.querySelectorAll('.gone').length")
        events = await page.run("[...document.querySelectorAll('#events b')].map((what) => what.textContent)")
        assert events[0] == "restarted"
        assert page.console == []
    state = await mesh.state()
    (decode,) = [each for each in state.instances if each.instance_id == "decode-0"]
    assert decode.num_restarts == 1
    assert decode.note is not None
    assert decode.note.cause == "was killed by SIGKILL"
    assert decode.note.next.startswith(f"process {decode.pid} serves since")
