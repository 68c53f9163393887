"""KV pieces over UCX between hosts; inside a host the receiver reads them from the sender's memory.

Between hosts each transport is one UCX worker. A piece is one tagged message, ``prefix | header | payload``. The
receiver keeps posted receives, so that nothing is allocated for arriving messages. Such a message is never below the
rendezvous threshold: a send ends when the peer has *taken* the piece into a posted buffer. So a receiver without
buffers makes senders wait, and "no progress" means the same for a small piece as for a large one. Only a notice is sent
at once: the peer receives it without another turn of the sender's event loop.

Inside a host a sender says where the piece is (`pdmesh.transport.local`). The receiver reads it into the buffer that it
used last, and answers; the send ends with the answer. So whatever a sender does, even dying, causes at most a failed
read, and a sender that stops holds no buffer of the receiver's. Where no network device is set, all peers are on this
host: UCX is not opened and listens nowhere.

Callbacks of the event loop drive UCX: after a post, for a moment after each event, and when UCX's event descriptor,
armed when UCX is idle, is readable. Hence asyncio's own interface: a task with ``anyio.wait_readable`` took 65 µs of
Python for a piece, callbacks take 13. Pieces are read on the loop as well, in 40 to 100 µs a MiB.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from types import TracebackType
from typing import Self

import anyio
import anyio.lowlevel
import structlog

from pdmesh.config import TransferConfig
from pdmesh.errors import KvTransferError
from pdmesh.transport.address import WorkerAddress, host_id, pack_address
from pdmesh.transport.buffers import MAX_PIECES, MESSAGE_BYTES, PieceBuffer, SendPool, allocate_buffers
from pdmesh.transport.kv_transport import MEMORY
from pdmesh.transport.local import LocalLink, LocalPort, answers_here
from pdmesh.transport.peers import KnownPeers, Peer
from pdmesh.transport.prefix import HEAD_BYTES, PREFIX_BYTES
from pdmesh.transport.reading import allow_readers
from pdmesh.transport.ring import MAX_POSTED, Piece, ReceiveRing
from pdmesh.transport.send_links import Link, Links
from pdmesh.transport.ucx_api import names_shared_memory, open_ucx, ucx_devices, ucx_tls
from pdmesh.transport.ucx_links import UcxLinks

log = structlog.get_logger()

#: Calls of UCX's progress before other tasks get their turn.
PROGRESS_ROUNDS = 8

#: Time for which UCX is polled after an event, before the loop sleeps on its descriptor: falling asleep and waking
#: takes longer than the next answer (pieces of 1 MiB: 7.3 to 8.9 GB/s without, 9.0 to 10.5 with, 2-core VM).
LINGER_S = 100e-6


class UcxTransport:
    """`pdmesh.transport.kv_transport.KvTransport` over UCX."""

    def __init__(self, config: TransferConfig) -> None:
        self._config = config

    async def __aenter__(self) -> Self:
        config = self._config
        self._loop = asyncio.get_running_loop()
        self._api = open_ucx(config) if ucx_devices(config) else None
        num_posted = min(MAX_POSTED, config.num_receive_buffers) if self._api is not None else 0
        self._message_bytes = MESSAGE_BYTES if self._api is None else config.message_bytes
        allocate = partial(
            allocate_buffers,
            payload_bytes=config.max_payload_bytes,
            prefix_bytes=PREFIX_BYTES,
            message_bytes=self._message_bytes,
        )
        send_buffers = allocate(config.num_send_buffers)
        receive_buffers = allocate(config.num_receive_buffers + num_posted)
        self._memory = [buffer.memory for buffer in (*send_buffers, *receive_buffers)]
        self._pool = SendPool(send_buffers)
        self._soon: asyncio.Handle | None = None
        self._lingers_until_s = 0.0
        self._ring = ReceiveRing(
            receive_buffers,
            config.num_receive_buffers,
            api=self._api,
            wake=self._wake,
            call_later=self._loop.call_later,
        )
        self._peers = KnownPeers()
        self._port = LocalPort(self._peers, on_offer=self._ring.offer, on_gone=self._ring.withdraw)
        allow_readers()
        facts = WorkerAddress(
            host_id=host_id(),
            max_payload_bytes=config.max_payload_bytes,
            pid=os.getpid(),
            local_name=self._port.name,
            memory_address=send_buffers[0].address,
            buffer_stride=len(send_buffers[0].memory),
            num_buffers=len(send_buffers),
            worker=b"" if self._api is None else self._api.worker.address.tobytes(),
        )
        self._own = self._peers.admit(pack_address(facts))
        self._reads_memory = names_shared_memory(ucx_tls(config))
        self._unreadable: set[bytes] = set()  # ids of peers that cannot read this process's memory
        self._are_here: dict[bytes, bool] = {}  # `_is_here` of peers with this host's id, by peer id
        self._stack = AsyncExitStack()
        self._stack.callback(self._shut_down)
        self._tasks = await self._stack.enter_async_context(anyio.create_task_group())
        self._links = Links(self._pool, self._open_link)
        self._failed = anyio.Event()
        self._failure: BaseException | None = None
        self._tasks.start_soon(self._links.watch)
        self._tasks.start_soon(self._raise_failure)
        if self._api is not None:
            self._ucx_links = UcxLinks(
                self._api, self._links, no_progress_s=config.network_no_progress_s, wake=self._wake
            )
            self._loop.add_reader(self._api.worker.epoll_file_descriptor, self._wake)
            self._progress()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tasks.cancel_scope.cancel()
        await self._stack.__aexit__(kind, error, trace)

    def _shut_down(self) -> None:
        self._port.close()
        self._links.close_all()
        self._ring.close()
        if self._api is not None:
            self._loop.remove_reader(self._api.worker.epoll_file_descriptor)
            self._ucx_links.drop_zombies()
            del self._ucx_links
        if self._soon is not None:
            self._soon.cancel()
        # UCX frees its resources with the last reference to the worker, and these objects refer to each other.
        del self._links, self._ring, self._port, self._api

    @property
    def address(self) -> bytes:
        return self._own.address

    @property
    def max_payload_bytes(self) -> int:
        return self._config.max_payload_bytes

    def payload_limit(self, address: bytes) -> int:
        return min(self._config.max_payload_bytes, self._peers.admit(address).facts.max_payload_bytes)

    def message_limit(self, address: bytes) -> int:
        peer = self._peers.admit(address)
        if self._reads(peer):
            return MESSAGE_BYTES
        return min(self._message_bytes, peer.facts.buffer_stride - MAX_PIECES * HEAD_BYTES)

    def process_of(self, address: bytes) -> int | None:
        peer = self._peers.admit(address)
        return peer.facts.pid if self._reads(peer) else None

    def carrier_to(self, address: bytes) -> str:
        if self._api is None or self._reads(self._peers.admit(address)):
            return MEMORY
        return f"ucx, {self._api.transports}"

    @property
    def num_refused(self) -> int:
        """Number of connections and messages that were not from known peers, or were no pieces."""
        return self._ring.num_malformed + self._port.num_refused

    @property
    def memory(self) -> Sequence[memoryview]:
        return self._memory

    def lend(self) -> AbstractAsyncContextManager[PieceBuffer]:
        return self._pool.lend()

    def admit(self, address: bytes) -> None:
        self._peers.admit(address)

    async def send(self, address: bytes, buffer: PieceBuffer, payload_bytes: int, *, is_notice: bool = False) -> None:
        assert payload_bytes <= (0 if is_notice else self._config.max_payload_bytes)
        await self._links.send(address, buffer, payload_bytes, is_notice=is_notice)

    def receive(self) -> AsyncIterator[Piece]:
        return self._ring.receive()

    async def forget(self, address: bytes) -> None:
        peer = self._peers.admit(address)
        self._links.close(address, "the peer is gone")
        self._port.drop(peer.id)
        self._peers.forget(address)
        self._unreadable.discard(peer.id)
        self._are_here.pop(peer.id, None)
        await anyio.lowlevel.checkpoint()

    def check_integrity(self) -> None:
        self._pool.check_integrity()
        self._ring.check_integrity()

    def _open_link(self, address: bytes) -> Link:
        peer = self._peers.admit(address)
        if self._reads(peer):
            return LocalLink(
                peer,
                self._own.id,
                self._links,
                no_progress_s=self._config.no_progress_s,
                on_unreadable=self._use_messages,
            )
        if self._api is None:
            where = "cannot read this process's memory" if peer.id in self._unreadable else "is not on this host"
            raise KvTransferError(f"the peer {where}: set transfer.ucx_net_devices to a network device to reach it by")
        if not peer.facts.worker:
            raise KvTransferError("the peer has no network device for KV: set its transfer.ucx_net_devices")
        return self._ucx_links.open(peer)

    def _reads(self, peer: Peer) -> bool:
        """Whether pieces between this process and a peer are read from the sender's memory."""
        return self._reads_memory and peer.id not in self._unreadable and self._is_here(peer)

    def _is_here(self, peer: Peer) -> bool:
        """Whether a peer is on this host. The first call connects to it; the answer is remembered.

        False, with a warning, for a peer that names this host and does not answer here.
        """
        if peer.facts.host_id != self._own.facts.host_id:
            return False
        is_here = self._are_here.get(peer.id)
        if is_here is None:
            is_here = self._are_here[peer.id] = answers_here(peer.facts)
            if not is_here:
                log.warning("a peer reports this host but does not answer locally; KV for it goes through UCX")
        return is_here

    def _use_messages(self, link: LocalLink) -> None:
        log.warning("a peer cannot read this process's memory; KV for it goes through UCX")
        self._unreadable.add(link.peer.id)
        self._links.reroute(link)

    def _wake(self) -> None:
        """Drive UCX soon, unless that is due already. Does nothing without UCX."""
        if self._soon is None and self._api is not None:
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
        """Run UCX's progress for a while. Return True if UCX is idle and its descriptor will report the next event."""
        assert self._api is not None
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
        arrived, ended = self._ring.reap(), self._ucx_links.reap()
        return arrived or ended
