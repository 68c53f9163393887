"""A mesh on four hosts, which are network namespaces: what is cut off, or loses power, costs no stream and no token."""

from __future__ import annotations

import itertools
import json
import os
import re
import ssl
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import httpx
import pytest

from pdmesh.testing.checkpoints import TINY, write_checkpoint
from pdmesh.testing.exactness import mismatches, random_prompts, reference
from pdmesh.testing.hosts import API_KEY, GATEWAY_PORT, SCHEDULER_PORT, Hosts, running_hosts, until, why_no_hosts
from pdmesh.wire.admin import ask_scheduler
from pdmesh.wire.messages import GetStatus, InstanceStatus, MeshStatus

WHY_NOT = why_no_hosts()

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.e2e,
    pytest.mark.ucx,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
]

#: a: scheduler; b: a prefill and a decode instance; c: a decode instance; d: gateway, and the clients.
HOSTS = ("a", "b", "c", "d")

#: Instances without a model, whose decode steps take 20 ms: streams last.
STAND_IN = {"WORKER_ENGINE": "fake", "WORKER_FAKE_LATENCY": "a_s=0.003,b_s=2e-5,decode_a_s=0.02"}

NUM_STREAMS = 8
MOST_TOKENS = 450  # of one of them

#: A stream has begun once it has so many.
NUM_BEGUN = 4

#: For all that has to happen in a test.
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "model", seed=3)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Generator[Hosts]:
    """A mesh that is whole when a test begins; each leaves it as it was."""
    with running_hosts(tmp_path_factory.mktemp("hosts"), HOSTS, {"MODEL": str(checkpoint), **STAND_IN}) as hosts:
        start_all(hosts)
        yield hosts


def start_all(hosts: Hosts) -> None:
    hosts["a"].start("scheduler", "scheduler")
    for host, kind in (("b", "prefill"), ("b", "decode"), ("c", "decode")):
        hosts[host].start(kind, f"{kind}-{host}", {"WORKER_INSTANCE_ID": f"{kind}-{host}"})
    hosts["d"].start("gateway", "gateway")


@asynccontextmanager
async def client_of(hosts: Hosts) -> AsyncGenerator[httpx.AsyncClient]:
    """A client on the gateway's host."""
    url = f"https://{hosts['d'].address}:{GATEWAY_PORT}"
    headers = {"Authorization": f"Bearer {API_KEY}"}
    with hosts["d"].entered():
        async with httpx.AsyncClient(
            base_url=url, headers=headers, verify=hosts.https(), timeout=LIMIT_S, trust_env=False
        ) as client:
            with anyio.fail_after(LIMIT_S):
                while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110  # nobody else could tell
                    await anyio.sleep(0.1)
                yield client


async def instances(hosts: Hosts) -> dict[str, InstanceStatus]:
    """What the scheduler knows, asked from its own host."""
    address = f"{hosts['a'].address}:{SCHEDULER_PORT}"
    with hosts["a"].entered():
        state = await ask_scheduler(address, hosts.security("a"), GetStatus())
    assert isinstance(state, MeshStatus)
    return {instance.instance_id: instance for instance in state.instances}


