"""Two schedulers on two hosts, and etcd with TLS on a third: whatever the leader is cut off from, streams go on.

`benchmarks/standby.py` does it many times on one machine, and measures.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Callable, Generator
from dataclasses import dataclass

import pytest

from pdmesh.cli.processes import ending_with_us
from pdmesh.testing.checkpoints import write_checkpoint
from pdmesh.testing.host_load import LIMIT_S, MOST_TOKENS, NUM_STREAMS, STAND_IN, HostLoad, log_of
from pdmesh.testing.hosts import SCHEDULER_PORT, HostedService, Hosts, running_hosts, until, why_no_hosts
from pdmesh.testing.standby import etcd_command, etcd_data_folder, why_no_etcd

WHY_NOT = why_no_hosts() or why_no_etcd()

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.e2e,
    pytest.mark.ucx,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
]

#: a, b: a scheduler each; c: a prefill and a decode instance; d: gateway, and the clients; e: etcd.
HOSTS = ("a", "b", "c", "d", "e")
ETCD_PORT, ETCD_PEER_PORT = 2379, 2380


#: What a scheduler says of its own part: the last of these holds.
LEADS, FOLLOWS, HAS_LED = '"leading"', '"standing by"', "must not lead any more"


@dataclass
class Schedulers:
    """Two, of which one leads."""

    hosts: Hosts
    leading: str = "a"
    standby: str = "b"

    def settle(self) -> None:
        """Wait until one leads and the other stands by; whoever has ended is started again.

        On a busy machine a lease may have lapsed before anything was done to the one that led.
        """
        until(self._are_settled, LIMIT_S)

    def _are_settled(self) -> bool:
        for name in (self.leading, self.standby):
            if any(service.process.poll() is not None for service in self.hosts[name].services):
                self.start(name)
        if self._part_of(self.standby) == LEADS:
            self.leading, self.standby = self.standby, self.leading
        return (self._part_of(self.leading), self._part_of(self.standby)) == (LEADS, FOLLOWS)

    def _part_of(self, name: str) -> str:
        said = (self.hosts[name].folder / "scheduler.log").read_text()
        return max((LEADS, FOLLOWS, HAS_LED), key=said.rfind)

    def start(self, name: str) -> None:
        self.hosts[name].services.clear()
        self.hosts[name].start("scheduler", "scheduler")

    @property
    def leader(self) -> HostedService:
        (service,) = self.hosts[self.leading].services
        return service

    def until_the_other_leads(self, said: Callable[[], str]) -> None:
        """Wait until the standby has ``said`` that it leads; and take it for the leader from here on."""
        until(lambda: LEADS in said(), LIMIT_S)
        self.leading, self.standby = self.standby, self.leading


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Generator[Hosts]:
    """A mesh that is whole when a test begins, whichever scheduler leads; each leaves it so."""
    folder = tmp_path_factory.mktemp("hosts")
    settings = {
        "MODEL": str(write_checkpoint(folder / "model", seed=3)),
        "SCHEDULER_ADDRESS": f"10.77.0.1:{SCHEDULER_PORT},10.77.0.2:{SCHEDULER_PORT}",
        "STANDBY_STORE": "etcd",
        "STANDBY_ETCD_ENDPOINTS": f"https://10.77.0.5:{ETCD_PORT}",
        # On a busy machine instances take longer than 3 s to register with another scheduler.
        "SCHEDULER_ORPHAN_GRACE_S": "20",
        **STAND_IN,
    }
    with running_hosts(folder / "hosts", HOSTS, settings) as hosts:
        for name in HOSTS:
            own = hosts[name].folder
            shown = {"CA": own / "ca.pem", "CERT": own / "mesh.pem", "KEY": own / "mesh.key"}
            hosts[name].settings = {
                **hosts[name].settings,
                **{f"STANDBY_ETCD_{what}": str(file) for what, file in shown.items()},
            }
        data = etcd_data_folder(folder)
        etcd = hosts["e"].command(etcd_command(hosts["e"].address, ETCD_PORT, ETCD_PEER_PORT, data, hosts["e"].folder))
        with (
            (folder / "etcd.log").open("wb") as log,
            subprocess.Popen(ending_with_us(etcd), stdout=log, stderr=log) as process,
        ):
            try:
                with log_of(hosts, "a", "scheduler") as said:
                    hosts["a"].start("scheduler", "scheduler")
                    until(lambda: LEADS in said(), LIMIT_S)
                hosts["b"].start("scheduler", "scheduler")
                for kind in ("prefill", "decode"):
                    hosts["c"].start(kind, kind)
                hosts["d"].start("gateway", "gateway")
                yield hosts
            finally:
                process.kill()
        shutil.rmtree(data)


@pytest.fixture(scope="module")
def both(hosts: Hosts) -> Schedulers:
    return Schedulers(hosts)


@pytest.fixture
def schedulers(both: Schedulers) -> Schedulers:
    both.settle()
    return both


@pytest.fixture(scope="module")
def load(hosts: Hosts) -> HostLoad:
    return HostLoad(hosts, "d")


async def test_the_leaders_host_loses_power(hosts: Hosts, schedulers: Schedulers, load: HostLoad) -> None:
    lost = schedulers.leading
    with log_of(hosts, schedulers.standby, "scheduler") as said, log_of(hosts, "d", "gateway") as gateway_said:
        await load.run(lambda: hosts.lose_power(lost), max_tokens=MOST_TOKENS, num_before=NUM_STREAMS // 2)
        schedulers.until_the_other_leads(said)
        await load.run(lambda: None, max_tokens=10)
        assert "gateway lost" not in said()
        assert "resuming" not in gateway_said()
    hosts.restore_power(lost)
    schedulers.start(lost)


async def test_the_leader_is_cut_off_from_the_lock_alone(hosts: Hosts, schedulers: Schedulers, load: HostLoad) -> None:
    """Workers and gateways hear it as ever; it must end by itself before another one leads."""
    cut, leader = schedulers.leading, schedulers.leader
    with log_of(hosts, schedulers.standby, "scheduler") as said, log_of(hosts, cut, "scheduler") as old_said:
        await load.run(lambda: hosts.cut(cut, "e"), max_tokens=MOST_TOKENS, num_before=NUM_STREAMS // 2)
        assert leader.process.wait(LIMIT_S) != 0
        assert HAS_LED in old_said()
        assert "Traceback" not in old_said()
        schedulers.until_the_other_leads(said)
    hosts.heal(cut, "e")
    schedulers.start(cut)
    await load.run(lambda: None, max_tokens=10)


async def test_the_leader_stands_still_past_its_lease_and_goes_on(
    hosts: Hosts, schedulers: Schedulers, load: HostLoad
) -> None:
    """It wakes while another one leads, with connections to all: nobody takes a command of it."""
    old, leader = schedulers.leading, schedulers.leader
    with log_of(hosts, schedulers.standby, "scheduler") as said, log_of(hosts, old, "scheduler") as old_said:
        await load.run(
            lambda: leader.process.send_signal(signal.SIGSTOP), max_tokens=MOST_TOKENS, num_before=NUM_STREAMS // 2
        )
        schedulers.until_the_other_leads(said)
        await load.run(lambda: leader.process.send_signal(signal.SIGCONT), max_tokens=100)
        assert leader.process.wait(LIMIT_S) != 0
        assert HAS_LED in old_said()
        assert "instance lost" not in said()
    schedulers.start(old)
    await load.run(lambda: None, max_tokens=10)
