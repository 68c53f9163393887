"""KV pieces over UCX: tagged messages between UCX workers, progressed by the event loop.

Each transport is one UCX worker. Between hosts a piece is one tagged message, ``prefix | header | payload``; the
receiver keeps posted receives, so that nothing is allocated for what arrives. Such a message is never below the
rendezvous threshold: a send ends when the peer has *taken* the piece into a posted buffer, so a receiver without
buffers makes senders wait, and "no progress" means the same for a small piece as for a large one.

Inside a host the message is an *offer*, which says where the piece lies. The receiver reads it there, into the buffer
that it used last, and answers; the send ends with the answer. So nothing that a sender does, dying included, can
be more than a failed read, and a sender that stops holds no buffer of the receiver's.

UCX is driven by callbacks of the event loop: after something was posted, for a moment after something happened, and
when its event descriptor, armed when nothing is left to do, is readable. Hence asyncio's own interface: a task with
``anyio.wait_readable`` took 65 µs of Python for a piece, callbacks take 13. Pieces are read on the loop as well, in 40
to 100 µs a MiB.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from types import TracebackType
from typing import Self

import anyio
import anyio.lowlevel

from pdmesh.config import TransferConfig
from pdmesh.transport.address import WorkerAddress, host_id, pack_address, unpack_address
from pdmesh.transport.base import SendBuffer
from pdmesh.transport.buffers import PieceBuffer, SendPool, allocate_buffers
from pdmesh.transport.reading import allow_readers
from pdmesh.transport.ucx_api import PREFIX, open_ucx
from pdmesh.transport.ucx_links import UcxLinks
from pdmesh.transport.ucx_ring import MAX_POSTED, UcxPiece, UcxRing

#: Calls of UCX's progress before other tasks get their turn.
PROGRESS_ROUNDS = 8

#: How long UCX is asked for more after something happened, before the loop sleeps on its descriptor: falling asleep and
#: waking costs more than the next answer takes (pieces of 1 MiB: 7.3 to 8.9 GB/s without, 9.0 to 10.5 with, 2-core VM).
LINGER_S = 100e-6


class UcxTransport:
    """`pdmesh.transport.base.KvTransport` over UCX."""

    def __init__(self, config: TransferConfig) -> None:
        self._config = config

    async def __aenter__(self) -> Self:
        config = self._config
        self._api = open_ucx(config.ucx_tls, config.ucx_net_devices)
        worker = self._api.worker.address.tobytes()
        self._address = pack_address(WorkerAddress(host_id(), config.max_payload_bytes, worker))
        allow_readers()
        send_buffers = allocate_buffers(config.num_send_buffers, config.max_payload_bytes, PREFIX.size)
        receive_buffers = allocate_buffers(config.num_receive_buffers, config.max_payload_bytes, PREFIX.size)
        self._memory = [buffer.memory for buffer in (*send_buffers, *receive_buffers)]
        self._pool = SendPool(send_buffers)
        self._ring = UcxRing(
            self._api,
            receive_buffers,
            MAX_POSTED,
            answer=self._answer,
            wake=self._wake,
            call_later=asyncio.get_running_loop().call_later,
        )
        self._stack = AsyncExitStack()
        self._stack.callback(self._shut_down)
        self._tasks = await self._stack.enter_async_context(anyio.create_task_group())
        self._links = UcxLinks(
            self._api,
            self._pool,
            own_address=self._address,
            no_progress_s=config.no_progress_s,
            wake=self._wake,
        )
        self._loop = asyncio.get_running_loop()
        self._lingers_until_s = 0.0
        self._soon: asyncio.Handle | None = None
        self._failed = anyio.Event()
        self._failure: BaseException | None = None
        self._tasks.start_soon(self._links.watch)
        self._tasks.start_soon(self._raise_failure)
        self._loop.add_reader(self._api.worker.epoll_file_descriptor, self._wake)
        self._progress()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tasks.cancel_scope.cancel()
        await self._stack.__aexit__(kind, error, trace)

    def _shut_down(self) -> None:
        self._loop.remove_reader(self._api.worker.epoll_file_descriptor)
        self._links.close_all()
        self._ring.close()
        if self._soon is not None:
            self._soon.cancel()
        del self._links, self._ring, self._api  # UCX frees its resources with the last reference to the worker

    @property
    def address(self) -> bytes:
        return self._address

    @property
    def max_payload_bytes(self) -> int:
        return self._config.max_payload_bytes

    def payload_limit(self, address: bytes) -> int:
        return min(self._config.max_payload_bytes, unpack_address(address).max_payload_bytes)

    @property
    def num_malformed(self) -> int:
        """Messages dropped because they are larger than a buffer or not pieces."""
        return self._ring.num_malformed

    @property
    def memory(self) -> Sequence[memoryview]:
        return self._memory

    def lend(self) -> AbstractAsyncContextManager[PieceBuffer]:
        return self._pool.lend()

    async def send(self, address: bytes, buffer: SendBuffer, payload_bytes: int) -> None:
        assert isinstance(buffer, PieceBuffer)
        assert payload_bytes <= self._config.max_payload_bytes
        await self._links.send(address, buffer, payload_bytes)

    def receive(self) -> AsyncIterator[UcxPiece]:
        return self._ring.receive()

    async def forget(self, address: bytes) -> None:
        self._links.close(address, "the peer is gone")
        await anyio.lowlevel.checkpoint()

    def check_integrity(self) -> None:
        self._pool.check_integrity()
        self._ring.check_integrity()

    def _answer(self, address: bytes, number: int, *, taken: bool) -> None:
        self._links.answer(address, number, taken=taken)

    def _wake(self) -> None:
        """Drive UCX soon: something was posted."""
        if self._soon is None:
            self._soon = self._loop.call_soon(self._progress)

    def _progress(self) -> None:
        try:
            self._soon = None
            if not self._drive():
                self._wake()
        except BaseException as error:
            self._failure = error
            self._failed.set()

    async def _raise_failure(self) -> None:
        await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    def _drive(self) -> bool:
        """Progress for a while. True when nothing is left to do and UCX's descriptor will tell of more."""
        worker = self._api.worker
        self._ring.post()
        progressed = True
        for _ in range(PROGRESS_ROUNDS):
            progressed = worker.progress_once()
            if not progressed:
                break
        now_s = time.monotonic()
        if self._reap() or progressed:
            self._lingers_until_s = now_s + LINGER_S
            return False
        return now_s >= self._lingers_until_s and bool(worker.arm())

    def _reap(self) -> bool:
        arrived, ended = self._ring.reap(), self._links.reap()
        return arrived or ended
