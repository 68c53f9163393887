"""`pdmesh plan`: the smallest prefill and decode pools that serve a workload within its targets, by simulation."""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import replace

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from pdmesh import __version__
from pdmesh.cli.options import Output
from pdmesh.cli.progress import advance, progress_bar
from pdmesh.errors import ConfigError, PdmeshError
from pdmesh.garbage import rare_collections
from pdmesh.metrics import Slo
from pdmesh.policy.latency import StepShape
from pdmesh.policy.latency_profile import Profile
from pdmesh_lab.cli.options import PlanOptions
from pdmesh_lab.cli.simulate import figures_table
from pdmesh_lab.cli.study import BLOCK_SIZE, described, make_study, part_exchange_s
from pdmesh_lab.sim.capacity import ContextRoom, PoolSizes, smallest_pools, unattainable
from pdmesh_lab.sim.mesh import study_core
from pdmesh_lab.sim.report import SimReport, report
from pdmesh_lab.sim.simulator import Simulator


def run_plan(options: PlanOptions, output: Output) -> None:
    """Search and print. Raises ConfigError for invalid options and for targets that cannot be met.

    Raises PdmeshError if the largest pools allowed do not meet the targets.
    """
    if not 0 < options.attainment <= 1:
        raise ConfigError(f"--attainment is {options.attainment}: must be a share, more than 0 and at most 1")
    study = make_study(options, (options.bundle,))
    if study.sessions:
        raise ConfigError("--trace is a folder: agent sessions have no times of arrival; use `pdmesh simulate`")
    if options.spread:
        options = replace(options, max_kv_tokens=_longest_alone(options, study.profile))
        study = replace(study, instances=replace(study.instances, max_kv_tokens=options.max_kv_tokens))
    slo = Slo(ttft_s=options.slo_ttft_s, tpot_s=options.slo_tpot_s)
    if slo == Slo() and all(arrival.slo_ttft_s is arrival.slo_tpot_s is None for arrival in study.arrivals):
        raise ConfigError("no target is given: set --slo-ttft, --slo-tpot or both")
    model = study.policy.latency
    room = ContextRoom(
        options.kv_tokens, options.max_kv_tokens, _exchange_s(options, study.profile), options.max_instances
    )
    reason = unattainable(study.arrivals, model, slo, options.attainment, room)
    if reason is not None:
        raise ConfigError(reason)
    reports: dict[PoolSizes, SimReport] = {}

    with rare_collections(), progress_bar(output) as progress:

        def attainment(sizes: PoolSizes) -> float:
            task = progress.add_task(str(sizes), total=len(study.arrivals))
            mesh = study.mesh(prefill=sizes.num_prefill, decode=sizes.num_decode)
            core = study_core(options.bundle, study.policy, options.seed)
            result = Simulator(core, mesh.instances(model), study.arrivals, study.config).run(advance(progress, task))
            reports[sizes] = figures = report(result, long_tokens=study.long_tokens, slo=slo)
            progress.remove_task(task)
            return figures.all.slo_attainment or 0.0

        found = smallest_pools(attainment, options.attainment, options.max_instances)

    if output is Output.JSON:
        record = {
            "pdmesh": __version__,
            "options": msgspec.to_builtins(options),
            "profile": msgspec.to_builtins(study.profile),
            "policy": msgspec.to_builtins(study.policy),
            "pools": None if found.sizes is None else found.sizes._asdict(),
            "tried": [{**sizes._asdict(), "slo_attainment": share} for sizes, share in found.attainments.items()],
            "figures": None if found.sizes is None else msgspec.to_builtins(reports[found.sizes]),
        }
        typer.echo(json.dumps(record, indent=2))
    if found.sizes is None:
        best = max(found.attainments.values())
        raise PdmeshError(
            f"{PoolSizes(options.max_instances, options.max_instances)} instances serve {best:.2%} of the requests "
            f"within their targets, not {options.attainment:.2%}"
        )
    if output is Output.TABLE:
        console = Console()
        console.print(described(study.profile), highlight=False)
        if options.max_kv_tokens:
            console.print(
                f"contexts of more than {options.max_kv_tokens:,} tokens are spread: "
                f"worker.max_kv_tokens_per_instance = {options.max_kv_tokens}",
                highlight=False,
                soft_wrap=True,
            )
        console.print(_tried(found.attainments, found.sizes))
        console.print()
        console.print(figures_table({str(found.sizes): reports[found.sizes]}))


def _exchange_s(options: PlanOptions, profile: Profile) -> float:
    """Return the seconds by which spreading the context lengthens a decode step."""
    return part_exchange_s(options) * profile.subject.num_layers


def _longest_alone(options: PlanOptions, profile: Profile) -> int:
    """Return the longest context, in whole blocks, that decodes within the target on one instance (Mnemosyne §4.4).

    Raises ConfigError if there is none.
    """
    if options.slo_tpot_s is None:
        raise ConfigError("--spread needs --slo-tpot: it spreads contexts whose decode would miss that target")
    if options.max_kv_tokens:
        raise ConfigError("--spread and --max-kv-tokens both set the longest context of an instance: give one")
    model, exchange_s = profile.latency, _exchange_s(options, profile)

    def step_s(num_tokens: int) -> float:
        return model.step_s(StepShape((), 1, num_tokens)) + exchange_s

    tpot_s = options.slo_tpot_s
    most = bisect_left(range(1, options.kv_tokens + 1), True, key=lambda num_tokens: step_s(num_tokens) > tpot_s)
    if most < BLOCK_SIZE:
        raise ConfigError(f"--slo-tpot is {options.slo_tpot_s:g} s: a decode step takes longer whatever the context")
    return most // BLOCK_SIZE * BLOCK_SIZE


def _tried(attainments: dict[PoolSizes, float], answer: PoolSizes) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("prefill", "decode", "within targets"):
        table.add_column(name, justify="right")
    table.add_column("")
    for sizes, share in attainments.items():
        mark = "the smallest" if sizes == answer else ""
        table.add_row(str(sizes.num_prefill), str(sizes.num_decode), f"{share:.2%}", mark)
    return table
