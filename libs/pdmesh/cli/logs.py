"""`pdmesh logs`: the logs of a mesh's processes, merged by time."""

from __future__ import annotations

import ctypes
import heapq
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

import typer

from pdmesh.cli.options import Output
from pdmesh.cli.state_folder import StateFolder
from pdmesh.errors import PdmeshError

#: Largest line; a longer one is cut.
MAX_LINE_BYTES = 64 * 1024

_BLOCK_BYTES = 64 * 1024

#: Events of inotify(7): a file was written, renamed to, or made.
_IN_MODIFY, _IN_MOVED_TO, _IN_CREATE = 0x2, 0x80, 0x100

#: Control characters, which a terminal obeys.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

_PROCESS_COLOURS = ("cyan", "green", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta", "bright_blue")
_LEVEL_COLOURS = {"warning": "yellow", "error": "red", "critical": "red"}

#: Fields of an event with their own place in a printed line. A process's log has one service only.
_PLACED = frozenset({"event", "level", "timestamp", "service"})


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a log. A line that is no event, such as one of a traceback, has the previous event's time.

    `timestamp` is ISO 8601 in UTC, so text order is time order; empty before the first event.
    """

    timestamp: str
    process: str
    text: str
    event: Mapping[str, Any] | None


@dataclass(slots=True)
class _Log:
    """The log of one process, read from its end on."""

    process: str
    path: Path
    timestamp: str = ""
    _file: BinaryIO | None = None
    _rest: bytes = b""

    def last(self, num_lines: int) -> list[LogLine]:
        """Return the last ``num_lines`` lines. Later lines come from `new`."""
        try:
            self._file = self.path.open("rb")
        except FileNotFoundError:
            return []
        end = position = self._file.seek(0, os.SEEK_END)
        blocks: list[bytes] = []
        num_ends = 0
        while position and num_ends <= num_lines:
            start = max(0, position - _BLOCK_BYTES)
            self._file.seek(start)
            blocks.append(self._file.read(position - start))
            num_ends += blocks[-1].count(b"\n")
            position = start
        self._file.seek(end)
        data = b"".join(reversed(blocks))
        if position:
            data = data.partition(b"\n")[2]  # the first line may lack its beginning
        return self._parsed(data)[-num_lines:] if num_lines else []

    def new(self) -> list[LogLine]:
        """Return added lines, also from a file that has replaced the one before."""
        lines = self._read()
        if self._is_another():
            self.close()
            self._rest = b""
            try:
                self._file = self.path.open("rb")
            except FileNotFoundError:
                return lines
            lines += self._read()
        return lines

    def close(self) -> None:
        """Close the file if it is open."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self) -> list[LogLine]:
        if self._file is None:
            return []
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            self._file.seek(0)  # the file was emptied
        return self._parsed(self._file.read())

    def _is_another(self) -> bool:
        try:
            now = self.path.stat()
        except FileNotFoundError:
            return False
        if self._file is None:
            return True
        opened = os.fstat(self._file.fileno())
        return (now.st_dev, now.st_ino) != (opened.st_dev, opened.st_ino)

    def _parsed(self, data: bytes) -> list[LogLine]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[:MAX_LINE_BYTES]
        return [self._line(line[:MAX_LINE_BYTES].decode(errors="replace")) for line in lines if line.strip()]

    def _line(self, text: str) -> LogLine:
        event = None
        if text.startswith("{"):
            try:
                event = json.loads(text)
            except (ValueError, RecursionError):
                event = None  # a cut line, or no event
        if event is not None:
            self.timestamp = max(self.timestamp, str(event.get("timestamp", "")))
        return LogLine(self.timestamp, self.process, text, event)


def print_logs(state: StateFolder, processes: Sequence[str], num_lines: int, *, follow: bool, output: Output) -> None:
    """Print the last lines of the logs of ``processes``, or of all. With ``follow``, print new lines until Ctrl-C.

    Raises PdmeshError if there are no such logs.
    """
    there = sorted(file.stem for file in state.folder.glob("*.log"))
    if not there:
        raise PdmeshError(f"no mesh named {state.name!r} has written logs here: start one with `pdmesh up --detach`")
    if unknown := [name for name in processes if name not in there]:
        raise PdmeshError(f"no process {unknown[0]!r} has written a log: use {', '.join(there)}")
    printer = _Printer(output, max(map(len, processes or there)), {name: n for n, name in enumerate(there)})
    with ExitStack() as closing:
        changes = closing.enter_context(_watching(state.folder)) if follow else None
        logs = [_Log(name, state.log_file(name)) for name in processes or there]
        closing.callback(_close, logs)
        printer.show(_merged(log.last(num_lines) for log in logs)[-num_lines:] if num_lines else ())
        while changes is not None and changes.read(_BLOCK_BYTES):
            if not processes:
                known = {log.process for log in logs}
                logs += [_Log(file.stem, file) for file in state.folder.glob("*.log") if file.stem not in known]
            printer.show(_merged([log.new() for log in logs]))


def _close(logs: Iterable[_Log]) -> None:
    for log in logs:
        log.close()


def _merged(parts: Iterable[Sequence[LogLine]]) -> list[LogLine]:
    return list(heapq.merge(*parts, key=lambda line: line.timestamp))


@contextmanager
def _watching(folder: Path) -> Iterator[BinaryIO]:
    """Yield a file that becomes readable once a file in ``folder`` has changed. Ctrl-C only ends the block.

    Raises OSError without inotify.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    fd = int(libc.inotify_init1(os.O_CLOEXEC))
    if fd < 0 or libc.inotify_add_watch(fd, os.fsencode(folder), _IN_MODIFY | _IN_MOVED_TO | _IN_CREATE) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
    with open(fd, "rb", buffering=0) as changes, suppress(KeyboardInterrupt):
        yield changes


@dataclass(slots=True)
class _Printer:
    output: Output
    name_width: int
    numbers: dict[str, int]  # number of each process, for its colour
    in_colour: bool = field(default_factory=lambda: sys.stdout.isatty())

    def show(self, lines: Iterable[LogLine]) -> None:
        for line in lines:
            sys.stdout.write((line.text if self.output is Output.JSON else self._text(line)) + "\n")
        sys.stdout.flush()

    def _text(self, line: LogLine) -> str:
        colour = _PROCESS_COLOURS[self.numbers.setdefault(line.process, len(self.numbers)) % len(_PROCESS_COLOURS)]
        process = self._styled(line.process.ljust(self.name_width), fg=colour)
        if line.event is None:
            return f"{'':12} {process}         {_printable(line.text)}"
        level = _printable(str(line.event.get("level", "")))
        said = _printable(str(line.event.get("event", ""))).replace("\n", f"\n{'':{self.name_width + 22}}")
        rest = " ".join(f"{key}={_shown(value)}" for key, value in line.event.items() if key not in _PLACED)
        level = self._styled(f"{level:7}", fg=_LEVEL_COLOURS.get(level))
        at = _local_time(line.event.get("timestamp"))
        return f"{at} {process} {level} {said}  {self._styled(_printable(rest), dim=True)}".rstrip()

    def _styled(self, text: str, **style: Any) -> str:
        return typer.style(text, **style) if self.in_colour and text else text


def _printable(text: str) -> str:
    """Return ``text`` with control characters escaped: a log may quote a file, a library or a peer."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _shown(value: object) -> str:
    return value if isinstance(value, str) and " " not in value else json.dumps(value, ensure_ascii=False)


def _local_time(timestamp: object) -> str:
    """Return the local time of day, after the date unless it is today."""
    try:
        at = datetime.fromisoformat(str(timestamp)).astimezone()
    except ValueError:
        return " " * 12
    day = "" if at.date() == datetime.now().astimezone().date() else f"{at:%Y-%m-%d} "
    return f"{day}{at:%H:%M:%S.%f}"[:-3]
