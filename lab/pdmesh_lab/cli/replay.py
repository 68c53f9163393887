"""`pdmesh replay`: decide again on the events of a recorded run, and compare with another bundle's decisions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import typer
from rich.console import Console

from pdmesh.cli.options import Output
from pdmesh.core.commands import Command
from pdmesh.core.events import Event, Tick
from pdmesh.core.operator_events import BundleChangeRequested
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.decisions import Decision
from pdmesh.errors import ConfigError
from pdmesh.eventlog import Entry, EventLogError, EventLogReader, commands_digest, core_of
from pdmesh_lab.cli.options import ReplayOptions
from pdmesh_lab.cli.simulate import figures_table
from pdmesh_lab.cli.study import write_file
from pdmesh_lab.cli.what_if import WhatIf, what_if
from pdmesh_lab.sim.perfetto import chrome_trace
from pdmesh_lab.sim.recorded import recorded_run


@dataclass(frozen=True, slots=True)
class Difference:
    """The first event at which the commands differ.

    `number` counts events from 1. `recorded` are the decisions of a core made as the log says. `instead` are the other
    bundle's decisions; None if the recorded digest itself differs.
    """

    number: int
    entry: Entry
    recorded: Sequence[Command]
    instead: Sequence[Command] | None


class Replay:
    """Repetition of a log's decisions. Iterate for the decisions, then read the attributes for the outcome."""

    def __init__(self, log: EventLogReader, bundle: str | None) -> None:
        """Raise ConfigError for an unknown bundle."""
        self._log = log
        self._recorded = core_of(log.header)
        self._other = None if bundle is None else core_of(log.header, bundle)
        self.bundle = log.header.bundle
        self.other_bundle = bundle
        self.num_events = 0
        self.num_commands = 0
        self.num_unchecked = 0
        self.difference: Difference | None = None

    @property
    def is_faithful(self) -> bool:
        """Whether the commands equal the recorded ones."""
        return self.difference is None or self.difference.instead is not None

    def __iter__(self) -> Iterator[Decision]:
        """Decide again to the end, or to the first commands that differ from the recorded ones."""
        for entry in self._log:
            self.num_events += 1
            commands = self._decide(self._recorded, entry.event, entry)
            self.num_commands += len(commands)
            self.num_unchecked += entry.digest is None
            if entry.digest is not None and commands_digest(commands) != entry.digest:
                self.difference = Difference(self.num_events, entry, commands, None)
                return
            if self._other is not None and self.difference is None:
                # Ask what this bundle does all along, so an operator's switch only marks a moment. Do not ask after the
                # first difference: later events are from a mesh that followed the recorded decisions.
                event = Tick() if isinstance(entry.event, BundleChangeRequested) else entry.event
                instead = self._decide(self._other, event, entry)
                if instead != commands:
                    self.difference = Difference(self.num_events, entry, commands, instead)
            yield Decision(entry.now_s, entry.event, commands)

    def _decide(self, core: SchedulerCore, event: Event, entry: Entry) -> list[Command]:
        """Return the commands of ``core``. Raises EventLogError if the core raises an exception."""
        try:
            return core.handle(event, entry.now_s)
        except Exception as error:  # impossible events: a bug, or a damaged log
            where = f"event {self.num_events}, {type(entry.event).__name__} at {entry.now_s:.6f} s"
            raise EventLogError(
                f"cannot replay {where} ({type(error).__name__}: {_line(error)}): "
                "the log is damaged, was written by another version of pdmesh, or shows a bug"
            ) from error


def run_replay(options: ReplayOptions, output: Output) -> int:
    """Print the outcome, and return 1 if the commands differ from the recorded ones, else 0.

    Raises ConfigError for a file that is no log, an unknown bundle or profile, or a log without anything to simulate.
    """
    if options.bundle is None and (options.profile is not None or options.long_tokens is not None):
        raise ConfigError("--profile and --long-tokens need --bundle")
    try:
        with EventLogReader(options.log) as log:
            found = Replay(log, options.bundle)
            run = recorded_run(found)
            header = log.header
    except OSError as error:
        raise ConfigError(f"cannot read the event log {options.log}: {error.strerror}") from error
    study = None
    if options.bundle is not None and found.is_faithful:
        long_tokens = options.long_tokens or header.config.policy.long_prompt_tokens
        study = what_if(header, run, options.bundle, profile=options.profile, long_tokens=long_tokens, output=output)
    if options.perfetto is not None:
        results = {"recorded": run.result} if study is None else study.results
        write_file(options.perfetto, json.dumps(chrome_trace(results)).encode())
    if output is Output.JSON:
        typer.echo(json.dumps(_as_json(found, study), indent=2))
    else:
        typer.echo("\n".join(_as_text(found)))
        if study is not None:
            _print_study(study)
    return 0 if found.is_faithful else 1


def _as_json(found: Replay, study: WhatIf | None) -> dict[str, Any]:
    difference = found.difference
    return {
        "bundle": found.bundle,
        "other_bundle": found.other_bundle,
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
        "what_if": None
        if study is None
        else {
            "latency": msgspec.to_builtins(study.latency),
            "runs": {name: msgspec.to_builtins(figures) for name, figures in study.reports.items()},
            "notes": study.notes,
        },
    }


def _as_text(found: Replay) -> list[str]:
    difference, bundle, other = found.difference, found.bundle, found.other_bundle
    if difference is not None and difference.instead is None:
        decided = [f"  now: {command}" for command in difference.recorded] or ["  now: nothing"]
        where = _where(difference)
        return [
            f"{where}: the commands differ from the recorded ones, because of another version of pdmesh or a bug",
            *decided,
        ]
    lines = [f"{found.num_events} events, {found.num_commands} commands: identical to the recorded run ({bundle})"]
    if found.num_unchecked:
        lines.append(f"{found.num_unchecked} events have no recorded commands and were not compared")
    if difference is None or difference.instead is None:
        return lines if other is None else [*lines, f"{other} decides the same"]
    return [
        *lines,
        f"{other} decides the same until {_where(difference)}, then differently",
        *(f"  {bundle}: {command}" for command in difference.recorded if command not in difference.instead),
        *(f"  {other}: {command}" for command in difference.instead if command not in difference.recorded),
    ]


def _print_study(study: WhatIf) -> None:
    console = Console()
    console.print()
    console.print(figures_table(study.reports))
    for note in study.notes:
        console.print(note, highlight=False)


def _where(difference: Difference) -> str:
    return f"event {difference.number}, {type(difference.entry.event).__name__} at {difference.entry.now_s:.6f} s"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _named(value: object) -> dict[str, Any]:
    return {"type": type(value).__name__, **msgspec.to_builtins(value)}
