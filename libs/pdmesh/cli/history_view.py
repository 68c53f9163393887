"""What happened to the mesh lately, as `pdmesh status` and `pdmesh top` say it."""

from __future__ import annotations

from collections.abc import Sequence

from pdmesh.cli.tables import Column, Table, duration
from pdmesh.wire.messages import GoneInstance, InstanceNote, InstanceStatus, MeshEvent, MeshStatus, in_order


def note_line(name: str, note: InstanceNote, at: float) -> str:
    """Return a sentence about an instance; ``at`` is the Unix time of the status that the note came with."""
    what_next = f"; {note.next}" if note.next else ""
    return f"{name} {note.cause} {duration(max(at - note.at, 0.0))} ago{what_next}"


def note_lines(answer: MeshStatus) -> list[str]:
    """Return a sentence for each instance that does not serve, or that was restarted lately."""
    rows: list[InstanceStatus | GoneInstance] = [*answer.instances, *answer.gone]
    lines: list[str] = []
    for row in in_order(rows):
        if row.note is not None:
            lines.append(note_line(row.instance_id, row.note, answer.at))
        if isinstance(row, InstanceStatus) and row.draining:
            verdict = "yes" if row.safe_to_delete else "no"
            lines.append(f"{row.instance_id} is safe to delete: {verdict}, {row.safe_to_delete_why}")
    return lines


def events_table(events: Sequence[MeshEvent], at: float, limit: int) -> Table:
    """Return the latest events, the newest first."""
    table = Table([Column("when", right=True), *map(Column, ("event", "name", "detail"))])
    for event in reversed(events[-limit:]):
        table.add(f"{duration(max(at - event.at, 0.0))} ago", event.what, event.name, event.detail)
    return table
