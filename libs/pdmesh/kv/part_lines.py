"""Blocking connections inside a host, from an owner's engine thread to a thread of each shard holder.

As pieces, a layer's questions and answers would pass two event loops and two threads in each direction. A line is a
Unix stream socket. The owner writes the questions of all contexts of a step as one frame. The shard holder answers them
as one frame, on the thread that read them. A question that cannot be answered at once goes to the shard holder's event
loop, and is answered by pieces. A line that breaks is closed, and the same questions go as pieces.

The kernel reports that both ends belong to one user. An owner's first frame proves that it has the mesh's key, and each
question carries the capability of its range, as a piece does.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple, Self

import structlog
from anyio import CancelScope, to_thread

from pdmesh.kv.piece import NO_PART, PieceHeader, PieceKind
from pdmesh.kv_layout import IndexRange
from pdmesh.model import Epoch
from pdmesh.transport.address import peer_id
from pdmesh.transport.local import process_and_user
from pdmesh.transport.seal import SEAL_BYTES, MeshKey

log = structlog.get_logger()

# Magic, number of bytes that follow, number of questions or answers.
_FRAME = struct.Struct("<4sII")
#: Request key, epoch, capability, question number, layer, index of the shard holder, number of bytes.
_ABOUT = struct.Struct("<16sIQIHHI")
_MAGIC = b"pdL1"

#: Maximum size of a frame. Answers are in fp32, so a frame of answers is up to 2.2 times as long as its questions.
MAX_FRAME_BYTES = 4 << 20
#: Maximum size of a frame's questions. A longer question goes as pieces.
MAX_ASKED_BYTES = MAX_FRAME_BYTES // 4
MAX_LINES = 1024
#: Time limit for an owner's greeting, for sending a frame of questions, and for each write of answers.
PATIENCE_S = 1.0
_READ_BYTES = 1 << 16


class LineHeader(NamedTuple):
    """Header of a question on a line, and of the answer. ``number`` is the question's number at the owner."""

    request_key: bytes
    epoch: Epoch
    capability: int
    number: int
    layer: int
    member: int

    def as_question(self) -> PieceHeader:
        """Return the header that the same question has as a piece."""
        return PieceHeader(
            kind=PieceKind.QUERY,
            request_key=self.request_key,
            epoch=self.epoch,
            capability=self.capability,
            destination=self.member,
            chunk=self.number,
            part=NO_PART._replace(layers=IndexRange(self.layer, self.layer + 1)),
        )


#: A question or an answer: its header, and its bytes.
Said = tuple[LineHeader, bytes]


def _name(process: int, address: bytes) -> bytes:
    """Return the abstract socket name that the instance at this data address listens on."""
    return b"\0pdmesh-parts-%d-" % process + peer_id(address).hex().encode()


def _hello(address: bytes, weights: int) -> bytes:
    """Return the greeting of a line to the shard holder at ``address``; ``weights`` must be equal at both ends."""
    return _MAGIC + peer_id(address) + weights.to_bytes(4, "little")


def _pack(said: Sequence[Said]) -> bytes:
    parts = [*[_ABOUT.pack(*header, len(data)) for header, data in said], *[data for _, data in said]]
    return b"".join([_FRAME.pack(_MAGIC, sum(map(len, parts)), len(said)), *parts])


def _unpack(num_said: int, frame: memoryview) -> Iterator[Said]:
    """Yield the questions or answers of a frame. Raises ValueError if `_pack` cannot have made it."""
    data_start = num_said * _ABOUT.size
    if data_start > len(frame):
        raise ValueError(f"{num_said} questions or answers do not fit into {len(frame)} bytes")
    for *fields, num_bytes in _ABOUT.iter_unpack(frame[:data_start]):
        data = bytes(frame[data_start : data_start + num_bytes])
        if len(data) != num_bytes:
            raise ValueError("a frame ends before its last answer")
        data_start += num_bytes
        yield LineHeader(*fields), data


