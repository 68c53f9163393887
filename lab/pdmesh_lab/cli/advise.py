"""`pdmesh pool advise`: the results that other pools, or another bundle, would have had in the last minutes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf, isfinite
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import msgspec
import typer

from pdmesh.cli.operation_requests import current_state, start
from pdmesh.cli.options import Asked, Output, new_operation_id
from pdmesh.cli.progress import progress_bar
from pdmesh.cli.tables import Column, Table
from pdmesh.core.config import LatencyLearning
from pdmesh.core.events import InstanceJoined
from pdmesh.core.operator_events import OperationRequested
from pdmesh.decisions import Decision, MeshMembers, decode_decision
from pdmesh.errors import ConfigError, ProtocolError
from pdmesh.eventlog import EventLogReader, Header, core_of
from pdmesh.garbage import rare_collections
from pdmesh.metrics import NO_SLO, Slo
from pdmesh.model import InstanceId, InstanceProfile, Role
from pdmesh.operations import OperationKind, PoolCounts
from pdmesh.policy.latency import LatencyModel
from pdmesh.policy.latency_profile import self_measured
from pdmesh.wire.messages import GetDecisions, InstanceStatus, LatestDecisions
from pdmesh_lab.cli.options import AdviceOptions
from pdmesh_lab.cli.replay import Replay
from pdmesh_lab.sim.advice import Advice, PoolForecast, Proposal, RecordedLoad, recent
from pdmesh_lab.sim.recorded import RecordedRun, recorded_run
from pdmesh_lab.sim.samples import fitted_model, step_noise

#: Fewest requests for advice.
MIN_REQUESTS = 20

#: Bundles that are tried beside the one in use.
BUNDLES = ("fcfs", "pdmesh")

#: Number of proposals that are printed.
NUM_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Recording:
    """Decisions to learn from, and the mesh at their end."""

    header: Header
    run: RecordedRun
    mesh: MeshMembers
    source: str


def recording_of(asked: Asked, options: AdviceOptions) -> Recording:
    """Return the recording in the given log, or in the memory of the mesh's scheduler if no log is given.

    Raises PdmeshError if the log cannot be read, or no mesh can be asked.
    """
    if options.log is not None:
        return read_log(options.log)
    pages = anyio.run(_latest, asked)
    header = msgspec.convert(msgspec.msgpack.decode(pages[0].header), Header)
    mesh = MeshMembers(pages[0].bundle, {profile.instance_id: profile for profile in pages[0].profiles})
    joined = [Decision(-inf, InstanceJoined(profile, ()), ()) for profile in pages[0].profiles]
    decisions = chain(joined, (decode_decision(data) for page in pages for data in page.decisions))
    return Recording(header, recorded_run(_followed(decisions, mesh)), mesh, "the scheduler's memory")


def read_log(path: Path) -> Recording:
    """Return the recording in an event log. Raises ConfigError."""
    try:
        with EventLogReader(path) as log:
            decisions = Replay(log, None)
            mesh = MeshMembers(log.header.bundle)
            run = recorded_run(_followed(decisions, mesh))
            header = log.header
    except OSError as error:
        raise ConfigError(f"cannot read the event log {path}: {error.strerror}") from error
    if not decisions.is_faithful:
        raise ConfigError(f"{path} was written by another version of pdmesh, which decides differently")
    return Recording(header, run, mesh, str(path))


async def _latest(asked: Asked) -> list[LatestDecisions]:
    pages: list[LatestDecisions] = []
    start: int | None = 0
    while start is not None:
        answer = await asked.ask(GetDecisions(start=start), LatestDecisions)
        pages.append(answer)
        if answer.next_start is not None and answer.next_start <= start:
            raise ProtocolError("the scheduler sent a page of its events twice")
        start = answer.next_start
    return pages


def _followed(decisions: Iterable[Decision], mesh: MeshMembers) -> Iterator[Decision]:
    for decision in decisions:
        mesh.apply(decision)
        yield decision


def run_advise(asked: Asked, options: AdviceOptions) -> None:
    """Print the better pools or bundles. Raises ConfigError if the recording does not contain enough."""
    advice = advise(recording_of(asked, options), options, asked.output)
    if asked.output is Output.JSON:
        typer.echo(json.dumps(_as_json(advice), indent=2))
    else:
        _print(advice)


def advise(recording: Recording, options: AdviceOptions, output: Output, *, same_bundle: bool = False) -> Advice:
    """Simulate all proposals on the end of a recording; with ``same_bundle`` only proposals that keep the bundle.

    Raises ConfigError if the recording does not contain enough.
    """
    header, mesh = recording.header, recording.mesh
    runs = recent(recording.run, options.last_s)
    if len(runs) < MIN_REQUESTS or not mesh.profiles:
        raise ConfigError(
            f"{len(runs)} requests ended in the last {options.last_s:g} s of {recording.source}: at least "
            f"{MIN_REQUESTS} are needed for advice"
        )
    slo = Slo(ttft_s=options.slo_ttft_s, tpot_s=options.slo_tpot_s)
    like = next(iter(mesh.profiles.values()))
    try:
        latency = fitted_model(recording.run, _prior(header, like))
    except ValueError:
        raise ConfigError("there are no steps to fit a latency model to") from None
    load = RecordedLoad(
        runs=runs,
        like=like,
        latency=latency,
        noise=step_noise(recording.run, latency),
        slo=slo,
        long_tokens=header.config.policy.long_prompt_tokens,
        new_core=lambda bundle: core_of(header, bundle),
    )
    if slo == NO_SLO and all(each.slo_ttft_s is None and each.slo_tpot_s is None for each in load.arrivals):
        raise ConfigError("the requests have no targets: set --slo-ttft or --slo-tpot")
    with rare_collections(), progress_bar(output) as progress:
        task = progress.add_task("simulating", total=None)
        return load.advise(
            Proposal(mesh.pools, mesh.bundle),
            list(dict.fromkeys((mesh.bundle, *(() if same_bundle else BUNDLES)))),
            min_gain=options.min_gain_percent / 100,
            default_tpot_s=header.config.policy.slo_tpot_s,
            on_forecast=lambda: progress.advance(task),
        )


def _prior(header: Header, like: InstanceProfile) -> LatencyModel | None:
    """Return the step times that the scheduler began with; None if no instance was measured."""
    is_configured = header.config.learning is not LatencyLearning.MEASURED
    return self_measured(like) or (header.config.policy.latency if is_configured else None)


class Flip(NamedTuple):
    """A change of one instance's role."""

    instance_id: InstanceId
    role: Role


