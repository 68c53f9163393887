from __future__ import annotations

import random

import pytest

from pdmesh.model import Epoch, InstanceId, RequestId, RequestKey
from pdmesh_lab.sim.agenda import Agenda
from pdmesh_lab.sim.links import HostLinks, SimulatedLinks

A, B, C, D = (InstanceId(name) for name in "abcd")


def key(name: str) -> RequestKey:
    return RequestId(name), Epoch(0)


class Bench:
    def __init__(self, port_bytes_per_s: float = 100.0, host_links: HostLinks | None = None) -> None:
        self.agenda = Agenda()
        self.drained: list[tuple[str, float]] = []
        self.links = SimulatedLinks(
            self.agenda, port_bytes_per_s, lambda flow: self.drained.append((flow[0][0], self.agenda.now_s)), host_links
        )

    def run(self) -> list[tuple[str, float]]:
        while self.agenda.advance():
            pass
        return self.drained


def test_a_transfer_alone_has_the_whole_port() -> None:
    bench = Bench()
    bench.links.send((key("x"), A, B), 50)
    assert bench.run() == [("x", 0.5)]


@pytest.mark.parametrize(("ends_x", "ends_y"), [((A, C), (B, C)), ((A, C), (A, D)), ((A, C), (A, C))])
def test_transfers_share_the_port_they_have_in_common(
    ends_x: tuple[InstanceId, InstanceId], ends_y: tuple[InstanceId, InstanceId]
) -> None:
    bench = Bench()
    bench.links.send((key("x"), *ends_x), 50)
    bench.links.send((key("y"), *ends_y), 100)
    assert bench.run() == [("x", 1.0), ("y", 1.5)]  # 50 each in the first second, then y alone


def test_transfers_with_no_port_in_common_do_not_meet() -> None:
    bench = Bench()
    bench.links.send((key("x"), A, C), 50)
    bench.links.send((key("y"), B, D), 100)
    assert bench.run() == [("x", 0.5), ("y", 1.0)]


HOST_LINKS = HostLinks({A: "m", B: "m", C: "n", D: "n"}, {("m", "n"): 50.0})


def test_transfers_share_the_link_between_their_hosts_in_one_direction() -> None:
    bench = Bench(host_links=HOST_LINKS)
    bench.links.send((key("x"), A, C), 50)
    bench.links.send((key("y"), B, D), 75)  # no port in common
    bench.links.send((key("back"), C, A), 100)
    bench.links.send((key("here"), A, B), 50)  # shares a port with x, which takes less of it than its half
    assert bench.run() == [("back", 1.0), ("here", 1.0), ("x", 2.0), ("y", 2.5)]


def test_a_link_is_known_by_what_kv_takes_on_it_alone() -> None:
    bench = Bench(host_links=HOST_LINKS)
    assert [bench.links.alone_s(*ends, 100) for ends in ((A, C), (C, A), (A, B))] == [2.0, 0.0, 0.0]


def test_what_is_dropped_makes_room() -> None:
    bench = Bench()
    bench.links.send((key("x"), A, C), 50)
    bench.links.send((key("y"), B, C), 100)
    left: list[float] = []
    bench.agenda.at(0.5, lambda: left.append(bench.links.drop((key("x"), A, C))))
    assert bench.run() == [("y", 1.25)]
    assert left == [25]
    assert bench.links.drop((key("x"), A, C)) == 0


def test_more_bytes_on_the_way() -> None:
    bench = Bench()
    bench.links.send((key("x"), A, C), 50)
    bench.agenda.at(0.25, lambda: bench.links.send((key("x"), A, C), 100))
    assert bench.run() == [("x", 1.5)]


@pytest.mark.parametrize("seed", range(5))
def test_no_port_is_overcommitted_and_all_bytes_arrive(seed: int) -> None:
    rng, bench, names = random.Random(seed), Bench(), "abcdef"
    ends = {f"t{n}": (InstanceId(rng.choice(names[:3])), InstanceId(rng.choice(names[3:]))) for n in range(40)}
    sizes = {name: rng.uniform(1, 300) for name in ends}

    def send(name: str) -> None:
        bench.links.send((key(name), *ends[name]), sizes[name])

    for name in ends:
        bench.agenda.at(rng.uniform(0, 10), lambda name=name: send(name))  # type: ignore[misc]
    while bench.agenda.advance():
        for port in names:
            rates = [bench.links.bytes_per_s((key(name), *pair)) for name, pair in ends.items() if port in pair]
            assert sum(rates) <= 100 + 1e-9
    assert {name for name, _ in bench.drained} == set(ends)
    for port in names:
        num_bytes = sum(sizes[name] for name, pair in ends.items() if port in pair)
        assert max(bench.drained, key=lambda end: end[1])[1] >= num_bytes / 100