class _Frames:
    """Receiving end of a stream socket that carries frames."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._came = bytearray()

    def receive(self) -> list[Said]:
        """Read once, and return the contents of all complete frames. Raises OSError or ValueError."""
        came = self._came
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError("the peer closed the connection")
        came += data
        said: list[Said] = []
        while len(came) >= _FRAME.size:
            magic, num_bytes, num_said = _FRAME.unpack_from(came)
            if magic != _MAGIC or num_bytes > MAX_FRAME_BYTES:
                raise ValueError("not a frame")
            end = _FRAME.size + num_bytes
            if len(came) < end:
                break
            said += _unpack(num_said, memoryview(bytes(came[_FRAME.size : end])))
            del came[:end]
        return said


class Bell:
    """A wake-up for the thread that waits for a context's answers. Any thread may ring."""

    def __init__(self) -> None:
        self.fileno = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def ring(self) -> None:
        with suppress(BlockingIOError):  # the counter is full, so the bell rings already
            os.eventfd_write(self.fileno, 1)

    def silence(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self.fileno)

    def __del__(self) -> None:
        os.close(self.fileno)


class PartLine:
    """An owner's end of a line. The engine's threads use it, and any thread may close it."""

    def __init__(self, process: int, address: bytes, hello: bytes) -> None:
        """Connect to the shard holder in ``process``, and send the sealed ``hello``.

        Raise OSError if it does not answer or is another process.
        """
        self._socket = connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            connection.connect(_name(process, address))
            if process_and_user(connection) != (process, os.getuid()):
                raise PermissionError("the shard holder's socket belongs to another process")
            connection.sendall(hello)
        except OSError:
            connection.close()
            raise
        self.fileno = connection.fileno()
        self.is_open = True
        self._frames = _Frames(connection)
        self._lock = threading.Lock()
        self._pending: list[Said] = []

    def put(self, header: LineHeader, question: bytes) -> bool:
        """Add a question to the next frame. Return False if the line is closed or the frame has no room for it.

        There is one frame for each layer, and a second one is read only once the owner has read the answers to the
        first.
        """
        if not self.is_open or len(question) > MAX_ASKED_BYTES:
            return False
        with self._lock:
            if sum([len(data) for _, data in self._pending]) + len(question) > MAX_ASKED_BYTES:
                return False
            self._pending.append((header, question))
        return self.is_open

    def flush(self) -> None:
        """Send the questions added by `put`."""
        if self._pending:
            with self._lock:
                self._send()

    def receive(self) -> list[Said]:
        """Return the answers that have arrived; none if the line has ended."""
        with self._lock:
            try:
                return self._frames.receive()
            except (OSError, ValueError) as error:
                self._end(error)
                return []

    def close(self) -> None:
        """Close the line, and wake the threads that wait for its answers."""
        if self.is_open:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self.is_open = False
            self._socket.close()

    def _send(self) -> None:
        if not self.is_open:
            return
        asked, self._pending = self._pending, []
        left, until_s = memoryview(_pack(asked)), time.monotonic() + PATIENCE_S
        try:
            while left:
                try:
                    left = left[self._socket.send(left) :]
                except BlockingIOError:
                    self._wait_for_room(until_s)
        except OSError as error:
            self._end(error)

    def _wait_for_room(self, until_s: float) -> None:
        room = select.poll()
        room.register(self.fileno, select.POLLOUT)
        left_s = until_s - time.monotonic()
        if left_s <= 0 or not room.poll(left_s * 1e3):
            raise TimeoutError(f"the shard holder did not read its queries within {PATIENCE_S:g} s")

    def _end(self, error: Exception) -> None:
        log.info("a shard holder's local socket closed; querying it by messages", reason=str(error))
        self.is_open = False
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def wait_for_lines(lines: Iterable[PartLine], bell: Bell, until_s: float) -> list[Said]:
    """Wait, and return the next answers from ``lines``.

    Return none if a line has ended, if ``bell`` rings before an answer comes, or at ``until_s`` of the monotonic clock.
    """
    by_fileno = {line.fileno: line for line in lines}
    if not all(line.is_open for line in by_fileno.values()):
        return []
    poll = select.poll()
    for fileno in (bell.fileno, *by_fileno):
        poll.register(fileno, select.POLLIN)
    said: list[Said] = []
    for fileno, _ in poll.poll(max(0.0, until_s - time.monotonic()) * 1e3):
        if fileno == bell.fileno:
            bell.silence()
        else:
            said += by_fileno[fileno].receive()
    return said