def next_flip(there: Sequence[InstanceStatus], wanted: PoolCounts) -> Flip | None:
    """Return one step towards ``wanted``: the new role for the least used instance of a role that has too many.

    Return None if the pools are as wanted, or if the others could not serve requests during any such change.
    """
    counts = Counter(row.role for row in there)
    flips = [
        (row.num_prefilling + row.num_decoding, row.instance_id, role)
        for row in there
        if counts[row.role] > wanted.of(row.role) and row.state == "up"
        for role in Role
        if counts[role] < wanted.of(role) and _can_serve(counts - Counter([row.role]) + Counter([role]))
    ]
    return Flip(*min(flips, key=lambda flip: flip[:2])[1:]) if flips else None


def _can_serve(counts: Mapping[Role, int]) -> bool:
    return (
        PoolCounts(prefill=counts[Role.PREFILL], decode=counts[Role.DECODE], mixed=counts[Role.MIXED]).why_not is None
    )


def apply_advice(asked: Asked, options: AdviceOptions, *, timeout_s: float) -> int:
    """Change one role as advised, unless no proposal is good enough, and return the exit code.

    The bundle stays, and no process is started or stopped.
    """
    there = current_state(asked).instances
    advice = advise(recording_of(asked, options), options, Output.JSON, same_bundle=True)
    now = advice.now.proposal.pools
    if (best := advice.best) is None:
        _say(asked, f"no proposal is better by {options.min_gain_percent:g} % than {now}")
        return 0
    wanted = best.proposal.pools
    if all(wanted.of(role) == sum(row.role is role for row in there) for role in Role):
        _say(asked, f"{wanted}, the better pools, are already running")
        return 0
    if (flip := next_flip(there, wanted)) is None:
        _say(asked, f"{wanted} would be better, but no instance can change its role now")
        return 0
    _say(
        asked,
        f"{wanted} would have had {best.attainment:.1%} of requests within targets, "
        f"{now} {advice.now.attainment:.1%}: {flip.instance_id} becomes {flip.role}",
    )
    requested = OperationRequested(
        operation_id=new_operation_id(),
        kind=OperationKind.ROLE,
        instance_id=flip.instance_id,
        timeout_s=timeout_s,
        role=flip.role,
    )
    return start(asked, requested)


