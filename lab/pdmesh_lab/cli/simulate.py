"""`pdmesh simulate`: one workload through a simulated mesh, once for each bundle, side by side."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from pdmesh import __version__
from pdmesh.cli.options import Output
from pdmesh.cli.plan import make_pools
from pdmesh.cli.progress import advance, progress_bar
from pdmesh.core.config import KvReservation
from pdmesh.errors import ConfigError
from pdmesh.garbage import rare_collections
from pdmesh.metrics import NO_SLO, Slo
from pdmesh.model import InstanceProfile, Role
from pdmesh.operations import PoolCounts
from pdmesh.policy.batching import NOTHING_EXCLUSIVE
from pdmesh.policy.bundles import make_bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LatencyModel
from pdmesh_lab.cli.options import SimulateOptions
from pdmesh_lab.cli.study import Study, described, make_study, write_file
from pdmesh_lab.sim.agents import AgentLoop
from pdmesh_lab.sim.faults import Death, NoisyModel, random_deaths
from pdmesh_lab.sim.mesh import study_core
from pdmesh_lab.sim.perfetto import chrome_trace
from pdmesh_lab.sim.report import GroupReport, Percentiles, SimReport, report
from pdmesh_lab.sim.result import SimResult
from pdmesh_lab.sim.simulator import Simulator
from pdmesh_lab.sim.workload import Arrival, ClosedLoop, Loop

#: Target for the first token of an agent's turn, if no target is set.
TURN_TTFT_S = 2.0

Instances = Sequence[tuple[InstanceProfile, LatencyModel]]


def run_simulate(options: SimulateOptions, output: Output) -> None:
    """Simulate and print. Raises ConfigError for invalid options, TraceError for a bad trace."""
    bundles = tuple(dict.fromkeys(options.bundles or ("fcfs", "pdmesh")))
    batchings = tuple(dict.fromkeys(options.batchings or ()))  # empty: each bundle's own
    pools = make_pools(options.prefill, options.decode, options.mixed)
    study = make_study(options, bundles)
    mesh = study.mesh(prefill=pools.prefill, decode=pools.decode, mixed=pools.mixed)
    if options.cached_states and options.offload_tokens:
        raise ConfigError("--cached-states is set, but a model with states has no offload tier: leave --offload-tokens")
    mesh = replace(
        mesh,
        num_offload_tokens=options.offload_tokens,
        load_bytes_per_s=options.load_gbytes_per_s * 1e9,
        num_cached_states=options.cached_states,
    )
    if options.threshold is not None and "eb" not in batchings:
        raise ConfigError("--threshold needs --batching eb")
    policy = replace(
        study.policy,
        eb_threshold=options.threshold,
        max_group_members=options.max_group_members,
        sequence_parallel=options.sequence_parallel,
        group_size=options.group_size,
        reserved_instances=_reserved(options, pools),
        link_bytes_per_s=study.config.port_bytes_per_s,
    )
    mesh = replace(
        mesh,
        joins_groups=max(options.max_group_members, options.group_size) > 1,
        prefill_stages=options.prefill_pp,
        decode_stages=options.decode_pp,
    )
    if options.prefill_pp > 1 and options.group_size > 1:
        raise ConfigError(
            "--prefill-pp: instances of several stages compute no prompts together; set --group-size to 1"
        )
    num_computing = pools.prefill + pools.mixed
    if options.group_size > num_computing:
        raise ConfigError(f"--group-size is {options.group_size}: only {num_computing} instances compute prompts")
    if options.group_size > 1 or options.reserved:
        policy = replace(policy, long_prompt_tokens=study.long_tokens)
    instances = mesh.instances(policy.latency)
    arrivals, closed_loop = _agents(options, study) if study.sessions else _asked(options, study.arrivals)
    config = replace(study.config, deaths=_deaths(options, instances, arrivals))
    cores = {
        f"{bundle} {batching}".strip(): study_core(
            bundle,
            replace(policy, batching=batching),
            options.seed,
            kv_reservation=KvReservation(options.kv_reservation),
        )
        for bundle, batching in product(bundles, batchings or ("",))
    }
    if "eb" in batchings and not any(_has_modes(profile, bundles, policy) for profile, _ in instances):
        raise ConfigError(f"--batching eb: {NOTHING_EXCLUSIVE}")
    results: dict[str, SimResult] = {}
    with rare_collections(), progress_bar(output) as progress:
        for name, core in cores.items():
            task = progress.add_task(name, total=len(arrivals) + sum(map(len, study.sessions)))
            simulator = Simulator(
                core,
                _noisy(options, instances),
                arrivals,
                config,
                closed_loop=closed_loop,
            )
            results[name] = simulator.run(advance(progress, task))

    slo = Slo(ttft_s=options.slo_ttft_s, tpot_s=options.slo_tpot_s)
    if study.sessions and slo == NO_SLO:
        slo = Slo(ttft_s=TURN_TTFT_S)
    reports = {name: report(result, long_tokens=study.long_tokens, slo=slo) for name, result in results.items()}
    if options.perfetto is not None:
        write_file(options.perfetto, json.dumps(chrome_trace(results)).encode())
    if output is Output.JSON:
        record = {
            "pdmesh": __version__,
            "options": msgspec.to_builtins(replace(options, perfetto=None)),
            "profile": msgspec.to_builtins(study.profile),
            "policy": msgspec.to_builtins(policy),
            "mesh": msgspec.to_builtins(mesh),
            "bundles": {name: msgspec.to_builtins(figures) for name, figures in reports.items()},
        }
        typer.echo(json.dumps(record, indent=2))
    else:
        console = Console()
        console.print(f"{described(study.profile)}: {pools}", highlight=False)
        console.print(figures_table(reports, has_sessions=bool(study.sessions)))


def _reserved(options: SimulateOptions, pools: PoolCounts) -> int:
    """Return the number of instances that join up to the last reserved one; decode instances join before mixed ones.

    Raises ConfigError if the reserved ones are all that compute prompts, or fewer than a group has.
    """
    num_computing = pools.prefill + pools.mixed
    if 0 < options.reserved < options.group_size:
        raise ConfigError(f"--reserved is {options.reserved}: must be at least --group-size, {options.group_size}")
    if options.reserved and options.reserved >= num_computing:
        raise ConfigError(
            f"--reserved is {options.reserved}: of {num_computing} instances that compute prompts, none is left for "
            "short ones"
        )
    return options.reserved + (pools.decode if options.reserved > pools.prefill else 0)


def _has_modes(profile: InstanceProfile, bundles: Sequence[str], policy: PolicyConfig) -> bool:
    """Return whether an instance prefills and decodes under one of the bundles."""
    if profile.role is not Role.DECODE:
        return profile.role is Role.MIXED
    return any(make_bundle(bundle, policy).local_prefill is not None for bundle in bundles)


def _asked(options: SimulateOptions, arrivals: Sequence[Arrival]) -> tuple[Sequence[Arrival], Loop | None]:
    """Return the requests with the tokens they ask for, and the closed loop of clients if there is one."""
    if options.duration_s is not None:
        raise ConfigError("--duration needs a --trace of agent sessions")
    most = options.max_tokens
    if most is not None:
        arrivals = [
            replace(arrival, num_output_tokens=min(arrival.num_output_tokens, most), max_tokens=most)
            for arrival in arrivals
        ]
    if options.clients is None:
        if options.think_s:
            raise ConfigError("--think needs --clients")
        return arrivals, None
    return arrivals, ClosedLoop(num_clients=((0, options.clients),), think_s=options.think_s)


def _agents(options: SimulateOptions, study: Study) -> tuple[Sequence[Arrival], Loop]:
    """Return no requests, and the closed loop of the sessions' agents. Raises ConfigError for options of requests."""
    for option, is_given in (
        ("--think", options.think_s),
        ("--deaths", options.deaths),
        ("--max-tokens", options.max_tokens is not None),
    ):
        if is_given:
            raise ConfigError(f"{option} cannot be combined with agent sessions")
    num_lanes = len(study.sessions) if options.clients is None else options.clients
    return (), AgentLoop(sessions=study.sessions, num_lanes=num_lanes, duration_s=options.duration_s, seed=options.seed)


