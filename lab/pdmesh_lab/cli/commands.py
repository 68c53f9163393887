"""Commands that study a mesh. Each imports its implementation when it runs.

`pdmesh.cli` finds both groups by the entry points `pdmesh.commands` of this distribution.
"""

from __future__ import annotations

from typing import Annotated

from typer import Exit, Option

from pdmesh.cli.command_group import Commands, takes
from pdmesh.cli.operator_commands import DEFAULT_TIMEOUT_S, Timeout
from pdmesh.cli.options import Asked, Output, OutputFormat, asks_scheduler
from pdmesh_lab.cli.options import AdviceOptions, PlanOptions, ReplayOptions, SimulateOptions

app = Commands("pdmesh")
pool_app = Commands("pool")


@app.command(example="pdmesh simulate --trace FILE --bundle fcfs --bundle pdmesh")
@takes(SimulateOptions)
def simulate(options: SimulateOptions, output: OutputFormat = Output.TABLE) -> None:
    """Run a workload through a simulated mesh, once for each bundle, and compare the results."""
    from pdmesh_lab.cli.simulate import run_simulate

    run_simulate(options, output)


@app.command(example="pdmesh plan --trace FILE --slo-ttft 2 --slo-tpot 0.05")
@takes(PlanOptions)
def plan(options: PlanOptions, output: OutputFormat = Output.TABLE) -> None:
    """Find the smallest prefill and decode pools that serve a workload within its targets, by simulation."""
    from pdmesh_lab.cli.capacity import run_plan

    run_plan(options, output)


@app.command(example="pdmesh replay events.log")
@takes(ReplayOptions)
def replay(options: ReplayOptions, output: OutputFormat = Output.TABLE) -> None:
    """Replay a recorded run through the scheduling core and check that every decision is the same."""
    from pdmesh_lab.cli.replay import run_replay

    raise Exit(run_replay(options, output))


@pool_app.command("advise", example="pdmesh pool advise --slo-ttft 0.5 --last 600")
@asks_scheduler
@takes(AdviceOptions)
def pool_advise(
    options: AdviceOptions,
    asked: Asked,
    apply: Annotated[bool, Option("--apply", help="Change the role of one instance as advised.")] = False,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Simulate other pools and bundles on recent requests, and print how many would have met the targets."""
    from pdmesh_lab.cli.advise import apply_advice, run_advise

    if apply:
        raise Exit(apply_advice(asked, options, timeout_s=timeout))
    run_advise(asked, options)
