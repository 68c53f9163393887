"""Whose KV has come to whom: members of a group on modelled links of 100 bytes a second, with a byte for each token."""

from __future__ import annotations

import pytest

from pdmesh.model import Epoch, InstanceId, RequestId
from pdmesh.plans import ChunkPlan, PrefillGroup
from pdmesh_lab.sim.agenda import Agenda
from pdmesh_lab.sim.exchange import SimulatedExchange
from pdmesh_lab.sim.links import FlowId, SimulatedLinks

A, B, C, D = (InstanceId(name) for name in "abcd")
KEY = RequestId("r"), Epoch(0)


class Bench:
    def __init__(self) -> None:
        self.agenda = Agenda()
        self.links = SimulatedLinks(self.agenda, 100.0, self._drained)
        self.exchange = SimulatedExchange(self.agenda, self.links)
        self.landed: list[tuple[float, int]] = []  # at the leader
        self.others: list[tuple[float, FlowId]] = []

    def _drained(self, flow: FlowId) -> None:
        if not self.exchange.drained(flow):
            self.others.append((self.agenda.now_s, flow))

    def group(self, *members: InstanceId, num_computed_tokens: int = 0) -> None:
        self.exchange.set_group(
            KEY,
            PrefillGroup(member_ids=members, capability=1),
            num_computed_tokens=num_computed_tokens,
            token_bytes=1.0,
            last_layer_share=0.25,
            landed=lambda num_tokens: self.landed.append((self.agenda.now_s, num_tokens)),
        )

    def step(self, member_id: InstanceId, start: int, num_tokens: int, began_s: float, ended_s: float) -> None:
        chunk = ChunkPlan(request_id=KEY[0], epoch=KEY[1], start=start, num_tokens=num_tokens, is_last=False)
        self.agenda.at(began_s, lambda: self.exchange.began(KEY, chunk, member_id))
        self.agenda.at(ended_s, lambda: self.exchange.ended(KEY, chunk, member_id))

    def run(self) -> None:
        while self.agenda.advance():
            pass

    def since_s(self, member_id: InstanceId, start: int) -> float | None:
        return self.exchange.since_s(KEY, member_id, start)


def test_all_but_the_last_layer_moves_while_it_is_computed() -> None:
    bench = Bench()
    bench.group(A, B)
    bench.step(A, 0, 200, began_s=0.0, ended_s=4.0)
    bench.run()
    assert bench.since_s(A, 200) == 4.0
    assert bench.since_s(B, 200) == 4.5  # 50 bytes are left of 200 when it is computed
    assert bench.since_s(B, 0) == float("-inf")
    assert bench.since_s(B, 201) is None


def test_what_moves_more_slowly_than_it_is_computed_arrives_in_order() -> None:
    bench = Bench()
    bench.group(A, B)
    bench.step(A, 0, 200, began_s=0.0, ended_s=1.0)
    bench.step(A, 200, 200, began_s=1.0, ended_s=2.0)
    bench.run()
    assert bench.since_s(B, 200) == pytest.approx(2.0)
    assert bench.since_s(B, 400) == pytest.approx(4.0)


def test_one_that_joins_late_is_sent_what_was_computed_before_by_the_leader() -> None:
    bench = Bench()
    bench.group(A, B, num_computed_tokens=100)
    bench.step(B, 100, 100, began_s=0.0, ended_s=2.0)
    bench.agenda.at(3.0, lambda: bench.group(A, B, C))
    bench.run()
    assert bench.since_s(B, 100) == 1.0
    assert bench.since_s(A, 200) == 2.25
    assert bench.landed == [(2.25, 100)]
    assert bench.since_s(C, 200) == 5.0, "200 bytes from 3 s on, all from the leader"


def test_one_that_joins_while_a_chunk_is_computed_is_sent_all_of_it_at_its_end() -> None:
    bench = Bench()
    bench.group(A, B)
    bench.step(B, 0, 100, began_s=0.0, ended_s=2.0)
    bench.agenda.at(1.0, lambda: bench.group(A, B, C))
    bench.run()
    # 100 bytes to C and 25 to A from one port: A's are done after half a second.
    assert bench.since_s(A, 100) == 2.5
    assert bench.since_s(C, 100) == 3.25


def test_who_waits_goes_on_when_all_before_has_come() -> None:
    bench = Bench()
    bench.group(A, B, C)
    gone_on: list[float] = []
    bench.exchange.wait(KEY, C, 200, lambda: gone_on.append(bench.agenda.now_s))
    bench.step(B, 100, 100, began_s=0.0, ended_s=1.0)
    bench.step(A, 0, 100, began_s=0.0, ended_s=3.0)
    bench.run()
    assert gone_on == [bench.since_s(C, 200)]
    assert gone_on[0] > 3.0


def test_members_share_ports_with_transfers_and_what_nobody_needs_is_dropped() -> None:
    bench = Bench()
    bench.group(A, B)
    transfer = ((RequestId("other"), Epoch(0)), A, D)
    bench.links.send(transfer, 100)
    bench.step(A, 0, 400, began_s=0.0, ended_s=5.0)
    last = ChunkPlan(request_id=KEY[0], epoch=KEY[1], start=400, num_tokens=10, is_last=True)
    bench.agenda.at(5.0, lambda: bench.exchange.began(KEY, last, A))
    bench.agenda.at(5.5, lambda: bench.exchange.ended(KEY, last, A))
    bench.run()
    assert bench.others == [(2.0, transfer)], "100 bytes by half a port"
    assert not bench.exchange.is_shared(KEY)
    assert bench.agenda.now_s == 5.5, "nothing moves any more"
