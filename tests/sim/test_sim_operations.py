"""A rolling restart of a simulated mesh under load: nothing is lost, nothing is computed twice, nobody is left out."""

from __future__ import annotations

import pytest

from pdmesh.core.commands import Command, Outcome, Restart, StopInstance
from pdmesh.core.events import Event
from pdmesh.core.operator_events import OperationCancelled, RollingRequested
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.operations import OperationId, OperationState
from pdmesh.policy.config import PolicyConfig
from pdmesh_lab.sim.mesh import study_core
from pdmesh_lab.sim.result import SimResult
from pdmesh_lab.sim.simulator import SimConfig, Simulator
from pdmesh_testing.sim import UNEVEN_MODEL, InstanceCounts, a_workload, tiny_mesh

POLICY = PolicyConfig(latency=UNEVEN_MODEL, long_prompt_tokens=200, prefill_step_s=0.3, slo_tpot_s=1.0)
ROLLING = RollingRequested(operation_id=OperationId("x"), timeout_s=60.0, start_timeout_s=60.0)
NUM_REQUESTS = 300


class Listening:
    """A core, and what it commanded."""

    def __init__(self, core: SchedulerCore) -> None:
        self.core = core
        self.check_integrity = core.check_integrity
        self.commands: list[Command] = []

    def handle(self, event: Event, now_s: float) -> list[Command]:
        commands = self.core.handle(event, now_s)
        self.commands += commands
        return commands


def run(
    pools: InstanceCounts, *requested: tuple[float, Event], seed: int, control_delay_s: float = 0.0
) -> tuple[SimResult, Listening]:
    core = Listening(study_core("pdmesh", POLICY, seed))
    config = SimConfig(
        requests_of_operators=requested, restart_s=2.0, control_delay_s=control_delay_s, events_between_checks=50
    )
    arrivals = a_workload(seed, num_requests=NUM_REQUESTS, requests_per_s=4.0)
    result = Simulator(core, tiny_mesh(pools).instances(UNEVEN_MODEL), arrivals, config).run()
    for request in result.requests:
        assert request.outcome is Outcome.FINISHED
        assert len(request.token_times_s) == request.num_output_tokens
        assert list(request.token_times_s) == sorted(request.token_times_s)
    return result, core


@pytest.mark.parametrize("control_delay_s", [0.0, 0.01])
@pytest.mark.parametrize(
    "pools", [{"prefill": 2, "decode": 2}, {"mixed": 3}, {"prefill": 1, "mixed": 2, "decode": 1}], ids=str
)
@pytest.mark.parametrize("seed", range(2))
def test_a_rolling_restart_under_load_loses_nothing(pools: InstanceCounts, seed: int, control_delay_s: float) -> None:
    _, core = run(pools, (5.0, ROLLING), seed=seed, control_delay_s=control_delay_s)
    (view,) = [view for view in core.core.operations if view.operation_id == "x"]
    assert (view.state, view.detail) == (OperationState.DONE, "")
    stopped = [command.instance_id for command in core.commands if isinstance(command, StopInstance)]
    names = {each.instance_id for each in core.core.instances}
    assert sorted(stopped) == sorted(names), "each once"
    restarts = [command for command in core.commands if isinstance(command, Restart)]
    assert not restarts, "what decodes moves, and prompts are waited for"


def test_one_that_is_cancelled_restarts_nobody_more() -> None:
    _, core = run({"prefill": 2, "decode": 2}, (5.0, ROLLING), (6.0, OperationCancelled(OperationId("x"))), seed=0)
    (view,) = [view for view in core.core.operations if view.operation_id == "x"]
    assert view.state is OperationState.CANCELLED
    assert len([command for command in core.commands if isinstance(command, StopInstance)]) == 1