def _noisy(options: SimulateOptions, instances: Instances) -> Instances:
    """Return the instances, each with its own noise, which is drawn anew from the seed for every bundle."""
    if not options.noise:
        return instances
    return [
        (profile, NoisyModel(model, options.noise, random.Random(f"{options.seed} {profile.instance_id}")))
        for profile, model in instances
    ]


def _deaths(options: SimulateOptions, instances: Instances, arrivals: Sequence[Arrival]) -> Sequence[Death]:
    """Draw the deaths, at times within the arrivals. Raises ConfigError if there is no time for all."""
    if not options.deaths:
        return ()
    if options.clients is not None:
        raise ConfigError("--deaths cannot be combined with --clients")
    names = [profile.instance_id for profile, _ in instances]
    within_s = max((arrival.arrival_s for arrival in arrivals), default=0.0)
    try:
        return random_deaths(names, options.deaths, within_s, options.away_s, options.seed)
    except ValueError as error:
        raise ConfigError(f"--deaths {options.deaths}: {error}") from error


# --- output ---


def figures_table(reports: Mapping[str, SimReport], *, has_sessions: bool = False) -> Table:
    """Return a table of figures with one column for each bundle.

    With ``has_sessions``, turns are one group, whatever their length.
    """
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in reports:
        table.add_column(name, justify="right")
    runs = list(reports.values())
    groups_of_turns = [("turns", [run.all for run in runs])]
    groups_of_lengths = [("short", [run.short for run in runs]), ("long", [run.long for run in runs])]
    for name, groups in groups_of_turns if has_sessions else groups_of_lengths:
        if any(group.num_requests for group in groups):
            for row in _group_rows(name, groups):
                table.add_row(*row)
    if has_sessions:
        slowest_s = [run.all.tpot_s.p90 for run in runs]
        table.add_row("  tokens/s/user p10", *(_one(1 / tpot_s if tpot_s else None) for tpot_s in slowest_s))
    if any(run.goodput_per_s is not None for run in runs):
        unit = "turns in time/s" if has_sessions else "goodput, requests/s"
        table.add_row(unit, *(_one(run.goodput_per_s) for run in runs))
    table.add_row("output tokens/s", *(_one(run.output_tokens_per_s) for run in runs))
    table.add_row("busy", *("-" if run.busy_share is None else f"{run.busy_share:.1%}" for run in runs))
    if any(run.reused_share is not None for run in runs):
        shares = ["-" if run.reused_share is None else f"{run.reused_share:.1%}" for run in runs]
        table.add_row("prompt tokens reused", *shares)
        table.add_row("  of the possible ones", *map(_hit_of_possible, runs))
    table.add_row("makespan, s", *(_one(run.makespan_s) for run in runs))
    return table


