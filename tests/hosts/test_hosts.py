"""A mesh on four hosts, which are network namespaces: what is cut off, or loses power, costs no stream and no token."""

from __future__ import annotations

import itertools
import json
import os
import re
import ssl
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

import httpx
import pytest

from pdmesh.wire.admin import ask_scheduler
from pdmesh.wire.messages import GetStatus, InstanceStatus, MeshStatus
from pdmesh_testing.checkpoints import TINY, write_checkpoint
from pdmesh_testing.exactness import mismatches, random_prompts, reference, streamed
from pdmesh_testing.host_load import LIMIT_S, MOST_TOKENS, NUM_STREAMS, STAND_IN, HostLoad, client_of, log_of
from pdmesh_testing.hosts import GATEWAY_PORT, SCHEDULER_PORT, Hosts, running_hosts, until, why_no_hosts

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
NUM_INSTANCES = 3


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


async def instances(hosts: Hosts) -> dict[str, InstanceStatus]:
    """What the scheduler knows, asked from its own host."""
    address = f"{hosts['a'].address}:{SCHEDULER_PORT}"
    with hosts["a"].entered():
        state = await ask_scheduler(address, hosts.security("a"), GetStatus())
    assert isinstance(state, MeshStatus)
    return {instance.instance_id: instance for instance in state.instances}


@pytest.fixture(scope="module")
def load(hosts: Hosts) -> HostLoad:
    return HostLoad(hosts, "d")


@pytest.fixture(autouse=True)
def healed(request: pytest.FixtureRequest) -> Generator[None]:
    """Heal what a test has cut, however it ends."""
    yield
    if "hosts" in request.fixturenames:
        hosts: Hosts = request.getfixturevalue("hosts")
        for one, other in itertools.combinations(HOSTS, 2):
            hosts.heal(one, other)


async def test_hosts_that_are_cut_off_from_each_other_lose_no_instance(hosts: Hosts, load: HostLoad) -> None:
    """A blocking connect froze the prefill instance of a pair that was cut until its lease ran out, and then again."""
    with log_of(hosts, "a", "scheduler") as said:
        await load.run(lambda: hosts.cut("b", "c"), max_tokens=100, num_before=NUM_STREAMS // 2)
        await load.run(lambda: None, max_tokens=100, num_before=NUM_STREAMS // 2)
        assert "lost" not in said()  # for a moment an instance may be silent on a busy machine: nothing is lost by it
    assert {instance.state for instance in (await instances(hosts)).values()} == {"up"}


@pytest.mark.parametrize("both", [True, False], ids=["both_ways", "one_way"])
async def test_streams_go_on_while_their_gateway_is_cut_off_from_the_scheduler(
    hosts: Hosts, load: HostLoad, both: bool
) -> None:
    """All of them stood still from the end of the lease until the cut was healed, though no token passes there."""
    with log_of(hosts, "a", "scheduler") as said:
        await load.run(lambda: hosts.cut("a", "d", both=both), max_tokens=MOST_TOKENS)  # 9 s, and the lease was 5
        assert "gateway lost" not in said()


async def test_requests_go_around_an_instance_that_their_gateway_does_not_hear_of(hosts: Hosts, load: HostLoad) -> None:
    """They were placed there again and again: the scheduler heard of both of them as ever."""
    await load.run(lambda: hosts.cut("d", "c", both=False), max_tokens=MOST_TOKENS)
    with log_of(hosts, "d", "gateway") as said:
        await load.run(lambda: None, max_tokens=100)
        assert "resuming" not in said()


async def test_streams_outlive_a_scheduler_that_comes_back_on_another_host(hosts: Hosts, load: HostLoad) -> None:
    """They stood still where the room that it had granted them ended: at their 181st token."""
    (scheduler,) = (service for service in hosts["a"].services if service.name == "scheduler")
    await load.run(scheduler.kill, max_tokens=400)
    hosts.name_scheduler("b")
    hosts["b"].start("scheduler", "scheduler", {"SCHEDULER_HOST": hosts["b"].address})
    await load.run(lambda: None, max_tokens=10)
    hosts["b"].services.pop().kill()
    hosts.name_scheduler("a")
    with log_of(hosts, "a", "scheduler") as said:
        hosts["a"].start("scheduler", "scheduler")
        until(lambda: said().count("instance joined") == NUM_INSTANCES)  # they come back one by one
    await load.run(lambda: None, max_tokens=10)


async def test_a_second_instance_of_one_name_is_refused_until_the_first_ones_host_is_lost(
    hosts: Hosts, load: HostLoad
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


async def test_the_doctor_says_which_hosts_do_not_reach_each_other(hosts: Hosts, load: HostLoad) -> None:
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
        async with client_of(hosts, "d") as client:
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
                assert len(await streamed(client, "model", range(40), 5)) == 5


def run_cli(arguments: Sequence[str]) -> str:
    """What ``pdmesh ARGUMENTS`` prints."""
    command = [sys.executable, "-m", "pdmesh.cli", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
