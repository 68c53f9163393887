"""Whether a group takes turns or computes at once: the predictions, corrected by how long prompts took."""

from __future__ import annotations

import pytest

from pdmesh.core.groups.schedule_choice import ScheduleChoice
from pdmesh.core.requests import GroupState, RequestState
from pdmesh.model import InstanceId, Role
from pdmesh.policy.bundles import make_bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import PROFILES
from pdmesh.policy.prefill_groups import GroupPolicy, Schedule
from pdmesh.policy.views import Rank
from pdmesh.testing.core import CoreBench, a_request
from pdmesh.testing.modelled import modelled_profile
from pdmesh.testing.worker import a_shard

MODEL = PROFILES["a100-llama3-8b"]


def a_group_policy(schedule: Schedule = Schedule.AUTO) -> GroupPolicy:
    policy = PolicyConfig(latency=MODEL, max_group_members=8, link_bytes_per_s=1e12, sequence_parallel=schedule.value)
    group_policy = make_bundle("pdmesh", policy).group_policy
    assert group_policy is not None
    return group_policy


class Prompts:
    """One after the other, shared by two, that take so many times what is predicted."""

    def __init__(self, in_turn: float, at_once: float) -> None:
        bench = CoreBench(modelled_profile("p0", Role.PREFILL, num_layers=32))
        self.leader = bench.core._mesh.instances[InstanceId("p0")]
        self.schedule_choice, self.group_policy = ScheduleChoice(), a_group_policy()
        self.factors = {False: in_turn, True: at_once}
        self.now_s = 0.0

    def next(self, stop_s: float = 0.0) -> bool:
        state, group = new_state()
        is_parallel = self.schedule_choice.is_parallel(state, self.leader, 2, 1, self.group_policy, self.now_s)
        assert group.shared is not None
        self.now_s += self.factors[is_parallel] * group.shared.predicted_s / 2 + stop_s
        self.schedule_choice.ended(group, self.now_s)
        assert group.shared is None
        return is_parallel


def new_state() -> tuple[RequestState, GroupState]:
    """A prompt that a helper was asked for."""
    state = RequestState(a_request("long", 32_000), Rank())
    state.place(a_shard("p0", 1), 0.0, stays=False)
    return state, state.ask_helper(InstanceId("p1"), InstanceId("p0"), capability=1)


def test_what_is_predicted_to_be_faster_is_chosen_as_long_as_it_is_as_predicted() -> None:
    prompts = Prompts(in_turn=1.0, at_once=1.0)
    chosen = [prompts.next() for _ in range(50)]
    assert chosen[0]
    assert sum(chosen[:6]) == 3, "each way is tried"
    assert chosen[6:] == [True] * 44
    both_slow = Prompts(in_turn=1.5, at_once=1.5)
    assert [both_slow.next() for _ in range(50)][6:] == [True] * 44, (
        "that it is slower says nothing of the other way alone"
    )


def test_what_takes_longer_than_predicted_is_given_up_after_a_few_prompts_and_tried_again_after_many() -> None:
    prompts = Prompts(in_turn=1.0, at_once=1.6)
    chosen = [prompts.next() for _ in range(2000)]
    assert not any(chosen[6:60])
    assert any(chosen[60:]), "the machine may have changed"
    assert sum(chosen[60:]) < 0.05 * len(chosen[60:])
    prompts.factors[True] = 1.0
    for _ in range(1500):
        prompts.next()
    assert [prompts.next() for _ in range(20)] == [True] * 20


@pytest.mark.parametrize("when", [0, 1, 2, 3, 4, 5, 30])
@pytest.mark.parametrize(("in_turn", "at_once"), [(1.1, 1.0), (1.0, 1.2)])
def test_one_prompt_that_was_stopped_says_nothing_of_how_it_was_shared(
    when: int, in_turn: float, at_once: float
) -> None:
    prompts = Prompts(in_turn, at_once)
    for number in range(60):
        stop_s = 1000.0 if number == when else 0.0
        chosen = prompts.next(stop_s)
        assert number < 9 or chosen == (at_once < in_turn)


def test_a_prompt_stays_as_it_was_chosen_and_those_who_join_later_count_from_then_on() -> None:
    prompts, (state, group) = Prompts(1.0, 1.0), new_state()
    assert prompts.schedule_choice.is_parallel(state, prompts.leader, 2, 1, prompts.group_policy, 10.0)
    assert prompts.schedule_choice.is_parallel(state, prompts.leader, 2, 100, prompts.group_policy, 10.5), (
        "in many steps it were slower"
    )
    assert group.shared is not None
    predicted_s = group.shared.predicted_s
    group.shared.join(11.0)
    group.shared.predicted_s = 2 * 1.0 + 3 * 0.5
    prompts.schedule_choice.ended(group, 11.5)
    assert prompts.schedule_choice._taken[prompts.leader.device_class].parallel.longer == pytest.approx(0.0)
    assert predicted_s > 0


@pytest.mark.parametrize("schedule", [Schedule.PIPELINED, Schedule.PARALLEL])
def test_what_was_set_is_not_chosen(schedule: Schedule) -> None:
    prompts, (state, group) = Prompts(1.0, 1.0), new_state()
    is_parallel = prompts.schedule_choice.is_parallel(state, prompts.leader, 2, 1, a_group_policy(schedule), 0.0)
    assert is_parallel is (schedule is Schedule.PARALLEL)
    assert group.shared is None
    prompts.schedule_choice.ended(group, 5.0)
