"""The state machine of a request: what may follow what, and that nobody goes around it."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest
from msgspec.structs import replace

import pdmesh.core.requests.request as requests
from pdmesh.core.requests.copy import Copy
from pdmesh.core.requests.group_state import GroupState
from pdmesh.core.requests.phases import FACTS, TRANSITIONS, IllegalTransition, Phase
from pdmesh.core.requests.request import RequestState
from pdmesh.model import InstanceId
from pdmesh.policy.views import Rank
from pdmesh_testing.core import a_request
from pdmesh_testing.worker import a_shard, a_transfer

CORE = Path(requests.__file__).parents[1]
_IN_PLACE, _CHANGE = ("chunks_in_flight", "computed_parts"), ("add", "discard", "append", "update", "clear")
PREFILL, DECODE, OTHER = (a_shard(name, 1) for name in ("p", "d", "e"))


def a_state() -> RequestState:
    return RequestState(a_request("r", prompt=8), Rank())


def placed() -> RequestState:
    state = a_state()
    state.place(PREFILL, 1.0, stays=False)
    return state


def planned() -> RequestState:
    state = placed()
    state.plan_chunk(InstanceId("p"), 0, 8)
    return state


def to(state: RequestState) -> Copy:
    return Copy(state.key, a_transfer(PREFILL, DECODE))


def a_move(state: RequestState) -> Copy:
    return Copy(state.key, replace(a_transfer(DECODE, OTHER), decoding=True))


def test_a_request_that_is_handed_over_goes_through_its_phases() -> None:
    state, phases = a_state(), list[Phase]()

    def note() -> None:
        state.check_integrity()
        phases.append(state.phase)

    note()
    state.place(PREFILL, 1.0, stays=False)
    state.plan_chunk(InstanceId("p"), 0, 8)
    note()
    state.end_chunk(InstanceId("p"), 0)
    state.draw_first_token()
    state.end_prompt()
    note()
    state.receive(to(state))
    note()
    state.lose_receiver()
    note()
    state.receive(to(state))
    state.land()
    note()
    state.begin_copy(a_move(state))
    note()
    state.end_copy(failed=True)
    note()
    state.begin_copy(a_move(state))
    state.land_move()
    note()
    assert phases == [
        Phase.WAITING,
        Phase.PREFILLING,
        Phase.AWAITING_DECODE,
        Phase.TRANSFERRING,
        Phase.AWAITING_DECODE,
        Phase.DECODING,
        Phase.MOVING,
        Phase.DECODING,
        Phase.DECODING,
    ]
    assert (state.decode_id, state.num_failed_moves, state.num_lost_receivers) == ("e", 1, 1)


def test_kv_that_has_a_receiver_while_it_is_computed_is_on_its_way_once_all_of_it_is() -> None:
    state = planned()
    state.receive(to(state))
    before = state.phase
    state.end_prompt()
    assert (before, state.phase) == (Phase.PREFILLING, Phase.TRANSFERRING)


def test_what_stays_lands_where_it_is_computed() -> None:
    state = a_state()
    state.place(PREFILL, 1.0, stays=True)
    state.plan_chunk(InstanceId("p"), 0, 8)
    state.land()
    state.check_integrity()
    assert (state.phase, state.decode_ids) == (Phase.DECODING, ("p",))


def test_an_illegal_transition_names_itself_and_both_phases() -> None:
    with pytest.raises(IllegalTransition, match=r"'r', 0.*begin_copy from prefilling to moving"):
        placed().begin_copy(a_move(placed()))
    with pytest.raises(IllegalTransition, match="land from waiting to decoding"):
        a_state().land()


def test_the_integrity_check_names_what_is_not_as_the_phase_has_it() -> None:
    state = placed()
    state.phase = Phase.DECODING
    with pytest.raises(AssertionError, match="is decoding, and has_receiver is False"):
        state.check_integrity()


def test_a_group_is_over_when_its_prompt_is_computed() -> None:
    state = planned()
    group = state.ask_helper(InstanceId("h"), InstanceId("p"), capability=1)
    group.join(InstanceId("h"), 4)
    assert (state.prefill_ids, state.is_helped_by(InstanceId("h"))) == (("p", "h"), True)
    state.end_prompt()
    assert (state.group, state.prefill_ids, state.asked_ids) == (None, ("p",), ())


def test_a_prompt_goes_on_from_what_the_members_that_are_left_have_computed() -> None:
    group = planned().ask_helper(InstanceId("h"), InstanceId("p"), capability=1)
    group.join(InstanceId("h"), 2)
    group.join(InstanceId("i"), 2)
    group.compute(InstanceId("h"), 2, 4)
    group.compute(InstanceId("i"), 4, 6)
    group.lose(InstanceId("h"))
    assert group.is_recovering
    group.hear_prefix(3)
    assert group.recover(8) == 3, "nobody has the fourth token"
    group.lose(InstanceId("h"))
    group.hear_prefix(4)
    group.compute(InstanceId("i"), 4, 6)
    assert (group.recover(8), group.is_recovering) == (6, False)


def test_the_tables_have_every_phase_and_every_transition() -> None:
    tree = ast.parse((CORE / "requests/request.py").read_text())
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    goes = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "_go"]
    called = {call.args[0].value for call in goes if isinstance(call.args[0], ast.Constant)}
    assert called == TRANSITIONS.keys()
    assert FACTS.keys() == set(Phase)
    assert all(hasattr(RequestState, name) for name in TRANSITIONS), "a transition is the method of its name"


def test_only_their_own_modules_assign_a_request_s_fields() -> None:
    own = {each.name for kind in (RequestState, GroupState) for each in fields(kind)}
    found: set[str] = set()
    for path in CORE.glob("**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in own:
                if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                    found.add(path.relative_to(CORE).as_posix())
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                called_on = node.func.value
                if node.func.attr in _CHANGE and isinstance(called_on, ast.Attribute) and called_on.attr in _IN_PLACE:
                    found.add(path.relative_to(CORE).as_posix())
    assert found - {"requests/request_histories.py"} == {"requests/request.py", "requests/group_state.py"}, (
        "a `Life` is a record of its own, of the same words"
    )
