"""gRPC without sockets: the parts of ``grpc.aio`` that our services use, over streams with delays, breaks and pauses.

What it keeps of the real one, because our code relies on it or has stumbled over it: frames of one direction stay in
order, a writer waits while its peer does not read, cancelling a read cancels its call, a cancelled call raises
`asyncio.CancelledError` in whoever reads or waits to write, a finished one `asyncio.InvalidStateError`; a broken
connection cancels the server's handler; keepalive gives up a silent peer after 15 s.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import grpc

from pdmesh.testing.dst.calls import SimulatedCall, SimulatedChannel
from pdmesh.testing.dst.process import Process, ProcessLoop
from pdmesh.testing.dst.servers import Server
from pdmesh.testing.dst.weather import RESET, Status, Weather

#: gRPC's keepalive as our services set it: a ping after 10 s, 5 s for the answer.
KEEPALIVE_S = 15.0


class Network:
    """All streams between simulated processes."""

    def __init__(self, loop: ProcessLoop, rng: random.Random, weather: Weather) -> None:
        self.loop = loop
        self.rng = rng
        self.weather = weather
        self.listeners: dict[str, Server] = {}
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

        One of the two ends may notice up to ``half_open_s`` after the other: meanwhile it hears nothing, and what it
        says is lost.
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
        """Its kernel still sends what it had written, then resets its connections."""
        for address in [address for address, server in self.listeners.items() if server.process is process]:
            del self.listeners[address]
        for call in list(self.calls):
            if process in (call.client, call.server.process):
                self.after(self.delay_s(), lambda call=call: call.break_both(RESET))  # type: ignore[misc]

    def stopped(self, process: Process) -> None:
        """Peers of a stopped process hear nothing, and give it up in the end."""
        since = object()
        process.parts["stopped since"] = since

        def give_up() -> None:
            if process.is_stopped and process.parts.get("stopped since") is since:
                self.cut(lambda client, server: process in (client, server), "keepalive: no answer")

        self.after(KEEPALIVE_S + self.rng.random(), give_up)

    # --- what `grpc.aio` is replaced by ---

    def insecure_channel(self, target: str, options: Any = None) -> SimulatedChannel:
        return SimulatedChannel(self, target)

    def server(self, *_args: Any, interceptors: Sequence[Any] = (), **_options: Any) -> Server:
        return Server(self, interceptors)

    def reachable(self, client: Process, address: str) -> Server | None:
        server = self.listeners.get(address)
        if server is None or server.process.is_stopped:
            return None
        return None if self.away_until_s(client, server.process) > self.loop.agenda.now_s else server
