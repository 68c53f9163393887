"""One client's tokens never reach another, whatever ids they choose: with real processes, and real time to be late in.

ISOLATION_ATTACKS=2000 attacks so often; without it, 150 times, in a minute and a half at most.
"""

import json
import os
import random
import time
from collections.abc import Generator

import anyio
import httpx
import pytest

from pdmesh_testing.mesh import STAND_IN, RunningMesh, running_mesh

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx, pytest.mark.timeout(900)]

NUM_ATTACKS = int(os.environ.get("ISOLATION_ATTACKS", "0"))
DEFAULT_ATTACKS, DEFAULT_LIMIT_S, LEAST_ATTACKS = 150, 90.0, 40
#: At once, so that A's tokens of one attack come in while another's B is served.
LANES = 6

#: After which A hangs up, in seconds.
PATIENCE_S = (0.005, 0.05)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningMesh]:
    folder = tmp_path_factory.mktemp("isolation")
    keys = folder / "keys"
    keys.write_text("key-of-a\nkey-of-b\n")
    with running_mesh(folder, model=None, settings={**STAND_IN, "SECURITY_API_KEYS_FILE": str(keys)}) as mesh:
        yield mesh


def body(prompt: list[int], max_tokens: int, n: int) -> dict[str, object]:
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "n": n,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


#: B's takes some tenths of a second. One that hangs has met another's: so it was when ids could meet.
B_LIMIT_S = 30.0

#: A's is long, so that its tokens still come when B asks; B's are short.
OF_A = {**body([7] * 24, 200, 2), "stream": True}
OF_B = body([50, 51, 52, 53, 54, 55], 12, 1)


def headers(key: str, label: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", "X-Request-Id": label}


async def a_asks_and_hangs_up(mesh: RunningMesh, label: str, patience_s: float) -> None:
    host, _, port = mesh.record.http_address.partition(":")
    content = json.dumps(OF_A)
    lines = [f"{name}: {value}" for name, value in headers("key-of-a", label).items()]
    head = "\r\n".join(["POST /v1/completions HTTP/1.1", f"Host: {host}", *lines, f"Content-Length: {len(content)}"])
    async with await anyio.connect_tcp(host, int(port)) as stream:
        await stream.send(f"{head}\r\n\r\n{content}".encode())
        await anyio.sleep(patience_s)


async def b_asks(client: httpx.AsyncClient, label: str) -> list[int]:
    with anyio.fail_after(B_LIMIT_S):
        response = await client.post("/v1/completions", json=OF_B, headers=headers("key-of-b", label))
    assert response.status_code == 200, response.text
    assert response.headers["x-request-id"] == label
    return list(response.json()["choices"][0]["token_ids"])


async def test_another_clients_tokens_are_never_heard(mesh: RunningMesh, capsys: pytest.CaptureFixture[str]) -> None:
    """A asks for two choices under an id and hangs up; B then calls its request by the id of the whole, or of one."""
    num_left, end_s = NUM_ATTACKS or DEFAULT_ATTACKS, time.monotonic() + (600.0 if NUM_ATTACKS else DEFAULT_LIMIT_S)
    wrong: list[tuple[str, list[int]]] = []
    done: list[str] = []
    async with mesh.client() as client:
        right = await b_asks(client, "undisturbed")

        async def attack(lane: int) -> None:
            nonlocal num_left
            rng = random.Random(lane)
            while num_left > 0 and time.monotonic() < end_s:
                num_left -= 1
                label = f"abc-{lane}-{num_left}"
                await a_asks_and_hangs_up(mesh, label, rng.uniform(*PATIENCE_S))
                chosen = label + rng.choice(("", "-0", "-1"))
                token_ids = await b_asks(client, chosen)
                done.append(chosen)
                if token_ids != right:
                    wrong.append((chosen, token_ids))

        async with anyio.create_task_group() as tasks:
            for lane in range(LANES):
                tasks.start_soon(attack, lane)
    with capsys.disabled():
        print(f"\n{len(done)} attacks, B wrong in {len(wrong)}")  # noqa: T201
    assert not wrong
    assert len(done) >= (NUM_ATTACKS or LEAST_ATTACKS)
    mesh.wait_until_idle(30)


def test_keys_are_asked_for(mesh: RunningMesh) -> None:
    """Else the two would be one client."""
    response = httpx.post(f"{mesh.base_url}/v1/completions", json=OF_B, timeout=30)
    assert response.status_code == 401
