"""Policies ask for the rate of the link that KV would take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.model import InstanceId, Role
from pdmesh.policy.bundles import make_bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.links import EqualLinks
from pdmesh.policy.views import InstanceView
from pdmesh_testing.core import a_request


def a_view(name: str, role: Role) -> InstanceView:
    return InstanceView(
        instance_id=InstanceId(name),
        role=role,
        num_blocks=1024,
        num_free_blocks=1024,
        num_virtual_blocks=0,
        num_seats_taken=0,
        max_num_seqs=8,
        num_prefilling=0,
        num_decoding=0,
        num_queued_tokens=0,
        draining=False,
    )


class SlowTo:
    """Links of which those to one instance are slow."""

    def __init__(self, slow: str) -> None:
        self.slow = slow

    def bytes_per_s(self, source: InstanceView, destination: InstanceView | None) -> float:
        return 1.0 if destination is not None and destination.instance_id == self.slow else 1e12


def test_by_default_all_are_as_fast_as_configured() -> None:
    bundle = make_bundle("pdmesh", PolicyConfig(link_bytes_per_s=5e9))
    assert bundle.local_prefill is not None
    assert bundle.run_ahead is not None
    assert bundle.rebalancing is not None
    assert {bundle.local_prefill.links, bundle.run_ahead.links, bundle.rebalancing.links} == {EqualLinks(5e9)}


@pytest.mark.parametrize(("decode", "pays"), [("far", True), ("near", False)])
def test_a_prompt_is_computed_where_it_decodes_if_the_way_there_is_slow(decode: str, pays: bool) -> None:
    local = make_bundle("pdmesh", PolicyConfig(slo_tpot_s=1.0)).local_prefill
    assert local is not None
    local = replace(local, links=SlowTo("far"))
    busy = replace(a_view(decode, Role.DECODE), num_queued_tokens=4000)
    assert local.pays(a_request("r", prompt=512), busy, a_view("p", Role.PREFILL), 1e6) == pays


@pytest.mark.parametrize(("rate", "needs"), [(1.0, True), (1e12, False)])
def test_room_is_promised_in_time_for_the_way_from_where_the_prompt_is_computed(rate: float, needs: bool) -> None:
    ahead = make_bundle("pdmesh", PolicyConfig()).run_ahead
    assert ahead is not None
    ahead = replace(ahead, links=EqualLinks(rate))
    assert ahead.needs_room(a_request("r", prompt=100_000), a_view("p", Role.PREFILL), 0, 1e6, 0.0) == needs


def test_a_move_takes_what_its_link_takes_until_moves_were_timed() -> None:
    rebalancing = make_bundle("pdmesh", PolicyConfig(link_bytes_per_s=1e6)).rebalancing
    assert rebalancing is not None
    source = a_view("d", Role.DECODE)
    assert rebalancing.move_s(source, 2_000_000, None) == pytest.approx(2.05)
    assert rebalancing.move_s(source, 2_000_000, 2e6) == pytest.approx(1.05)
