"""`pdmesh status`: the instances of a mesh, their KV, links and pools, and the events of the last minutes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import typer

from pdmesh.cli.options import Asked, Output
from pdmesh.cli.state_folder import MeshRecord, scheduler_of
from pdmesh.cli.tables import Column, Table, duration
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import short_weights
from pdmesh.wire import messages

#: Time span of measured speeds, and the largest number of requests in it.
SPEED_S = 60.0
MAX_SPEED_REQUESTS = 200

#: Number of events shown. JSON has all remembered ones.
MAX_EVENTS = 8


def show_status(asked: Asked) -> None:
    """Print the state of a mesh. Raises PdmeshError if none can be asked."""
    record, _, _ = scheduler_of(asked.config, asked.state)
    answer = asked.answer(messages.GetStatus(), messages.MeshStatus)
    latest = asked.answer(messages.ListRequests(limit=MAX_SPEED_REQUESTS), messages.RequestList)
    if asked.output is Output.JSON:
        local = None if record is None else _public(record)
        typer.echo(msgspec.json.format(msgspec.json.encode({"mesh": local, "state": answer})).decode())
        return
    if record is not None:
        typer.echo(_where(record))
    verdict = typer.style("ready", fg="green") if answer.ready else typer.style("not ready", fg="red")
    rest = "" if answer.ready else f": {answer.reason}"
    batching = f"  batching {answer.batching}" if answer.batching else ""
    typer.echo(
        f"{verdict}{rest}  waiting {answer.num_waiting}  running {answer.num_running}  policy {answer.bundle}{batching}"
    )
    if (speed := speed_line(latest.requests, answer.at or time.time())) is not None:
        typer.echo(speed)
    instances_table(answer).show()
    for line in note_lines(answer):
        typer.secho(line, fg="yellow")
    if record is not None:
        typer.echo()
        processes_table(record).show()
    for line in _lines(answer):
        typer.echo(line)
    if len({row.arithmetic for row in answer.instances}) > 1:
        from pdmesh.core.instances.arithmetic import several_classes

        classes = several_classes({row.instance_id: row.arithmetic for row in messages.in_order(answer.instances)})
        typer.secho(classes, fg="yellow")
    if (weights := weights_line(answer)) is not None:
        typer.secho(weights, fg="yellow" if len(answer.revisions) > 1 else None)
    if answer.tenants:
        typer.echo()
        tenants_table(answer).show()
    if answer.events:
        typer.echo()
        events_table(answer.events, answer.at, MAX_EVENTS).show()


def _lines(answer: messages.MeshStatus) -> Iterator[str]:
    for row in messages.in_order(answer.instances):
        yield f"{row.instance_id}  {batching_line(row.batching)}"
    yield from kv_lines(answer.instances)
    yield from compute_lines(answer.instances)
    yield from ranks_lines(answer.instances)
    yield from host_lines(answer.instances)
    yield from link_lines(answer.links)
    if answer.num_fetched_tokens:
        yield f"cached KV fetched from other instances: {answer.num_fetched_tokens:,} tokens"
    yield from map(group_line, answer.groups)


def speed_line(latest: Sequence[messages.RequestRecord], now: float) -> str | None:
    """Return a line with the speed of the last minute's answers; None without any. ``now`` is Unix time."""
    recent = [each for each in latest if each.arrived_at > now - SPEED_S]
    firsts = sorted(each.first_token_s for each in recent if each.first_token_s is not None)
    if not firsts:
        return None
    num_tokens = sum(each.num_output_tokens or 0 for each in recent)
    span_s = max(now - min(each.arrived_at for each in recent), 1.0)
    p50, p99 = (1e3 * firsts[min(len(firsts) - 1, int(share * len(firsts)))] for share in (0.5, 0.99))
    return (
        f"last {min(span_s, SPEED_S):.0f} s: {len(recent)} requests, TTFT p50 {p50:.0f} ms, p99 {p99:.0f} ms, "
        f"{num_tokens / span_s:.1f} tokens/s"
    )


def weights_line(answer: messages.MeshStatus) -> str | None:
    """Return a line with the identity of the loaded weights; None if it is not known.

    Several identities are listed with their numbers of instances and shares of new requests.
    """
    if len(answer.revisions) > 1:
        from pdmesh.core.instances.revisions import several_revisions

        shares = {each.weights: (len(each.instance_ids), each.share) for each in answer.revisions}
        return several_revisions(answer.instances[0].model if answer.instances else "", shares)
    return next(
        (f"weights {short_weights(each.weights)} on all instances" for each in answer.revisions if each.weights), None
    )


def _where(record: MeshRecord) -> str:
    """Return the mesh's name and addresses, in two lines that fit 80 columns."""
    up_s = time.time() - record.started_at
    grpc_address = next((s.facts["grpc_address"] for s in record.services if "grpc_address" in s.facts), "")
    name = typer.style(record.name, bold=True)
    return f"mesh {name}  model {record.model}  up {duration(up_s)}\nhttp {record.http_address}  grpc {grpc_address}"


