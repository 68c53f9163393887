"""`pdmesh status` and `pdmesh requests show`: questions to a scheduler's Admin method."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import anyio
import msgspec
import typer
from rich.table import Table
from rich.text import Text

from pdmesh.cli.options import Output
from pdmesh.cli.request_view import print_choices, print_request, requests_table
from pdmesh.cli.state import MeshRecord, StateFolder
from pdmesh.cli.terminal import terminal
from pdmesh.config import MeshConfig, SecurityConfig
from pdmesh.core.instances.arithmetic import several_classes
from pdmesh.core.instances.revisions import several_revisions
from pdmesh.errors import PdmeshError, ProtocolError
from pdmesh.model import GRANULE_TOKENS, short_weights
from pdmesh.wire import messages
from pdmesh.wire.admin import ask_scheduler


def show_status(config: MeshConfig, state: StateFolder, output: Output) -> None:
    """Print the state of a mesh. Raises PdmeshError if none can be asked."""
    record, address, security = target(config, state)
    answer = anyio.run(ask_scheduler, address, security, messages.GetStatus())
    if not isinstance(answer, messages.MeshStatus):
        raise ProtocolError("the scheduler sent an unexpected answer")
    if output is Output.JSON:
        local = None if record is None else _public(record)
        typer.echo(msgspec.json.format(msgspec.json.encode({"mesh": local, "state": answer})).decode())
        return
    console = terminal()
    if record is not None:
        console.print(_where(record))
    verdict = ("ready", "green") if answer.ready else ("not ready", "red")
    rest = "" if answer.ready else f": {answer.reason}"
    batching = f"  batching {answer.batching}" if answer.batching else ""
    figures = f"  waiting {answer.num_waiting}  running {answer.num_running}  policy {answer.bundle}{batching}"
    console.print(Text.assemble(verdict, rest, figures))
    console.print(instances_table(answer))
    for row in messages.in_order(answer.instances):
        if row.batching is not None:
            console.print(f"{row.instance_id}  {batching_line(row.batching)}")
    for line in compute_lines(answer.instances):
        console.print(line)
    for line in [*ranks_lines(answer.instances), *host_lines(answer.instances)]:
        console.print(line)
    for line in link_lines(answer.links):
        console.print(line)
    if answer.num_fetched_tokens:
        console.print(f"kept KV fetched by instances from others: {answer.num_fetched_tokens:,} tokens")
    for group in answer.groups:
        console.print(group_line(group))
    classes = several_classes({row.instance_id: row.arithmetic for row in messages.in_order(answer.instances)})
    if classes is not None:
        console.print(classes, style="yellow")
    if (weights := weights_line(answer)) is not None:
        console.print(weights, style="yellow" if len(answer.revisions) > 1 else None)
    if answer.tenants:
        console.print()
        console.print(tenants_table(answer))


def weights_line(answer: messages.MeshStatus) -> str | None:
    """Say which weights are loaded; of several identities, on how many instances, and how many requests each takes."""
    model = answer.instances[0].model if answer.instances else ""
    shares = {each.weights: (len(each.instance_ids), each.share) for each in answer.revisions}
    if (sentence := several_revisions(model, shares)) is not None:
        return sentence
    return next((f"weights {short_weights(weights)} on all instances" for weights in shares if weights), None)


def show_request(config: MeshConfig, state: StateFolder, request_id: str, output: Output) -> None:
    """Print a request's record, or the choices of a request that became several.

    Raises PdmeshError if the request is not remembered, or no mesh can be asked.
    """
    _, address, security = target(config, state)
    question = messages.GetRequest(request_id=request_id.rstrip("…"))  # as a narrow terminal shows it
    answer = anyio.run(ask_scheduler, address, security, question)
    if not isinstance(answer, messages.RequestRecord | messages.RequestList):
        raise ProtocolError("the scheduler sent an unexpected answer")
    if output is Output.JSON:
        typer.echo(msgspec.json.format(msgspec.json.encode(answer)).decode())
    elif isinstance(answer, messages.RequestRecord):
        print_request(terminal(), answer)
    else:
        print_choices(terminal(), request_id, answer)


def list_requests(config: MeshConfig, state: StateFolder, limit: int, output: Output) -> None:
    """Print the requests that arrived last. Raises PdmeshError if no mesh can be asked."""
    _, address, security = target(config, state)
    answer = anyio.run(ask_scheduler, address, security, messages.ListRequests(limit=limit))
    if not isinstance(answer, messages.RequestList):
        raise ProtocolError("the scheduler sent an unexpected answer")
    if output is Output.JSON:
        typer.echo(msgspec.json.format(msgspec.json.encode(answer)).decode())
    else:
        terminal().print(requests_table(answer.requests))


def target(config: MeshConfig, state: StateFolder) -> tuple[MeshRecord | None, str, SecurityConfig]:
    """Return the record of this machine's mesh, if that is asked, the scheduler's address, and the secrets to show."""
    if config.scheduler_address:
        return None, config.scheduler_address, config.security
    record = state.read()
    if record is None:
        raise PdmeshError(f"no mesh named {state.name!r} is running: start one with `pdmesh up`, or give --scheduler")
    if not record.scheduler_address:
        raise PdmeshError(f"mesh {state.name!r} is starting; see {state.folder}")
    return record, record.scheduler_address, record.security(config.security)


def _where(record: MeshRecord) -> Text:
    """Return the mesh's name and addresses, in two lines that fit 80 columns."""
    up_s = time.time() - record.started_at
    grpc_address = next((s.facts["grpc_address"] for s in record.services if "grpc_address" in s.facts), "")
    return Text.assemble(
        "mesh ",
        (record.name, "bold"),
        f"  model {record.model}  up {duration(up_s)}\nhttp {record.http_address}  grpc {grpc_address}",
    )