def _say(asked: Asked, what: str) -> None:
    """Print a message; to standard error if standard output is for JSON."""
    typer.echo(f"pdmesh: {what}", err=asked.output is Output.JSON)


def command_of(now: Proposal, best: Proposal) -> list[str]:
    """Return the commands to type for a proposal."""
    pools = best.pools
    commands: list[str] = []
    if pools != now.pools:
        sizes = " ".join(f"--{role} {pools.of(role)}" for role in Role)
        commands.append(f"pdmesh pool resize {sizes}")
    if best.bundle != now.bundle:
        commands.append(f"pdmesh policy set {best.bundle}")
    return commands


def _print(advice: Advice) -> None:
    numbers = ("in time", "+/-", "a second", "ttft p50", "ttft p99", "tpot p99")
    table = Table([Column("pools"), Column("bundle"), *(Column(title, right=True) for title in numbers)])
    _add(table, advice.recorded, "real")
    _add(table, advice.now, "now")
    for each in advice.outlooks[:NUM_SHOWN]:
        if each is not advice.now:
            _add(table, each, f"{100 * (each.attainment - advice.now.attainment):+.1f}")
    table.show()
    typer.echo(
        f"{advice.num_requests} requests; all figures but the first line's are simulated, with a model of their steps"
    )
    if (other := advice.too_slow) is not None:
        typer.echo(
            f"{other.proposal.pools} ({other.proposal.bundle}) would have had more within targets, but takes more than "
            f"{1e3 * advice.tpot_limit_s:.3g} ms per token; set the limit with --slo-tpot"
        )
    if advice.best is None:
        typer.echo(f"no proposal is better by {100 * advice.min_gain:g} %: keep the mesh as it is")
        return
    for command in command_of(advice.now.proposal, advice.best.proposal):
        typer.echo(f"  {command}")


def _add(table: Table, each: PoolForecast, what: str) -> None:
    figures = each.figures
    goodput = figures.goodput_per_s
    table.add(
        str(each.proposal.pools),
        each.proposal.bundle,
        f"{each.attainment:.1%}",
        what,
        "" if goodput is None else f"{goodput:.3g}",
        *map(_time, (figures.all.ttft_s.p50, figures.all.ttft_s.p99, figures.all.tpot_s.p99)),
    )


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _as_json(advice: Advice) -> dict[str, Any]:
    best = advice.best
    return {
        "num_requests": advice.num_requests,
        "recorded": _figures(advice.recorded),
        "now": _figures(advice.now),
        "proposals": [_figures(each) for each in advice.outlooks],
        "best": None if best is None else _figures(best),
        "tpot_limit_s": advice.tpot_limit_s if isfinite(advice.tpot_limit_s) else None,
        "commands": [] if best is None else command_of(advice.now.proposal, best.proposal),
    }


def _figures(each: PoolForecast) -> dict[str, Any]:
    return {
        "pools": msgspec.to_builtins(each.proposal.pools),
        "bundle": each.proposal.bundle,
        "attainment": each.attainment,
        "figures": msgspec.to_builtins(each.figures),
    }