def _hit_of_possible(run: SimReport) -> str:
    """Return the share that was reused of the prompt tokens that an endless cache would have had."""
    if run.reused_share is None or not run.possible_share:
        return "-"
    return f"{run.reused_share / run.possible_share:.1%}"


def _group_rows(name: str, groups: Sequence[GroupReport]) -> Iterator[tuple[str, ...]]:
    yield f"{name}: finished", *(f"{group.num_finished} of {group.num_requests}" for group in groups)
    yield from _percentile_rows("TTFT", "s", [group.ttft_s for group in groups])
    yield from _percentile_rows("queueing", "s", [group.queueing_s for group in groups])
    yield from _percentile_rows("TPOT", "ms", [group.tpot_s for group in groups], 1e3)
    yield "  JCT mean, s", *(_one(group.mean_jct_s) for group in groups)
    yield "  requests/s", *(_one(group.requests_per_s) for group in groups)
    yield "  preemptions", *(str(group.num_preemptions) for group in groups)
    if any(group.num_restarts for group in groups):
        yield "  restarts", *(str(group.num_restarts) for group in groups)


def _percentile_rows(
    name: str, unit: str, figures: Sequence[Percentiles], scale: float = 1.0
) -> Iterator[tuple[str, ...]]:
    yield f"  {name} p50, {unit}", *(_one(values.p50, scale) for values in figures)
    yield "    p90", *(_one(values.p90, scale) for values in figures)
    yield "    p99", *(_one(values.p99, scale) for values in figures)


def _one(value: float | None, scale: float = 1.0) -> str:
    if value is None:
        return "-"
    value *= scale
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
