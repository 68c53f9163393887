"""The scheduler's event log: every ``(now_s, event)`` in an append-only file, enough to repeat all decisions.

The file is a sequence of msgpack arrays ``[crc32, payload]``. Each payload is msgpack again: first a `Header`, then for
each event ``[now_s, name of the event, its fields]``, and ``[digest]`` of the commands that answered the event. A
record cut short at the end of the file (a crash) is ignored. Any other fault raises an `EventLogError` with its place.

A log is only of use from its beginning. So a log that reaches its size limit, or meets a full disk, *ends*: its content
stays whole and replayable, and the scheduler continues without it.
"""

from __future__ import annotations

import errno
import math
import os
import random
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, get_args

import anyio
import anyio.to_thread
import msgpack
import msgspec
import structlog

from pdmesh.core.commands import Command
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import Event
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.errors import ConfigError
from pdmesh.policy.bundles import make_bundle
from pdmesh.rotation import set_aside

log = structlog.get_logger()

FORMAT_VERSION = 7

#: Largest record. A greater length is corruption.
MAX_RECORD_BYTES = 64 * 1024 * 1024

#: Bytes that may wait to be written. If the disk is slower, the log ends; its content stays whole and replayable.
MAX_BUFFERED_BYTES = 64 * 1024 * 1024

#: Faults that a good path may meet. If one is there at a start, the scheduler serves without a log.
_DISK_FAULTS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG, errno.EMFILE, errno.ENFILE})

_EVENT_TYPES: dict[str, type] = {event_type.__name__: event_type for event_type in get_args(Event)}


class EventLogError(ConfigError):
    """The file is no event log, or is damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """All data that a core is made from. The core's clock showed ``started_s`` at the Unix time ``started_at``."""

    version: int = FORMAT_VERSION
    seed: int
    bundle: str
    config: CoreConfig
    started_at: float
    started_s: float


class Entry(NamedTuple):
    """Entry of a log: an event, with the scheduler's clock in seconds.

    `digest` is of the commands that answered the event; None for the last event before a crash.
    """

    now_s: float
    event: Event
    digest: int | None = None


def commands_digest(commands: Sequence[Command]) -> int:
    """Return a digest of commands. Different commands have the same one with a probability of 2**-32."""
    return zlib.crc32(msgspec.msgpack.encode([(type(command).__name__, command) for command in commands]))


