"""Who used the mesh of late, as operators see it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.cli.status import tenants_table
from pdmesh.core.events import RequestArrived, Tick
from pdmesh.model import Role
from pdmesh.wire.messages import MeshStatus, TenantStatus
from pdmesh_scheduler.observing import Handled
from pdmesh_scheduler.tenants import LATE_S, MAX_TOLD, OTHERS, TenantUsage
from pdmesh_testing.core import CoreBench, a_request
from pdmesh_testing.modelled import modelled_profile


class Scene:
    def __init__(self) -> None:
        instances = (modelled_profile(f"m{number}", Role.MIXED) for number in range(2 * MAX_TOLD))
        self.bench = CoreBench(*instances, chunk_tokens=1024)  # whoever comes is placed at once
        self.usage = TenantUsage(self.bench.core)
        self.num_requests = 0
        self.pass_to(0.0)

    def pass_to(self, now_s: float) -> None:
        self.bench.feed(Tick(), now_s)
        self.usage.observe(Handled(event=Tick(), now_s=now_s, commands=[], milestones=[]))

    def arrive(self, tenant: str, prompt: int, share: int = 1) -> None:
        self.num_requests += 1
        request = a_request(f"r{self.num_requests}", prompt, arrival_s=self.bench.now_s)
        self.bench.feed(RequestArrived(replace(request, tenant=tenant, share=share)))

    @property
    def used(self) -> dict[str, float]:
        return {status.tenant: status.recent_share for status in self.usage.statuses}


def test_what_was_used_longer_ago_is_forgotten() -> None:
    scene = Scene()
    scene.arrive("a", 50)
    scene.arrive("b", 150)
    assert scene.used == {"a": 0.25, "b": 0.75}
    for now_s in range(0, int(2 * LATE_S), 5):
        scene.pass_to(float(now_s))
    assert set(scene.used.values()) == {0.0}
    scene.arrive("a", 100)
    assert scene.used == {"a": 1.0, "b": 0.0}


def test_without_keys_there_is_nothing_to_tell() -> None:
    scene = Scene()
    scene.arrive("", 100)
    assert scene.usage.statuses == ()


def test_many_keys_are_told_of_together() -> None:
    scene = Scene()
    for number in range(3 * MAX_TOLD):
        scene.arrive(f"t{number:02}", 10 + number, share=2)
    statuses = scene.usage.statuses
    assert len(statuses) == MAX_TOLD + 1
    assert statuses[-1].tenant == OTHERS
    assert statuses[0].tenant == f"t{3 * MAX_TOLD - 1}"
    assert sum(status.recent_share for status in statuses) == pytest.approx(1.0)
    waiting_and_running = sum(status.num_waiting + status.num_running for status in statuses)
    assert waiting_and_running == scene.num_requests


def test_status_has_a_line_for_each_key() -> None:
    alice = TenantStatus(tenant="alice", share=3, num_waiting=4, num_running=2, recent_share=0.756)
    others = TenantStatus(tenant=OTHERS, share=0, num_waiting=0, num_running=9, recent_share=0.244)
    state = MeshStatus(
        ready=True, reason="", instances=(), num_waiting=4, num_running=11, bundle="fcfs", tenants=(alice, others)
    )
    rows = [line.split() for line in list(tenants_table(state).lines(80))[1:]]
    assert rows == [["alice", "3", "4", "2", "76%"], [OTHERS, "0", "9", "24%"]]