async def draw(
    client: httpx.AsyncClient, prompt: Sequence[int], max_tokens: int, on_token: Callable[[int], None] = lambda _: None
) -> list[int]:
    """Token ids of one stream, which must end well; ``on_token`` hears how many there are, as they come."""
    body = {
        "model": "model",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    token_ids: list[int] = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    token_ids += choice["token_ids"]
                on_token(len(token_ids))
    return token_ids


class Load:
    """Streams that run while something is done to the mesh; each says what it said undisturbed."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._prompts = random_prompts([300 + 3 * i for i in range(NUM_STREAMS)], TINY.vocab_size, seed=5)
        self._undisturbed: dict[int, list[int]] = {}

    async def run(
        self, disturb: Callable[[], object], *, max_tokens: int, num_before: int = NUM_STREAMS, limit_s: float = LIMIT_S
    ) -> None:
        """Begin ``num_before`` of them, ``disturb`` once each has some tokens, begin the others, and let all end."""
        async with client_of(self._hosts) as client:
            if not self._undisturbed:
                async with anyio.create_task_group() as tasks:
                    for index in range(NUM_STREAMS):
                        tasks.start_soon(self._draw, client, index, MOST_TOKENS, self._undisturbed)
            got: dict[int, list[int]] = {}
            begun = [anyio.Event() for _ in range(NUM_STREAMS)]
            with anyio.fail_after(limit_s):
                async with anyio.create_task_group() as tasks:
                    for index in range(NUM_STREAMS):
                        if index == num_before:
                            for event in begun[:num_before]:
                                await event.wait()
                            disturb()
                        tasks.start_soon(self._draw, client, index, max_tokens, got, begun[index])
                    if num_before == NUM_STREAMS:
                        for event in begun:
                            await event.wait()
                        disturb()
        assert got == {index: token_ids[:max_tokens] for index, token_ids in self._undisturbed.items()}

    async def _draw(
        self,
        client: httpx.AsyncClient,
        index: int,
        max_tokens: int,
        into: dict[int, list[int]],
        begun: anyio.Event | None = None,
    ) -> None:
        def drawn(number: int) -> None:
            if begun is not None and number >= NUM_BEGUN:
                begun.set()

        into[index] = await draw(client, self._prompts[index], max_tokens, drawn)


@pytest.fixture(scope="module")
def load(hosts: Hosts) -> Load:
    return Load(hosts)


@pytest.fixture(autouse=True)
def healed(request: pytest.FixtureRequest) -> Generator[None]:
    """Heal what a test has cut, however it ends."""
    yield
    if "hosts" in request.fixturenames:
        hosts: Hosts = request.getfixturevalue("hosts")
        for one, other in itertools.combinations(HOSTS, 2):
            hosts.heal(one, other)


@contextmanager
def log_of(hosts: Hosts, host: str, name: str) -> Generator[Callable[[], str]]:
    """What a service logs from here on."""
    log = hosts[host].folder / f"{name}.log"
    begin = len(log.read_text()) if log.exists() else 0
    yield lambda: log.read_text()[begin:]


async def test_hosts_that_are_cut_off_from_each_other_lose_no_instance(hosts: Hosts, load: Load) -> None:
    """A blocking connect froze the prefill instance of a pair that was cut until its lease ran out, and then again."""
    with log_of(hosts, "a", "scheduler") as said:
        await load.run(lambda: hosts.cut("b", "c"), max_tokens=100, num_before=NUM_STREAMS // 2)
        await load.run(lambda: None, max_tokens=100, num_before=NUM_STREAMS // 2)
        assert "silent" not in said()
        assert "lost" not in said()
    assert {instance.state for instance in (await instances(hosts)).values()} == {"up"}


@pytest.mark.parametrize("both", [True, False], ids=["both_ways", "one_way"])
async def test_streams_go_on_while_their_gateway_is_cut_off_from_the_scheduler(
    hosts: Hosts, load: Load, both: bool
) -> None:
    """All of them stood still from the end of the lease until the cut was healed, though no token passes there."""
    with log_of(hosts, "a", "scheduler") as said:
        await load.run(lambda: hosts.cut("a", "d", both=both), max_tokens=MOST_TOKENS)  # 9 s, and the lease was 5
        assert "gateway lost" not in said()


async def test_requests_go_around_an_instance_that_their_gateway_does_not_hear_of(hosts: Hosts, load: Load) -> None:
    """They were placed there again and again: the scheduler heard of both of them as ever."""
    await load.run(lambda: hosts.cut("d", "c", both=False), max_tokens=MOST_TOKENS)
    with log_of(hosts, "d", "gateway") as said:
        await load.run(lambda: None, max_tokens=100)
        assert "resuming" not in said()


async def test_streams_outlive_a_scheduler_that_comes_back_on_another_host(hosts: Hosts, load: Load) -> None:
    """They stood still where the room that it had granted them ended: at their 181st token."""
    (scheduler,) = (service for service in hosts["a"].services if service.name == "scheduler")
    await load.run(scheduler.kill, max_tokens=400)
    hosts.name_scheduler("b")
    hosts["b"].start("scheduler", "scheduler", {"SCHEDULER_HOST": hosts["b"].address})
    await load.run(lambda: None, max_tokens=10)
    hosts["b"].services.pop().kill()
    hosts.name_scheduler("a")
    hosts["a"].start("scheduler", "scheduler")
    await load.run(lambda: None, max_tokens=10)


async def test_a_second_instance_of_one_name_is_refused_until_the_first_ones_host_is_lost(
    hosts: Hosts, load: Load
) -> None:
    """The two threw each other out for ever: 82 times in 8 s."""
    settings = {"WORKER_INSTANCE_ID": "decode-c"}
    with log_of(hosts, "a", "scheduler") as said:
        second = hosts["b"].start("decode", "decode-c", settings, waits=False)
        await load.run(lambda: until(lambda: "another has its id" in said()), max_tokens=100)
        assert "instance joined" not in said()
        await load.run(lambda: hosts.lose_power("c"), max_tokens=200)
        until(lambda: "instance joined" in said())
    second.stop()
    hosts.restore_power("c")
    hosts["c"].start("decode", "decode-c", settings)


async def test_the_doctor_says_which_hosts_do_not_reach_each_other(hosts: Hosts, load: Load) -> None:
    """Two instances that are cut one way, and a gateway that told the mesh a wrong address for its tokens."""
    await load.run(lambda: None, max_tokens=10)  # all is there
    assert doctor(hosts) == []
    settings = {"GATEWAY_PORT": str(GATEWAY_PORT + 1), "GATEWAY_TOKEN_ADDRESS": "10.77.0.99:1"}
    second = hosts["d"].start("gateway", "gateway-2", settings)
    hosts.cut("b", "c", both=False)
    found = doctor(hosts)
    assert {problem[:12] for _, problem in found if "kv" in problem} >= {"kv from pref", "kv from deco"}
    wrong = [where for where, problem in found if problem.startswith("tokens to") and "10.77.0.99:1" in problem]
    assert len(wrong) == 3
    hosts.heal("b", "c")
    second.stop()
    await load.run(lambda: None, max_tokens=10)


def doctor(hosts: Hosts) -> list[tuple[str, str]]:
    """Where `pdmesh doctor --mesh` finds a problem, and which."""
    address = f"{hosts['a'].address}:{SCHEDULER_PORT}"
    command = [sys.executable, "-m", "pdmesh.cli", "doctor", "--mesh", "-o", "json", "--scheduler", address]
    environ = {**os.environ, **{f"PDMESH_{key}": value for key, value in hosts["a"].settings.items()}}
    with hosts["a"].entered():
        said = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert said.returncode in (0, 1), said.stderr
    return [(each["where"], each["problem"]) for each in json.loads(said.stdout)["findings"]]


async def test_tokens_are_those_of_transformers(tmp_path: Path, checkpoint: Path) -> None:
    """Prompts are computed on one host and decode on another, with mutual TLS and KV over UCX."""
    references = [reference(checkpoint, prompt, 24) for prompt in random_prompts([9, 80, 200, 333], TINY.vocab_size, 7)]
    with running_hosts(tmp_path / "hosts", HOSTS, {"MODEL": str(checkpoint)}) as hosts:
        hosts["a"].start("scheduler", "scheduler")
        hosts["b"].start("prefill", "prefill-b")
        hosts["c"].start("decode", "decode-c")
        hosts["d"].start("gateway", "gateway")
        async with client_of(hosts) as client:
            assert await mismatches(client, "model", references, concurrency=4) == []


async def test_the_page_leads_from_one_machine_to_three(tmp_path: Path, checkpoint: Path) -> None:
    """`docs/hosts.md` as it is written, but for the folder that its files are in."""
    page = (Path(__file__).parents[2] / "docs/hosts.md").read_text()
    settings = re.findall(r"```toml\n(.*?)```", page, re.S)[0]
    (dev_ca,) = re.findall(r"^\$ (pdmesh tls dev-ca .*)$", page, re.M)
    starts = re.findall(
        r"^\| `(m\d)` \| `PDMESH_CONFIG=/etc/pdmesh/pdmesh.toml python -m pdmesh_(\w+)` \|$", page, re.M
    )
    assert len(starts) == 4
    folder = tmp_path / "etc"
    run_cli(dev_ca.removeprefix("pdmesh ").replace("/etc/pdmesh", str(folder)).split())
    (folder / "model").symlink_to(checkpoint)
    (folder / "pdmesh.toml").write_text(settings.replace("/etc/pdmesh", str(folder)))
    (key,) = re.findall(r'^api_key = "(.*)"$', settings, re.M)
    with running_hosts(tmp_path / "hosts", ("m1", "m2", "m3")) as hosts:
        for machine, kind in starts:
            hosts[machine].settings = {"CONFIG": str(folder / "pdmesh.toml")}
            hosts[machine].start(kind, kind)
        with hosts["m1"].entered():
            said = run_cli(["status", "--config", str(folder / "pdmesh.toml"), "--scheduler", "10.77.0.1:7000"])
            assert len(re.findall(r"^host .*: (?:prefill|decode)-", said, re.M)) == 2
            trusts = ssl.create_default_context(cafile=folder / "ca.pem")
            async with httpx.AsyncClient(
                base_url="https://10.77.0.1:8000",
                headers={"Authorization": f"Bearer {key}"},
                verify=trusts,
                timeout=LIMIT_S,
                trust_env=False,
            ) as client:
                assert len(await draw(client, range(40), 5)) == 5


def run_cli(arguments: Sequence[str]) -> str:
    """What ``pdmesh ARGUMENTS`` prints."""
    command = [sys.executable, "-m", "pdmesh.cli", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
