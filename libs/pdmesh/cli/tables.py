"""Tables of plain text, for commands that should start quickly: importing rich takes long."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import typer

#: Width if standard output is no terminal.
DEFAULT_WIDTH = 80

#: Least width of the last column, even if the terminal is too narrow.
MIN_LAST_WIDTH = 8


@dataclass(frozen=True, slots=True)
class Column:
    """A column. A narrow terminal may cut a column with a ``min_width`` to that width."""

    title: str
    right: bool = False
    min_width: int | None = None


@dataclass(slots=True)
class Table:
    """Rows below titles. The last column is wrapped if it does not fit."""

    columns: Sequence[Column]
    rows: list[Sequence[str]] = field(default_factory=list[Sequence[str]])

    def add(self, *cells: str) -> None:
        """Add a row."""
        self.rows.append(cells)

    def lines(self, width: int) -> Iterator[str]:
        """Yield the table in at most ``width`` columns, if the columns that cannot be cut allow that."""
        widths = [max(map(len, column)) for column in zip(*self._cells(), strict=True)]
        room = width - (len(widths) - 1)
        for index, column in enumerate(self.columns):
            if column.min_width is not None:
                widths[index] = max(min(column.min_width, widths[index]), widths[index] - max(0, sum(widths) - room))
        *fixed, last = widths
        last_width = min(last, max(room - sum(fixed), MIN_LAST_WIDTH))
        for cells in self._cells():
            shown = [
                self._padded(cell, column, width)
                for cell, column, width in zip(cells[:-1], self.columns, fixed, strict=False)
            ]
            for part in wrapped(cells[-1], last_width):
                end = part.rjust(last_width) if self.columns[-1].right else part
                yield " ".join([*shown, end]).rstrip()
                shown = [" " * width for width in fixed]

    def _cells(self) -> Iterator[Sequence[str]]:
        yield [column.title for column in self.columns]
        yield from self.rows

    @staticmethod
    def _padded(cell: str, column: Column, width: int) -> str:
        if len(cell) > width:
            cell = cell[: width - 1] + "…"
        return cell.rjust(width) if column.right else cell.ljust(width)

    def show(self) -> None:
        """Print the table, as wide as the terminal allows."""
        for line in self.lines(terminal_width()):
            typer.echo(line)


def terminal_width() -> int:
    """Return the number of columns of the terminal, from COLUMNS or the system."""
    return shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns


def wrapped(text: str, width: int) -> Iterator[str]:
    """Yield ``text`` in lines, broken at spaces if there are any."""
    while len(text) > width:
        space = text.rfind(" ", 1, width + 1)
        end = width if space < 1 else space
        yield text[:end]
        text = text[end:].lstrip()
    yield text


def duration(seconds: float) -> str:
    """Format a duration in its one or two largest units."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
