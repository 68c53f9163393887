"""What is kept sorted by those that changed is what sorting all of them gives."""

from __future__ import annotations

import random

import pytest

from pdmesh.core.instances.allocations import Allocation, AllocationKind
from pdmesh.core.instances.cache_index import CacheIndex
from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.instances.kv_growth import Growth
from pdmesh.core.instances.lengths import Lengths
from pdmesh.core.instances.ranking import Decoders, Ranking
from pdmesh.core.requests.request import RequestState
from pdmesh.core.waiting.queue import WaitingQueue
from pdmesh.model import InstanceId, PrefixHash, Role
from pdmesh.policy.placement import Apart
from pdmesh.policy.views import InstanceView
from pdmesh_lab.studies.order import ShortFirst
from pdmesh_testing.core import FixedGrowth, a_request
from pdmesh_testing.modelled import modelled_profile

PLACE = Apart(long_prompt_tokens=1000)


def line_of(members: dict[InstanceId, InstanceState]) -> list[InstanceId]:
    return sorted(members, key=lambda name: (PLACE.key(members[name].view), members[name].kept.last_begun, name))


@pytest.mark.parametrize("on_demand", [False, True])
def test_members_that_come_go_and_change_are_in_line_as_if_sorted_anew(on_demand: bool) -> None:
    rng, changed = random.Random(0), dict[InstanceId, None]()
    growth, where = FixedGrowth(20.0, on_demand=on_demand), CacheIndex()
    roles = (Role.DECODE, Role.MIXED, Role.PREFILL)
    instances = [
        InstanceState(modelled_profile(f"i{n}", rng.choice(roles)), changed=changed, growth=growth, cache_index=where)
        for n in range(12)
    ]
    ranking, decoders = Ranking(PLACE.key), Decoders(PLACE, None)
    members: dict[InstanceId, InstanceState] = {}
    for number in range(400):
        instance = rng.choice(instances)
        if rng.random() < 0.2:
            members.pop(instance.instance_id, None)
            ranking.discard(instance.instance_id)
            decoders.look_at(instance.instance_id, None)
        else:
            key = a_request(f"r{number}")
            if instance.allocations and rng.random() < 0.5:
                instance.give_back(next(iter(instance.allocations)))
            elif instance.num_free_blocks > 20 and instance.allocated.num_seats_taken < 8:
                chain = (PrefixHash(bytes(16)),) if rng.random() < 0.5 else ()
                instance.take(
                    (key.request_id, key.epoch), Allocation(AllocationKind.RESIDENT, rng.randint(1, 20)), chain
                )
            members[instance.instance_id] = instance
            ranking.put(instance)
            decoders.look_at(instance.instance_id, instance)
        if rng.random() < 0.5:
            assert [instance.instance_id for *_, instance in ranking.line()] == line_of(members)
            request = a_request("new", prompt=rng.randint(1, 250), output=rng.choice((4, 100)))
            first = decoders.firsts(request).get(instances[0].arithmetic_class)
            fitting = [name for name in line_of(members) if members[name].can_decode(request)]
            assert (first and first.instance_id) == (fitting[0] if fitting else None)


def test_an_instances_view_has_each_number_in_its_own_field() -> None:
    profile = modelled_profile("i", Role.MIXED, num_blocks=99, block_size=16, max_num_seqs=17)
    instance = InstanceState(profile, growth=Growth(), changed={}, number=7)
    kinds = (
        [AllocationKind.LEAVING] * 3
        + [AllocationKind.LOCAL] * 2
        + [AllocationKind.PROMISED] * 4
        + [AllocationKind.RESIDENT] * 6
    )
    for number, kind in enumerate(kinds):
        key = a_request(f"r{number}")
        allocation = Allocation(kind, kind, long_tokens=5000, slo_tpot_s=0.25)
        instance.take((key.request_id, key.epoch), allocation)
    instance.queue_tokens(1234)
    instance.set_draining(True)
    assert instance.view == InstanceView(
        instance_id=InstanceId("i"),
        role=Role.MIXED,
        num_blocks=99,
        num_free_blocks=99 - sum(kinds),
        num_virtual_blocks=4 * AllocationKind.PROMISED,
        num_seats_taken=12,
        max_num_seqs=17,
        num_prefilling=5,
        num_decoding=6,
        num_queued_tokens=1234,
        draining=True,
        reachable=True,
        suspected=False,
        num_resident_tokens=6 * AllocationKind.RESIDENT * 16,
        num_long_prefilling=5,
        num_long_decoding=6,
        shortest_long_prefill_tokens=5000,
        slo_tpots_s=frozenset([0.25]),
        number=7,
        device_class=instance.device_class,
    )


def test_lengths_come_and_go() -> None:
    lengths = Lengths()
    assert (lengths.least, lengths.greatest, len(lengths)) == (0, 0, 0)
    for length in (5, 3, 5, 9):
        lengths.add(length)
    lengths.remove(5)
    assert lengths.all() == [3, 5, 9]
    assert (lengths.least, lengths.greatest) == (3, 9)


def test_a_lane_that_waits_is_passed_over_until_nobody_waits() -> None:
    order, queue = ShortFirst(long_prompt_tokens=1000), WaitingQueue()
    short, later, long = (
        RequestState(request, order.rank(request, 0, None))
        for request in (a_request("a", 10), a_request("b", 10, arrival_s=1.0), a_request("c", 2000))
    )
    for state in (short, later, long):
        queue.add(state, 100.0)
    assert queue.head(order, 2.0) is short
    queue.defer(short, as_long=False)
    assert queue.head(order, 2.0) is long
    queue.remove(short)
    assert queue.head(order, 2.0) is long
    queue.defer(long, as_long=True)
    assert queue.head(order, 2.0) is None
    queue.call_all()
    assert queue.head(order, 2.0) is later


def test_a_request_may_come_again_at_the_time_it_came_before() -> None:
    order, queue = ShortFirst(long_prompt_tokens=1000), WaitingQueue()
    first, other, again = (
        RequestState(request, order.rank(request, 0, None))
        for request in (a_request("a"), a_request("b"), a_request("a", epoch=1))
    )
    for state in (first, other):
        queue.add(state, 100.0)
    assert queue.head(order, 0.0) is first
    queue.remove(first)
    queue.add(again, 100.0)
    assert queue.head(order, 0.0) is again


def test_turns_set_aside_are_sorted_when_they_are_looked_at_and_not_each_time() -> None:
    rng, order, queue = random.Random(1), ShortFirst(long_prompt_tokens=1000), WaitingQueue()
    turns = queue.turns_aside
    since_s = [rng.random() for _ in range(100)]
    for number, since in enumerate(since_s):
        request = a_request(f"r{number}")
        state = RequestState(request, order.rank(request, 0, None))
        queue.add(state, 100.0)
        queue.set_aside(state, since)
        assert queue.turns_aside is turns
    queue.sort_turns_aside()
    assert [since for _, since in queue.turns_aside.values()] == sorted(since_s)
    queue.check_integrity()
