"""`pdmesh replay`: decide again on the events of a recorded run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import typer

from pdmesh.cli.options import Output
from pdmesh.core.commands import Command
from pdmesh.core.events import BundleChangeRequested, Tick
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.errors import PdmeshError
from pdmesh.eventlog import Entry, EventLogReader, commands_digest, core_of


@dataclass(frozen=True, slots=True)
class Difference:
    """The first event that another decision answers."""

    number: int  # of the event, from 1
    entry: Entry
    recorded: Sequence[Command]  # what a core of the log's making decides
    instead: Sequence[Command] | None  # what the other bundle decides; None if the recorded digest itself differs


@dataclass(slots=True)
class Replay:
    """What came of it."""

    num_events: int = 0
    num_commands: int = 0
    num_unchecked: int = 0
    difference: Difference | None = None


def run_replay(path: Path, bundle: str | None, output: Output) -> int:
    """Print what came of it; the exit code is 1 if the commands differ from those recorded."""
    try:
        with EventLogReader(path) as log:
            recorded = core_of(log.header)
            other = None if bundle is None else core_of(log.header, bundle)
            found = _replay(log, recorded, other)
            names = log.header.bundle, bundle
    except OSError as error:
        raise PdmeshError(f"cannot read the event log {path}: {error.strerror}") from error
    if output is Output.JSON:
        typer.echo(json.dumps(_as_json(found, *names), indent=2))
    else:
        typer.echo("\n".join(_as_text(found, *names)))
    return 1 if found.difference is not None and found.difference.instead is None else 0


def _replay(log: EventLogReader, recorded: SchedulerCore, other: SchedulerCore | None) -> Replay:
    """Up to the first difference: after it, the events tell of a mesh that followed other commands."""
    found = Replay()
    for entry in log:
        found.num_events += 1
        commands = recorded.handle(entry.event, entry.now_s)
        found.num_commands += len(commands)
        found.num_unchecked += entry.digest is None
        if entry.digest is not None and commands_digest(commands) != entry.digest:
            found.difference = Difference(found.num_events, entry, commands, None)
            break
        if other is not None:
            # The question is what this bundle does all along, so an operator's switch is nothing but a moment.
            event = Tick() if isinstance(entry.event, BundleChangeRequested) else entry.event
            instead = other.handle(event, entry.now_s)
            if instead != commands:
                found.difference = Difference(found.num_events, entry, commands, instead)
                break
    return found


def _as_json(found: Replay, bundle: str, other: str | None) -> dict[str, Any]:
    difference = found.difference
    return {
        "bundle": bundle,
        "other_bundle": other,
        "num_events": found.num_events,
        "num_commands": found.num_commands,
        "num_unchecked": found.num_unchecked,
        "difference": None
        if difference is None
        else {
            "event_number": difference.number,
            "now_s": difference.entry.now_s,
            "event": _named(difference.entry.event),
            "recorded": [_named(command) for command in difference.recorded],
            "instead": None if difference.instead is None else [_named(command) for command in difference.instead],
        },
    }


def _as_text(found: Replay, bundle: str, other: str | None) -> list[str]:
    difference = found.difference
    if difference is None:
        lines = [f"{found.num_events} events, {found.num_commands} commands: identical to the recorded run ({bundle})"]
        if found.num_unchecked:
            lines.append(f"{found.num_unchecked} events have no recorded commands to compare with")
        if other is not None:
            lines.append(f"{other} would have decided the same")
        return lines
    where = f"event {difference.number}, {type(difference.entry.event).__name__} at {difference.entry.now_s:.6f} s"
    if difference.instead is None:
        decided = [f"  now: {command}" for command in difference.recorded] or ["  now: nothing"]
        return [f"{where}: the commands are not those recorded, by another version of pdmesh or a bug", *decided]
    return [
        f"{other} would have decided otherwise from {where} on; until then the same",
        *(f"  {bundle}: {command}" for command in difference.recorded if command not in difference.instead),
        *(f"  {other}: {command}" for command in difference.instead if command not in difference.recorded),
    ]


def _named(value: object) -> dict[str, Any]:
    return {"type": type(value).__name__, **msgspec.to_builtins(value)}