def _public(record: MeshRecord) -> dict[str, Any]:
    shown = msgspec.to_builtins(record)
    del shown["mesh_token"]
    return dict(shown)


def instances_table(answer: messages.MeshStatus) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))  # fits 80 columns
    for column in ("instance", "role", "state", "device"):
        table.add_column(column)
    for column in ("pid", "prefills", "decodes", "queued", "kv blocks"):
        table.add_column(column, justify="right")
    for row in messages.in_order(answer.instances):
        table.add_row(
            row.instance_id,
            row.role,
            row.state,
            row.device,
            str(row.pid),
            str(row.num_prefilling),
            str(row.num_decoding),
            str(row.num_queued_tokens),
            _blocks(row),
        )
    return table


def batching_line(batching: messages.BatchingStatus) -> str:
    """Return a line that says how an instance batches, and what is known of the other mode."""
    phase = f", {batching.phase} phase" if batching.phase else ""
    parts = [f"batching {batching.mode}{phase}"]
    if batching.idle_share:
        parts.append(f"θ {batching.idle_share:.3g}  N {batching.num_seats}")
    if batching.gain is not None:
        parts.append(f"eb over mb {batching.gain:+.1%}")
    if batching.reason:
        parts.append(f"not eb: {batching.reason}")
    return "  ".join(parts)


def compute_lines(instances: Sequence[messages.InstanceStatus]) -> list[str]:
    """Return a line for each way in which instances compute, with their names if they differ."""
    ways: dict[str, list[str]] = {}
    for row in messages.in_order(instances):
        if row.compute is not None:
            ways.setdefault(str(row.compute), []).append(row.instance_id)
    return [f"compute  {way}" + (f": {', '.join(ids)}" if len(ways) > 1 else "") for way, ids in ways.items()]


def ranks_lines(instances: Sequence[messages.InstanceStatus]) -> list[str]:
    """Return a line for each instance that several processes, or stages, compute."""
    return [
        f"ranks  {row.instance_id}: {_ranks(row)}"
        for row in messages.in_order(instances)
        if row.rank_pids or row.num_stages > 1
    ]


def _ranks(row: messages.InstanceStatus) -> str:
    if not row.rank_pids:
        return f"{row.num_stages} stages in one process"
    pids = f"(pids {', '.join(map(str, row.rank_pids))})"
    if row.num_stages == 1:
        return f"{len(row.rank_pids)} {pids}"
    return f"{len(row.rank_pids) - 1} in {row.num_stages} stages {pids}"  # the leader computes nothing


def host_lines(instances: Sequence[messages.InstanceStatus]) -> list[str]:
    """Return a line for each host with its instances, if there are several: only inside one is KV copied directly."""
    hosts: dict[str, list[str]] = {}
    for row in messages.in_order(instances):
        hosts.setdefault(row.host, []).append(row.instance_id)
    return [f"host {host or 'unknown'}: {', '.join(ids)}" for host, ids in hosts.items()] if len(hosts) > 1 else []


def link_lines(links: Sequence[messages.LinkStatus]) -> list[str]:
    """Return a line for each link between hosts that KV took in the last minute."""
    return [
        f"link {link.source} → {link.destination}: {rate(link.bytes_per_s)} ({link.num_transfers} transfers)"
        for link in links
    ]


def rate(bytes_per_s: float) -> str:
    """Format a rate for people."""
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.3g} MB/s"


def group_line(group: messages.GroupStatus) -> str:
    """Return a line with the instances that compute a prompt together, and how far they have come."""
    leader, *helpers = group.member_ids
    done = f"{group.num_planned_tokens} of {group.num_prompt_tokens} tokens"
    return f"{leader} + {' + '.join(helpers)}  compute {group.request_id} in turn: {done}"


def tenants_table(answer: messages.MeshStatus) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("key")
    for column in ("share", "waiting", "running", "used in the last minute"):
        table.add_column(column, justify="right")
    for row in answer.tenants:
        table.add_row(
            row.tenant or "(none)",
            str(row.share or ""),
            str(row.num_waiting),
            str(row.num_running),
            f"{row.recent_share:.0%}",
        )
    return table


def _blocks(row: messages.InstanceStatus) -> str:
    text = f"{row.num_free_blocks}/{row.num_blocks} free"
    text += f" ({row.num_kept_blocks} kept)" if row.num_kept_blocks else ""
    text += f", {row.num_quarantined_blocks} quarantined" if row.num_quarantined_blocks else ""
    num_offloaded = row.num_offloaded_granules * GRANULE_TOKENS
    return text + (f", {num_offloaded} tokens offloaded" if num_offloaded else "")


def duration(seconds: float) -> str:
    """Format a duration in the two largest units that matter."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
