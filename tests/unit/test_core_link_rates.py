"""How fast links are is learnt from transfers, and slow ones are gone around where there are others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.events import InstanceLost, RequestArrived, Tick, TransferSent
from pdmesh.core.instances import link_rates
from pdmesh.core.instances.link_rates import MAX_LINKS, MEMORY_S, LinkRate, LinksAsMeasured, MeasuredLinks
from pdmesh.model import Epoch, InstanceId, InstanceProfile, RequestId, TransferId
from pdmesh_testing.core import CoreBench, a_request, a_view, named_profile

MIB = 1 << 20
A, B, C = (InstanceId(name) for name in "abc")


def on_host(name: str, host: str) -> InstanceProfile:
    like = named_profile(name if name[0] in "pd" else "m")
    return replace(like, instance_id=InstanceId(name), host=host)


def links_of(*names: str) -> MeasuredLinks:
    links = MeasuredLinks()
    for name in names:
        links.joined(on_host(name, f"host-{name}"))
    return links


def test_nothing_is_known_before_the_first_transfer() -> None:
    links = links_of("a", "b")
    assert links.between(A, B) is None
    assert links.slow_from(A, 1 << 40, [B]) == set()
    configured = LinksAsMeasured(links, 5e9)
    assert configured.bytes_per_s(a_view("a"), a_view("b")) == 5e9
    links.note(A, B, 10 * MIB, 0.1, 0.0)
    assert configured.bytes_per_s(a_view("a"), a_view("b")) == pytest.approx(100 * MIB)
    assert configured.bytes_per_s(a_view("b"), a_view("a")) == 5e9
    assert configured.bytes_per_s(a_view("a"), None) == 5e9


def test_a_rate_is_of_two_hosts_and_one_transfer_that_waited_does_not_change_it() -> None:
    links = links_of("a", "b")
    for number, duration_s in enumerate((0.1, 0.1, 60.0, 0.1)):
        links.note(A, B, 10 * MIB, duration_s, float(number))
    links.joined(on_host("c", "host-b"))
    assert links.between(A, C) == links.between(A, B) == pytest.approx(100 * MIB)
    assert links.rates == [LinkRate("host-a", "host-b", pytest.approx(100 * MIB), 4)]  # type: ignore[arg-type]


def test_a_link_is_slow_beside_a_host_that_instances_share() -> None:
    """With one link alone nothing seemed slow, and KV went over it though it could have stayed on its host."""
    links = links_of("a", "b")
    links.note(A, B, 10 * MIB, 0.1, 0.0)
    assert not links.are_uneven
    links.joined(on_host("c", "host-a"))
    assert links.are_uneven
    assert links.slow_from(A, 100 * MIB, [B, C]) == {B}
    assert links.slow_from(A, MIB, [B, C]) == set()
    links.left(C)
    assert not links.are_uneven


@pytest.mark.parametrize("what", ["small", "read in place", "unknown"])
def test_what_says_nothing_of_a_link_is_not_counted(what: str) -> None:
    links = links_of("a", "b")
    num_bytes = 1000 if what == "small" else 10 * MIB
    links.note(A, InstanceId("x") if what == "unknown" else B, num_bytes, 0.0 if what == "read in place" else 0.1, 0.0)
    assert links.rates == []


def test_a_link_is_slow_by_factor_and_by_time_and_is_tried_again_after_a_while() -> None:
    links = links_of("a", "b", "c")
    links.note(A, B, 100 * MIB, 0.1, 0.0)
    links.note(A, C, 100 * MIB, 1.0, 1.0)
    assert links.slow_from(A, 100 * MIB, [B, C]) == {C}
    assert links.slow_from(A, 10 * MIB, [B, C]) == set()  # a tenth of a second is not worth a worse place
    links.expire(1.0 + MEMORY_S)
    assert links.rates == []
    assert links.slow_from(A, 100 * MIB, [B, C]) == set()


def test_no_more_are_kept_than_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_rates, "MAX_LINKS", 3)
    assert MAX_LINKS > 3
    links = links_of(*"abcde")
    for number, name in enumerate("bcde"):
        links.note(A, InstanceId(name), 10 * MIB, 0.1, float(number))
    assert [link.destination for link in links.rates] == ["host-c", "host-d", "host-e"]


def sent(source: str, destination: str, num_bytes: int, sent_s: float) -> TransferSent:
    """A transfer that happened, of a request that is over."""
    of_request = InstanceId(source), RequestId("before"), Epoch(0), TransferId(1)
    return TransferSent(*of_request, num_bytes, sent_s, 0.0, sent_s, InstanceId(destination), was_decoding=True)


def a_bench() -> CoreBench:
    return CoreBench(on_host("p", "host-p"), on_host("d0", "host-0"), on_host("d1", "host-1"))


@pytest.mark.parametrize("slow", ["d0", "d1"])
def test_kv_does_not_take_a_slow_link_where_there_is_another(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_rates, "SLOW_S", 0.0)  # the prompts of tests are small
    bench = a_bench()
    (fast,) = {"d0", "d1"} - {slow}
    bench.feed(sent("p", slow, MIB, 10.0))
    bench.feed(sent("p", fast, MIB, 0.01))
    assert bench.decoding("r") == fast
    bench.feed(InstanceLost(InstanceId(fast)))
    assert bench.decoding("s") == slow  # rather than wait


def test_links_that_are_alike_change_nothing() -> None:
    plain, timed = a_bench(), a_bench()
    for name in ("d0", "d1"):
        timed.feed(sent("p", name, MIB, 0.01))
    for number in range(3):
        request = RequestArrived(a_request(f"r{number}", prompt=64))
        assert plain.feed(request) == timed.feed(request)
    assert len(timed.core.link_rates) == 2
    timed.feed(Tick(), at_s=2 * MEMORY_S)
    assert timed.core.link_rates == []
