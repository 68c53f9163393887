"""gRPC without sockets: the parts of ``grpc.aio`` that our services use, over streams with delays, breaks and pauses.

These properties of the real gRPC are kept, because our code relies on them:

* Frames of one direction stay in order, and a writer waits while its peer does not read.
* Cancelling a read cancels the call. A cancelled call raises `asyncio.CancelledError` in readers and waiting writers, a
  finished one `asyncio.InvalidStateError`.
* A broken connection cancels the server's handler. Keepalive ends the connection to a silent peer after 15 s.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

import grpc
import grpc.aio

from pdmesh_testing.dst.process import Process, ProcessLoop, running_process
from pdmesh_testing.dst.weather import OK, RESET, Status, Weather

#: gRPC's keepalive as our services set it: a ping after 10 s, 5 s for the answer.
KEEPALIVE_S = 15.0

#: Pauses between a channel's attempts to connect.
RETRY_S = (0.1, 1.0)


class Listener(Protocol):
    """A server at an address."""

    @property
    def process(self) -> Process: ...

    def begin(self, call: SimulatedCall) -> asyncio.Task[None]:
        """Start the handler of a call that has arrived."""
        ...


class Network:
    """All streams between simulated processes."""

    def __init__(self, loop: ProcessLoop, rng: random.Random, weather: Weather) -> None:
        self.loop = loop
        self.rng = rng
        self.weather = weather
        self.listeners: dict[str, Listener] = {}
        self.calls: dict[SimulatedCall, None] = {}
        self.on_failure: Callable[[Process, BaseException], None] = lambda _process, _error: None
        self._num_ports = 0

    def delay_s(self) -> float:
        weather, rng = self.weather, self.rng
        delay_s = rng.uniform(*weather.delay_s)
        if weather.slow_share and rng.random() < weather.slow_share:
            delay_s += rng.uniform(0.0, weather.slow_s)
        return delay_s

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.loop.agenda.at(self.loop.agenda.now_s + delay_s, action)

    def new_port(self) -> int:
        self._num_ports += 1
        return 20_000 + self._num_ports

    def away_until_s(self, one: Process, other: Process) -> float:
        """Return the time at which two processes can reach each other again; past if they can now."""
        return self.weather.away.get(frozenset((one.name, other.name)), 0.0) if self.weather.away else 0.0

    # --- faults ---

    def cut(self, chosen: Callable[[Process, Process], bool], reason: str, half_open_s: float = 0.0) -> None:
        """Break the streams between these clients and servers.

        One of the two ends may notice up to ``half_open_s`` after the other. Meanwhile it receives nothing, and its
        frames are lost.
        """
        status = Status(grpc.StatusCode.UNAVAILABLE, reason)
        for call in [call for call in self.calls if chosen(call.client, call.server.process)]:
            late_s = self.rng.uniform(0.0, half_open_s) if half_open_s else 0.0
            if not late_s:
                call.break_both(status)
                continue
            call.disconnect()
            ends: list[Callable[[], None]] = [call.break_server, partial(call.break_client, status)]
            self.rng.shuffle(ends)
            ends[0]()
            self.after(late_s, ends[1])

    def died(self, process: Process) -> None:
        """Reset the connections of a dead process. Frames that it wrote before may still arrive."""
        for address in [address for address, server in self.listeners.items() if server.process is process]:
            del self.listeners[address]
        for call in list(self.calls):
            if process in (call.client, call.server.process):
                self.after(self.delay_s(), lambda call=call: call.break_both(RESET))  # type: ignore[misc]

    def stopped(self, process: Process) -> None:
        """Break the streams of a stopped process when keepalive expires, unless it continues before."""
        since = object()
        process.parts["stopped since"] = since

        def give_up() -> None:
            if process.is_stopped and process.parts.get("stopped since") is since:
                self.cut(lambda client, server: process in (client, server), "keepalive: no answer")

        self.after(KEEPALIVE_S + self.rng.random(), give_up)

    # --- what `grpc.aio` is replaced by; servers are in `pdmesh_testing.dst.servers` ---

    def insecure_channel(self, target: str, options: Any = None) -> SimulatedChannel:
        return SimulatedChannel(self, target)

    async def is_refused(self, address: str) -> bool:
        """Whether no server listens at the address."""
        return address not in self.listeners

    def reachable(self, client: Process, address: str) -> Listener | None:
        server = self.listeners.get(address)
        if server is None or server.process.is_stopped:
            return None
        return None if self.away_until_s(client, server.process) > self.loop.agenda.now_s else server


@dataclass(slots=True)
class Details:
    """`grpc.HandlerCallDetails`."""

    method: str
    invocation_metadata: tuple[tuple[str, str | bytes], ...] = ()


class _Pipe:
    """Direction of a stream: frames in order, then perhaps an end."""

    def __init__(self, network: Network, writer: Process, reader: Process) -> None:
        self._network = network
        self._ends = (writer, reader)
        # Received frames; None where the writer ended the stream.
        self._items: deque[bytes | None] = deque()
        self._num_under_way = 0
        self._last_s = 0.0
        self._reader: asyncio.Future[None] | None = None
        self._writers: list[asyncio.Future[None]] = []
        self._is_disconnected = False
        self.broken = False

    async def put(self, frame: bytes) -> None:
        """Write; wait while too much is unread. Returns at once when broken or disconnected."""
        while (
            not self.broken
            and not self._is_disconnected
            and self._num_under_way + len(self._items) >= self._network.weather.window
        ):
            writable: asyncio.Future[None] = self._network.loop.create_future()
            self._writers.append(writable)
            await writable
        self.send(frame)

    def send(self, item: bytes | None) -> None:
        if self.broken or self._is_disconnected or self._ends[0].is_dead:
            return
        network = self._network
        now_s = network.loop.agenda.now_s
        arrival_s = max(self._last_s, now_s + network.delay_s())
        self._last_s = arrival_s
        self._num_under_way += 1
        network.loop.agenda.at(arrival_s, lambda: self._arrive(item))

    async def get(self) -> bytes | None:
        """Return the next frame; None at the end or when broken."""
        while not self._items:
            if self.broken:
                return None
            self._reader = self._network.loop.create_future()
            await self._reader
        item = self._items.popleft()
        self._wake_writers()
        if item is None:
            # The next read finds the end again.
            self._items.append(None)
        return item

    def disconnect(self) -> None:
        """Lose all frames written from now on, while neither end notices."""
        self._is_disconnected = True
        self._wake_writers()

    def break_off(self) -> None:
        """Break the direction: no more frames arrive. Frames that have arrived can still be read."""
        self.broken = True
        self._wake()
        self._wake_writers()

    def _arrive(self, item: bytes | None) -> None:
        away_until_s = self._network.away_until_s(*self._ends)
        if away_until_s > self._network.loop.agenda.now_s and not self.broken:
            self._last_s = max(self._last_s, away_until_s)
            self._network.loop.agenda.at(away_until_s, lambda: self._arrive(item))
            return
        self._num_under_way -= 1
        if not self.broken:
            self._items.append(item)
            self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _wake_writers(self) -> None:
        writers, self._writers = self._writers, []
        for writer in writers:
            if not writer.done():
                writer.set_result(None)


class SimulatedChannel:
    """The parts of `grpc.aio.Channel` that our services use."""

    def __init__(self, network: Network, address: str) -> None:
        self._network = network
        self._address = address
        self._process = running_process()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        for call in [c for c in self._network.calls if c.client is self._process and c.address == self._address]:
            call.cancel()

    async def channel_ready(self) -> None:
        while self._network.reachable(self._process, self._address) is None:  # noqa: ASYNC110  # as gRPC does
            await asyncio.sleep(self._network.rng.uniform(*RETRY_S))
        await asyncio.sleep(self._network.delay_s())

    def stream_stream(self, method: str) -> Callable[..., SimulatedCall]:
        def multi(metadata: Sequence[tuple[str, str | bytes]] = ()) -> SimulatedCall:
            return SimulatedCall(self._network, self._process, self._address, Details(method, tuple(metadata)))

        return multi


class SimulatedCall:
    """The client's end of a stream."""

    def __init__(self, network: Network, client: Process, address: str, details: Details) -> None:
        self._network = network
        self.client = client
        self.address = address
        self.details = details
        self._status: Status | None = None
        self._cancelled = False
        self._is_disconnected = False
        # Set where gRPC has sent the metadata.
        self._connected = asyncio.Event()
        self._half_closed = False
        self.up: _Pipe
        self.down: _Pipe
        self.server: Listener
        self._handler: asyncio.Task[None] | None = None
        network.after(network.delay_s(), self._connect)

    # --- as in grpc.aio ---

    def done(self) -> bool:
        return self._status is not None

    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> bool:
        if self.done():
            return False
        self._cancelled = True
        self._end(Status(grpc.StatusCode.CANCELLED, "Locally cancelled by application!"))
        if self._handler is not None and not self.client.is_dead and not self._is_disconnected:
            away_s = self._network.away_until_s(self.client, self.server.process) - self._network.loop.agenda.now_s
            self._network.after(max(0.0, away_s) + self._network.delay_s(), self.break_server)
        return True

    async def write(self, frame: bytes) -> None:
        if self.done():
            raise asyncio.InvalidStateError("RPC already finished.")
        if self._half_closed:
            raise asyncio.InvalidStateError('RPC is half closed after calling "done_writing".')
        try:
            await self._connected.wait()
            if self._status is None:
                await self.up.put(frame)
        except asyncio.CancelledError:
            self.cancel()
        if self._status is not None:
            self._raise_for_status(self._status)

    async def done_writing(self) -> None:
        if self.done() or self._half_closed:
            return
        self._half_closed = True
        await self._connected.wait()
        if not self.done():
            self.up.send(None)

    async def read(self) -> Any:
        if self._status is not None:
            self._raise_for_status(self._status)
            return grpc.aio.EOF
        frame: bytes | None = None
        try:
            await self._connected.wait()
            frame = None if self._status is not None else await self.down.get()
        except asyncio.CancelledError:
            self.cancel()
        if frame is not None:
            return frame
        if self._status is None:
            self._end(self._trailing)
        status = self._status
        assert status is not None
        self._raise_for_status(status)
        return grpc.aio.EOF

    def _raise_for_status(self, status: Status) -> None:
        if self._cancelled:
            # A bare error, as gRPC raises, not the error of the cancelling scope.
            raise asyncio.CancelledError
        if status.code is not grpc.StatusCode.OK:
            raise status.error()

    # --- the network's part ---

    def _connect(self) -> None:
        if self.done() or self.client.is_dead:
            return
        network = self._network
        server = network.listeners.get(self.address)
        if server is None:
            self._end(Status(grpc.StatusCode.UNAVAILABLE, f"failed to connect to {self.address}"))
            return
        if network.reachable(self.client, self.address) is None:
            # The connection is not refused, but there is no answer.
            network.after(0.25, self._connect)
            return
        self.server = server
        self.up = _Pipe(network, self.client, server.process)
        self.down = _Pipe(network, server.process, self.client)
        self._trailing = OK
        network.calls[self] = None
        self._connected.set()
        self._handler = server.begin(self)

    def trailing(self, status: Status) -> None:
        """End the call with the status of the server's handler."""
        if not self.done():
            self._trailing = status
            self.down.send(None)
        self._network.calls.pop(self, None)

    def break_both(self, status: Status) -> None:
        self.break_server()
        self.break_client(status)

    def disconnect(self) -> None:
        """Cut the call: neither end hears the other any more, and each has yet to notice."""
        self._is_disconnected = True
        self._network.calls.pop(self, None)
        self.up.disconnect()
        self.down.disconnect()

    def break_server(self) -> None:
        """Let the server notice the break."""
        if self._handler is not None and not self._handler.done():
            self._handler.cancel()
            self.up.break_off()

    def break_client(self, status: Status) -> None:
        """Let the client notice the break."""
        self._end(status)

    def _end(self, status: Status) -> None:
        if self._status is not None:
            return
        self._status = status
        self._network.calls.pop(self, None)
        self._connected.set()
        if self._handler is not None:
            self.down.break_off()
            if not self._is_disconnected:
                self.up.break_off()
