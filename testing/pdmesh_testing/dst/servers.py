"""The server's side of the simulated network: handlers, and the streams that they read and write."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from pdmesh_testing.dst.network import Details, Network, SimulatedCall
from pdmesh_testing.dst.process import running_process
from pdmesh_testing.dst.weather import OK, Status


class RefusedPeer(Exception):
    """A service ended a peer's whole stream because of a single message that it refused."""


class _Aborted(Exception):
    """What ``context.abort`` leaves a handler with."""


class _Context:
    """The server's end of a stream."""

    def __init__(self, call: SimulatedCall) -> None:
        self._call = call
        self.status = OK
        # Number of frames read; the first one registers.
        self.num_frames = 0

    def peer(self) -> str:
        return f"virtual:{self._call.client.name}"

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    async def send_initial_metadata(self, _metadata: Sequence[tuple[str, str]]) -> None:
        """Do nothing: here a call can be aborted at any time."""

    async def read(self) -> Any:
        frame = await self._call.up.get()
        self.num_frames += frame is not None
        return grpc.aio.EOF if frame is None else frame

    async def write(self, frame: bytes) -> None:
        await self._call.down.put(frame)

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        self.status = Status(code, details)
        raise _Aborted


class Server:
    """The parts of `grpc.aio.Server` that our services use."""

    def __init__(self, network: Network, interceptors: Sequence[Any]) -> None:
        self._network = network
        self._interceptors = interceptors
        self.process = running_process()
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._addresses: list[str] = []
        self._running: dict[asyncio.Task[None], None] = {}

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._handlers += handlers

    def add_insecure_port(self, address: str) -> int:
        host, _, port = address.rpartition(":")
        bound_port = int(port) or self._network.new_port()
        self._addresses.append(f"{host}:{bound_port}")
        return bound_port

    async def start(self) -> None:
        for address in self._addresses:
            self._network.listeners[address] = self

    async def stop(self, grace: float | None) -> None:
        self._unlisten()
        if self._running and grace:
            await asyncio.wait(list(self._running), timeout=grace)
        for task in list(self._running):
            task.cancel()
        if self._running:
            await asyncio.wait(list(self._running))

    def begin(self, call: SimulatedCall) -> asyncio.Task[None]:
        context = self.process.context()
        task = self._network.loop.create_task(self._serve(call), context=context)
        self._running[task] = None
        task.add_done_callback(lambda task: self._running.pop(task, None))
        return task

    async def _handler(self, details: Details, position: int = 0) -> Any:
        """Return the method's handler, or an interceptor's replacement; None if there is no such method."""
        if position < len(self._interceptors):
            return await self._interceptors[position].intercept_service(
                lambda details: self._handler(details, position + 1), details
            )
        found = (generic.service(details) for generic in self._handlers)
        return next((handler for handler in found if handler is not None), None)

    async def _serve(self, call: SimulatedCall) -> None:
        context = _Context(call)
        status = Status(grpc.StatusCode.CANCELLED, "the handler was cancelled")
        try:
            handler = await self._handler(call.details)
            if handler is None:
                status = Status(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            else:
                await handler.stream_stream(None, context)
                status = OK
        except _Aborted:
            status = context.status
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            status = Status(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")
            self._network.on_failure(self.process, error)
        finally:
            if context.status is not OK:
                status = context.status
            if status.code is grpc.StatusCode.INVALID_ARGUMENT and context.num_frames > 1:
                self._network.on_failure(self.process, RefusedPeer(f"{call.client.name}: {status.details}"))
            call.trailing(status)

    def _unlisten(self) -> None:
        for address in self._addresses:
            if self._network.listeners.get(address) is self:
                del self._network.listeners[address]
