"""Consistency checks of the core's state, for tests after every event and for the simulator on request."""

from __future__ import annotations

from collections import Counter

from pdmesh.core.instances.allocations import AllocationKind
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.requests.phases import Phase
from pdmesh.core.requests.request import RequestState
from pdmesh.model import InstanceId, RequestKey


def check_integrity(mesh: MeshState) -> None:
    """Raise AssertionError if the state of the mesh is inconsistent."""
    instances = mesh.instances.values()
    assert mesh.arithmetic_classes == Counter(each.arithmetic_class for each in instances), "classes miscounted"
    assert mesh.weights == Counter(each.weights for each in instances), "weights miscounted"
    assert mesh.kv_groups == Counter(each.kv_group for each in instances), "KV groups miscounted"
    mesh.queue.check_integrity()
    mesh.broker.check_integrity()
    mesh.awaiting_decode.check_integrity()
    mesh.numbers.check_integrity([instance.number for instance in mesh.instances.values()])
    suspected = {instance.instance_id for instance in mesh.instances.values() if instance.suspected}
    assert suspected == set(mesh.suspected), f"{suspected} are suspected, recorded: {set(mesh.suspected)}"
    for instance in mesh.instances.values():
        instance.check_integrity()
        for key in mesh.broker.granted(instance.instance_id):
            assert key in instance.allocations, f"{instance.instance_id}: a backend for {key}, which holds nothing"
    in_flight: dict[RequestKey, set[tuple[InstanceId, int]]] = {}
    for instance in mesh.instances.values():
        for plan in instance.plans.values():
            for chunk in plan.chunks:
                chunks = in_flight.setdefault((chunk.request_id, chunk.epoch), set())
                chunks.add((instance.instance_id, plan.plan_id))
    num_waiting = sum(state.phase is Phase.WAITING for state in mesh.requests.values())
    assert num_waiting == len(mesh.queue), f"{num_waiting} requests wait, {len(mesh.queue)} are in the queue"
    num_of_gateways = sum(len(requests) for requests in mesh.of_gateway.values())
    assert num_of_gateways == len(mesh.requests), f"gateways have {num_of_gateways} of {len(mesh.requests)}"
    mesh.computing.check_integrity(mesh.find)
    for state in mesh.requests.values():
        state.check_integrity()
        assert state.is_recovering == (state.key in mesh.recovering), f"{state.key} is healing: {state.is_recovering}"
        chunks, known = in_flight.get(state.key, set()), state.chunks_in_flight
        assert known <= chunks, f"chunks {chunks} of {state.key} are in flight, recorded: {known}"
        lost = [each for each in chunks - known if each[0] in state.prefill_ids]
        assert not lost, f"chunks {lost} of {state.key} are in flight, and not in the mesh state"
        if state.streams_out and state.phase is Phase.PREFILLING:
            _check_giving_back(mesh, state)
        is_awaiting_decode = state.is_in_prefill and not state.decode_shards
        assert is_awaiting_decode == (state.key in mesh.awaiting_decode), (
            f"{state.key} has no receiver: {is_awaiting_decode}"
        )
        if state.phase is not Phase.WAITING and not is_awaiting_decode:
            assert state.decode_id is not None, f"{state.key} runs without a decode instance"
            for shard in state.decode_shards:
                if not state.needs(shard.instance_id):
                    continue
                held = mesh.allocation_of(shard.instance_id, state.key)
                assert held is not None, f"{state.key} has no room on {shard.instance_id}, where it decodes"
                is_part, holds = shard is not state.decode_shards[0], held.kind is AllocationKind.PART
                assert is_part == holds, f"{state.key} has a part on {shard.instance_id}: {is_part}, recorded: {holds}"


def _check_giving_back(mesh: MeshState, state: RequestState) -> None:
    """Check a prompt that is longer than its room: freed ranges have landed, and planned tokens have room."""
    instance = mesh.instances.get(state.prefill_ids[0])
    allocation = mesh.allocation_of(state.prefill_ids[0], state.key)
    if instance is None or allocation is None:
        return
    assert state.incoming is not None, f"{state.key} streams ranges out, and has no receiver"
    num_landed, num_away = state.incoming.num_landed_parts, state.num_ranges_away
    assert num_away <= num_landed, f"{state.key} has given {num_away} ranges back, of {num_landed} that have landed"
    num_held_tokens = allocation.num_blocks * instance.block_size
    assert num_held_tokens == state.held_tokens, f"{state.key} has room for {num_held_tokens}, not {state.held_tokens}"
    end = num_away * instance.max_kv_tokens + num_held_tokens
    assert state.num_planned_tokens <= end, f"{state.key}: {state.num_planned_tokens} planned, with room up to {end}"
