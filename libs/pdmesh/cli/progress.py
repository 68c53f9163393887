"""Displays of long commands: a bar, or a line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from pdmesh.cli.options import Output


def progress_bar(output: Output = Output.TABLE, *, counts: bool = True) -> Progress:
    """Return a progress bar on stderr, shown only at a terminal. ``counts`` shows numbers of tasks."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *([MofNCompleteColumn()] if counts else ()),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=output is Output.JSON or not sys.stderr.isatty(),
    )


@contextmanager
def progress_line(output: Output = Output.TABLE) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a changing line on stderr: in place on a terminal, else each time it differs.

    Nothing is shown to scripts.
    """
    if output is Output.JSON:
        yield lambda line: None
        return
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("") as status:
            yield lambda line: status.update(Text(line))
        return
    said = ""

    def say(line: str) -> None:
        nonlocal said
        if line != said:
            said = line
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    yield say


def advance(progress: Progress, task: TaskID) -> Callable[[int], None]:
    """Return a simulator's callback, which sets the bar to the number of ended requests, a hundred at a time."""

    def on_ended(num_ended: int) -> None:
        if num_ended % 100 == 0:
            progress.update(task, completed=num_ended)

    return on_ended
