"""Two schedulers on two hosts, and etcd with TLS on a third: whatever the leader is cut off from, streams go on.

At commit dbfd7179, `benchmarks/standby.py` did this many times on one machine, and measured.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator
from dataclasses import dataclass

import pytest

from pdmesh_testing.host_load import LIMIT_S, MOST_TOKENS, NUM_STREAMS, STAND_IN, HostLoad, log_of
from pdmesh_testing.host_standby import FOLLOWS, HAS_LED, LEADS, running_two_schedulers
from pdmesh_testing.hosts import HostedService, Hosts, until, why_no_hosts
from pdmesh_testing.standby import why_no_etcd

WHY_NOT = why_no_hosts() or why_no_etcd()

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.e2e,
    pytest.mark.ucx,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
]


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
    # On a busy machine instances take longer than 3 s to register with another scheduler.
    settings = {"SCHEDULER_ORPHAN_GRACE_S": "20", **STAND_IN}
    with running_two_schedulers(tmp_path_factory.mktemp("hosts"), settings) as hosts:
        yield hosts


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


async def test_the_gateway_is_cut_off_from_the_leader_alone(
    hosts: Hosts, schedulers: Schedulers, load: HostLoad
) -> None:
    """Half of the requests come after the cut. They waited until it was healed, beside a standby that could serve."""
    cut = schedulers.leading
    with log_of(hosts, schedulers.standby, "scheduler") as said, log_of(hosts, cut, "scheduler") as old_said:
        await load.run(lambda: hosts.cut(cut, "d"), max_tokens=MOST_TOKENS, num_before=NUM_STREAMS // 2)
        assert "handing the lease" in old_said()
        schedulers.until_the_other_leads(said)
        assert "instance lost" not in said()
    hosts.heal(cut, "d")
    await load.run(lambda: None, max_tokens=10)