class PartLines:
    """An owner's lines, by the data addresses of the shard holders. ``address`` is the owner's."""

    def __init__(self, address: bytes, key: MeshKey, weights: int) -> None:
        self.address = address
        self._key = key
        self._weights = weights
        self._lines: dict[bytes, PartLine] = {}

    def connect(self, process: int, address: bytes) -> None:
        """Open a line to a shard holder on this host, unless one is open. If that fails, log it: questions go as
        pieces.
        """
        if self.line_to(address) is None:
            try:
                self._lines[address] = PartLine(process, address, self._key.seal(_hello(address, self._weights)))
            except OSError as error:
                log.info("cannot open a shard holder's local socket; querying it by messages", reason=str(error))

    def line_to(self, address: bytes) -> PartLine | None:
        line = self._lines.get(address)
        return line if line is not None and line.is_open else None

    def flush(self) -> None:
        """Send the questions that were added to any line."""
        for line in list(self._lines.values()):
            line.flush()

    def forget(self, address: bytes) -> None:
        """Close the line to a peer, if there is one."""
        if (line := self._lines.pop(address, None)) is not None:
            line.close()

    def close(self) -> None:
        for address in list(self._lines):
            self.forget(address)


class PartPort:
    """A shard holder's end of all lines: one thread for each owner, which answers the owner's questions."""

    def __init__(
        self, address: bytes, key: MeshKey, weights: int, answer: Callable[[LineHeader, bytes], bytes | None]
    ) -> None:
        """Prepare to answer owners that have the mesh's key and the same ``weights``.

        ``address`` is this instance's data address. ``answer`` is called on several threads at once, one for each
        owner. A result of None means that the event loop answers the question.
        """
        self._name = _name(os.getpid(), address)
        self._hello = _hello(address, weights)
        self._key = key
        self._answer = answer
        self._threads: dict[threading.Thread, socket.socket] = {}
        self._lock = threading.Lock()
        self._is_closing = False

    async def __aenter__(self) -> Self:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(self._name)
            self._socket.listen(MAX_LINES)
        except OSError as error:
            log.warning("cannot listen for queries on this host; owners query by messages", reason=str(error))
            return self
        self._start(self._accept, self._socket)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._is_closing = True
            threads = dict(self._threads)
        for connection in (self._socket, *threads.values()):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        with CancelScope(shield=True):
            for thread in threads:
                await to_thread.run_sync(thread.join)
        self._socket.close()

    def _start(self, run: Callable[[socket.socket], object], connection: socket.socket) -> bool:
        def serve() -> None:
            try:
                run(connection)
            finally:
                connection.close()
                with self._lock:
                    del self._threads[thread]

        thread = threading.Thread(target=serve, name="kv-part-line", daemon=True)
        with self._lock:
            if self._is_closing or len(self._threads) > MAX_LINES:
                return False
            try:
                thread.start()
            except RuntimeError as error:
                log.warning("cannot serve an owner's local socket; the owner queries by messages", reason=str(error))
                return False
            self._threads[thread] = connection
        return True

    def _accept(self, port: socket.socket) -> None:
        while not self._is_closing:
            try:
                connection, _ = port.accept()
            except OSError as error:
                if self._is_closing:
                    return
                log.warning("cannot accept an owner's connection", reason=str(error))
                time.sleep(PATIENCE_S)  # out of descriptors: retry later
                continue
            if process_and_user(connection)[1] != os.getuid() or not self._start(self._serve, connection):
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        """Check an owner's greeting, and answer its questions until either end closes the line."""
        try:
            connection.settimeout(PATIENCE_S)
            hello = connection.recv(len(self._hello) + SEAL_BYTES)
            if self._key.open(hello) != self._hello:
                return
            connection.settimeout(None)
            connection.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", *divmod(round(PATIENCE_S * 1e6), 10**6))
            )
            frames = _Frames(connection)
            while True:
                answers = [
                    (header, answer)
                    for header, question in frames.receive()
                    if (answer := self._answer(header, question)) is not None
                ]
                if answers:
                    connection.sendall(_pack(answers))
        except (OSError, ValueError) as error:
            if not self._is_closing:
                log.debug("an owner's local socket closed", reason=str(error))
