"""The scheduler's latest decisions in memory: bounded, and enough to know the mesh at their end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from pdmesh.core.commands import Hold, SetRole, WakeAt
from pdmesh.core.events import InstanceJoined, InstanceLost, KvReleased, RequestArrived, Tick
from pdmesh.core.operator_events import BundleChangeRequested
from pdmesh.decisions import PAGE_DECISIONS, RECENT_S, Decision, MeshMembers, RecentDecisions, decode_decision
from pdmesh.errors import ProtocolError
from pdmesh.model import Epoch, GatewayId, InstanceId, PrefixHash, RequestId, Resident, Role
from pdmesh.operations import PoolCounts
from pdmesh.plans import Evictions
from pdmesh_testing.core import a_request
from pdmesh_testing.modelled import modelled_profile

HASHES = (PrefixHash(b"0123456789abcdef"),)
P0, D0 = modelled_profile("p0", Role.PREFILL), modelled_profile("d0", Role.DECODE)


def all_of(recent: RecentDecisions) -> list[Decision]:
    decisions: list[Decision] = []
    start: int | None = 0
    while start is not None:
        page, start = recent.page(start)
        assert len(page) <= PAGE_DECISIONS
        decisions += map(decode_decision, page)
    return decisions


def test_pages_have_every_decision_once_and_without_hashes() -> None:
    recent = RecentDecisions("fcfs", 2000)
    request = replace(a_request("r"), prefix=HASHES)
    number = 2 * PAGE_DECISIONS + 1
    for n in range(number):
        recent.record(float(n) / 10, RequestArrived(request), [WakeAt(at_s=1.0)])
    plain = RequestArrived(replace(request, prefix=()))
    assert all_of(recent) == [Decision(float(n) / 10, plain, []) for n in range(number)]


def test_no_hashes_of_commands_and_reports_are_kept() -> None:
    """An instance that holds 100,000 tokens has hundreds of hashes, and decisions are many."""
    recent = RecentDecisions("fcfs", 10)
    key: dict[str, Any] = {"instance_id": P0.instance_id, "request_id": RequestId("r"), "epoch": Epoch(0)}
    grown = Hold(**key, num_blocks=3, num_elsewhere_blocks=1)
    full = msgspec.structs.replace(grown, room=Evictions(drop=HASHES, offload=HASHES, evict=HASHES))
    released = KvReleased(**key, num_known=1)
    resident = Resident(
        request_id=RequestId("r"),
        epoch=Epoch(0),
        gateway_id=GatewayId("g"),
        num_blocks=1,
        num_context_tokens=1,
        decoding=True,
    )
    joined = InstanceJoined(P0, (replace(resident, granules=HASHES),), kept=HASHES, offloaded=HASHES)
    recent.record(0.0, replace(released, granules=HASHES), [full, grown])
    recent.record(0.0, joined, [])
    assert all_of(recent) == [
        Decision(0.0, released, [grown, grown]),
        Decision(0.0, InstanceJoined(P0, (resident,)), []),
    ]


def test_what_decides_nothing_is_not_kept() -> None:
    recent = RecentDecisions("fcfs", 10)
    recent.record(1.0, Tick(), [WakeAt(at_s=2.0)])
    assert all_of(recent) == []


@pytest.mark.parametrize("later_s", [1.0, RECENT_S + 10])
def test_what_is_forgotten_still_says_what_the_mesh_is(later_s: float) -> None:
    """By number in the first case, and by age in the second."""
    recent = RecentDecisions("fcfs", 3 if later_s == 1.0 else 100)
    recent.record(0.0, InstanceJoined(P0, ()), [])
    recent.record(0.0, InstanceJoined(D0, ()), [])
    recent.record(0.0, InstanceJoined(replace(D0, instance_id=InstanceId("d1")), ()), [])
    recent.record(0.1, Tick(), [SetRole(instance_id=InstanceId("d1"), role=Role.PREFILL)])
    recent.record(0.2, InstanceLost(D0.instance_id), [])
    recent.record(0.3, BundleChangeRequested("sjf"), [])
    for n in range(3):
        recent.record(later_s + n, RequestArrived(a_request(f"r{n}")), [])
    assert len(all_of(recent)) == 3
    assert recent.before == MeshMembers(
        "sjf", {P0.instance_id: P0, InstanceId("d1"): replace(D0, instance_id=InstanceId("d1"), role=Role.PREFILL)}
    )
    assert recent.before.pools == PoolCounts(prefill=2, decode=0)


@pytest.mark.parametrize("data", [b"", b"\xc0", b"\x92\x01\x91\x92\xa4Boom\xc0"])
def test_a_malformed_decision_is_an_error_of_its_own(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed decision"):
        decode_decision(data)