def _public(record: MeshRecord) -> dict[str, Any]:
    shown = msgspec.to_builtins(record)
    del shown["mesh_token"]
    return dict(shown)


def instances_table(answer: messages.MeshStatus) -> Table:
    """Return a table of at most 80 columns."""
    texts = [Column("instance", min_width=12), *map(Column, ("role", "state", "device"))]
    numbers = [Column(title, right=True) for title in ("pid", "prefills", "decodes", "queued", "kv free", "kept")]
    table = Table([*texts, *numbers])
    for row in messages.in_order(answer.instances):
        table.add(
            row.instance_id,
            row.role,
            row.state,
            row.device,
            str(row.pid),
            str(row.num_prefilling),
            str(row.num_decoding),
            str(row.num_queued_tokens),
            f"{row.num_free_blocks}/{row.num_blocks}",
            str(row.num_cached_blocks),
        )
    for gone in messages.in_order(answer.gone):
        table.add(gone.instance_id, gone.role, gone.state, gone.device, f"({gone.pid})", *5 * [""])
    return table


def processes_table(record: MeshRecord) -> Table:
    """Return a table of the processes that `pdmesh up` keeps running on this machine."""
    numbers = [Column(title, right=True) for title in ("pid", "age", "restarts", "memory")]
    table = Table([Column("process"), *numbers])
    for service in record.services:
        process = service.process
        age, memory = duration(process.age_s()), f"{process.memory_bytes() / 1e6:.0f} MB"
        table.add(service.name, str(process.pid), age, str(service.num_restarts), memory)
    return table


def batching_line(batching: messages.BatchingStatus | None) -> str:
    """Return a line with an instance's batching mode, and the known facts about the other mode."""
    if batching is None:
        return "batching fixed"
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
    """Return a line for each way in which instances compute, with their names if the ways differ."""
    ways: dict[str, list[str]] = {}
    for row in messages.in_order(instances):
        if row.compute is not None:
            ways.setdefault(str(row.compute), []).append(row.instance_id)
    return [f"compute  {way}" + (f": {', '.join(ids)}" if len(ways) > 1 else "") for way, ids in ways.items()]


def ranks_lines(instances: Sequence[messages.InstanceStatus]) -> list[str]:
    """Return a line for each instance of several processes or stages."""
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
    """Return a line for each host with its instances, if there are several: KV is copied directly only inside one."""
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
    """Return a line with the instances that compute a prompt together, and their progress."""
    leader, *helpers = group.member_ids
    done = f"{group.num_planned_tokens} of {group.num_prompt_tokens} tokens"
    return f"{leader} + {' + '.join(helpers)}  compute {group.request_id} in turn: {done}"


def tenants_table(answer: messages.MeshStatus) -> Table:
    numbers = ("share", "waiting", "running", "used in the last minute")
    table = Table([Column("key", min_width=12), *(Column(title, right=True) for title in numbers)])
    for row in answer.tenants:
        table.add(
            row.tenant or "(none)",
            str(row.share or ""),
            str(row.num_waiting),
            str(row.num_running),
            f"{row.recent_share:.0%}",
        )
    return table


def kv_lines(instances: Sequence[messages.InstanceStatus]) -> Iterator[str]:
    """Yield a line for each instance with KV that is quarantined or offloaded."""
    for row in messages.in_order(instances):
        num_offloaded = row.num_offloaded_granules * GRANULE_TOKENS
        parts = [f"{row.num_quarantined_blocks} blocks quarantined"] if row.num_quarantined_blocks else []
        parts += [f"{num_offloaded} tokens offloaded"] if num_offloaded else []
        if parts:
            yield f"kv  {row.instance_id}: {', '.join(parts)}"


def note_line(name: str, note: messages.InstanceNote, at: float) -> str:
    """Return a sentence about an instance; ``at`` is the Unix time of the note's status."""
    what_next = f"; {note.next}" if note.next else ""
    return f"{name} {note.cause} {duration(max(at - note.at, 0.0))} ago{what_next}"


def note_lines(answer: messages.MeshStatus) -> list[str]:
    """Return a sentence for each instance that does not serve, or that was restarted lately.

    For a draining instance, another sentence says whether it is safe to delete.
    """
    rows: list[messages.InstanceStatus | messages.GoneInstance] = [*answer.instances, *answer.gone]
    lines: list[str] = []
    for row in messages.in_order(rows):
        if row.note is not None:
            lines.append(note_line(row.instance_id, row.note, answer.at))
        if isinstance(row, messages.InstanceStatus) and row.draining:
            verdict = "yes" if row.safe_to_delete else "no"
            lines.append(f"{row.instance_id} is safe to delete: {verdict}, {row.safe_to_delete_why}")
    return lines


def events_table(events: Sequence[messages.MeshEvent], at: float, limit: int) -> Table:
    """Return the latest events, the newest first."""
    table = Table([Column("when", right=True), *map(Column, ("event", "name", "detail"))])
    for event in reversed(events[-limit:]):
        table.add(f"{duration(max(at - event.at, 0.0))} ago", event.what, event.name, event.detail)
    return table