class EventLogWriter(AbstractContextManager["EventLogWriter"]):
    """Writer that appends without blocking: `record` buffers, `run` writes on a thread. No write raises.

    Only the owner may read the file. A file in the way becomes ``path.1``, older ones ``path.2`` and so on.
    """

    def __init__(self, path: Path, header: Header, *, max_bytes: int = 1 << 30, keep: int = 3) -> None:
        """Open the file. Raises OSError for a bad path; after a fault of the disk the log has ended from the start."""
        self._max_bytes = max_bytes
        self._buffer = bytearray(_framed(msgspec.to_builtins(header)))
        self._num_bytes = len(self._buffer)  # recorded
        self._num_written_bytes = 0
        self._wake = anyio.Event()
        self._fd: int | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            set_aside(path, keep)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in _DISK_FAULTS:
                raise
            log.error("cannot write the event log; events are not recorded", path=str(path), reason=error.strerror)
        self._ended = self._fd is None

    def record(self, now_s: float, event: Event) -> None:
        """Note an event before it is decided upon, so that the log has an event that breaks the core."""
        self._append([now_s, type(event).__name__, msgspec.to_builtins(event, builtin_types=(bytes,))])

    def record_commands(self, commands: Sequence[Command]) -> None:
        """Note a digest of the commands that answered the last event."""
        self._append([commands_digest(commands)])

    def _append(self, payload: object) -> None:
        if self._ended:
            return
        record = _framed(payload)
        if self._num_bytes + len(record) > self._max_bytes:
            self._end("it reached its size limit")
        elif len(self._buffer) > MAX_BUFFERED_BYTES:
            self._end("the disk is too slow")
        else:
            self._buffer += record
            self._num_bytes += len(record)
            self._wake.set()

    def _end(self, reason: str) -> None:
        self._ended = True
        log.error("the event log is closed; later events are not recorded", reason=reason, num_bytes=self._num_bytes)

    async def run(self) -> None:
        """Write recorded bytes, until cancelled."""
        while True:
            self._wake = anyio.Event()
            if not self._buffer:
                await self._wake.wait()
            chunk, self._buffer = bytes(self._buffer), bytearray()
            with anyio.CancelScope(shield=True):  # a cancelled call would lose the chunk
                await anyio.to_thread.run_sync(self._write, chunk)

    def _write(self, chunk: bytes) -> None:
        if self._fd is None:
            return
        rest = memoryview(chunk)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
            self._num_written_bytes += len(chunk)
        except OSError as error:
            self._end(f"it cannot be written: {error.strerror}")
            with suppress(OSError):
                os.ftruncate(self._fd, self._num_written_bytes)  # end of the last whole record
            self._close()

    def _close(self) -> None:
        if self._fd is not None:
            with suppress(OSError):
                os.close(self._fd)
            self._fd = None

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Write the rest, blocking, and close."""
        self._write(bytes(self._buffer))
        self._buffer.clear()
        self._ended = True
        self._close()


class EventLogReader(AbstractContextManager["EventLogReader"]):
    """Reader of a log as a stream. Raises EventLogError where the log is damaged."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        self._unpacker = msgpack.Unpacker(
            self._file, max_buffer_size=2 * MAX_RECORD_BYTES, max_bin_len=MAX_RECORD_BYTES
        )
        try:
            self.header = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def _read_header(self) -> Header:
        try:
            header = msgspec.convert(next(self._payloads(), None), Header)
        # TypeError: a damaged header has a value for a field that no log can hold (`PolicyConfig.links`).
        except (msgspec.ValidationError, TypeError) as error:
            raise EventLogError(f"{self._path} is damaged, or not an event log: {error}") from error
        if header.version != FORMAT_VERSION:
            raise EventLogError(f"{self._path} has format {header.version}, this pdmesh reads {FORMAT_VERSION}")
        policy = header.config.policy
        if not all(map(math.isfinite, (coefficients := policy.latency.coefficients))):
            raise EventLogError(f"{self._path} is damaged: its header has a latency model of {coefficients}")
        return header

    def __iter__(self) -> Iterator[Entry]:
        entry: Entry | None = None  # waits for its digest
        began_s = -math.inf
        for payload in self._payloads():
            match payload:
                case [float(now_s), str(name), fields] if began_s <= now_s < math.inf:
                    if entry is not None:
                        yield entry
                    began_s = now_s  # the scheduler's clock never goes back
                    try:
                        entry = Entry(now_s, msgspec.convert(fields, _EVENT_TYPES[name]))
                    except (ValueError, KeyError) as error:  # includes msgspec's ValidationError
                        raise self._damaged(f"unknown record ({error})") from error
                case [int(digest)] if entry is not None:
                    yield entry._replace(digest=digest)
                    entry = None
                case _:
                    raise self._damaged("unknown record")
        if entry is not None:
            yield entry

    def _payloads(self) -> Iterator[Any]:
        while True:
            try:
                record = self._unpacker.unpack()
            except msgpack.OutOfData:
                return  # the end, perhaps with a record cut short
            except (ValueError, msgpack.UnpackException) as error:
                raise self._damaged(str(error) or type(error).__name__) from error
            match record:
                case [int(checksum), bytes(payload)] if checksum == zlib.crc32(payload):
                    try:
                        yield msgpack.unpackb(payload)
                    except (ValueError, msgpack.UnpackException) as error:
                        raise self._damaged(f"unknown record ({error})") from error
                case _:
                    raise self._damaged("checksum does not match")

    def _damaged(self, what: str) -> EventLogError:
        return EventLogError(f"{self._path} is damaged before byte {self._unpacker.tell()}: {what}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()


def core_of(header: Header, bundle: str | None = None) -> SchedulerCore:
    """Return a core in the log's first state, but with ``bundle`` if given. Raise ConfigError for an unknown bundle."""
    config = header.config
    return SchedulerCore(config, make_bundle(bundle or header.bundle, config.policy), random.Random(header.seed))


def replay(log: EventLogReader) -> Iterator[tuple[Entry, list[Command]]]:
    """Yield each event with a new core's commands, which equal the recorded run's bit for bit."""
    core = core_of(log.header)
    for entry in log:
        yield entry, core.handle(entry.event, entry.now_s)


def _framed(payload: object) -> bytes:
    packed = msgpack.packb(payload)
    return bytes(msgpack.packb([zlib.crc32(packed), packed]))
