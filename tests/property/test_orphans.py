"""Orphans of a restart against a plain list of them."""

from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.recovery.orphans import Orphans
from pdmesh.model import Epoch, GatewayId, InstanceId, RequestId

GRACE_S = 3.0

NUMBERS = st.integers(0, 3)
ACTIONS = st.one_of(
    st.tuples(st.just("add"), NUMBERS, NUMBERS),
    st.tuples(st.just("pop"), NUMBERS, NUMBERS),
    st.tuples(st.just("drop_owner"), NUMBERS, st.just(0)),
    st.tuples(st.just("pop_due"), st.integers(0, 40), st.just(0)),
)


@given(st.lists(ACTIONS, max_size=40))
def test_orphans_are_found_dropped_and_due_as_in_a_list(actions: list[tuple[str, int, int]]) -> None:
    orphans: Orphans[InstanceId] = Orphans()
    listed: list[tuple[str, str, str, float]] = []  # request, owner, gateway, deadline; oldest first
    for now, (action, one, other) in enumerate(actions):
        request, owner, gateway = f"request-{one}", f"instance-{other}", f"gateway-{one % 2}"
        match action:
            case "add":
                listed = [each for each in listed if each[0] != request]
                listed.append((request, owner, gateway, now + GRACE_S))
                key = (RequestId(request), Epoch(0))
                orphans.add(key, InstanceId(owner), GatewayId(gateway), now + GRACE_S)
            case "pop":
                found = orphans.pop(RequestId(request), GatewayId(f"gateway-{other % 2}"))
                wanted = [each for each in listed if each[0] == request and each[2] == f"gateway-{other % 2}"]
                assert ([] if found is None else [found.owner]) == [each[1] for each in wanted]
                listed = [each for each in listed if each not in wanted]
            case "drop_owner":
                orphans.drop_owner(InstanceId(f"instance-{one}"))
                listed = [each for each in listed if each[1] != f"instance-{one}"]
            case _:
                due = [each.key[0] for each in orphans.pop_due(float(one))]
                assert due == [each[0] for each in listed if each[3] <= one]
                listed = [each for each in listed if each[3] > one]
        assert len(orphans) == len(listed)
        assert orphans.next_deadline_s == (listed[0][3] if listed else inf)
