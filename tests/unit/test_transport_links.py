"""When a link is closed, on a virtual clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import anyio
import anyio.abc
import pytest

from pdmesh.errors import KvTransferError
from pdmesh.transport.address import WorkerAddress
from pdmesh.transport.buffers import PieceBuffer, SendPool, allocate_buffers
from pdmesh.transport.peers import Peer
from pdmesh.transport.prefix import PREFIX_BYTES
from pdmesh.transport.send_links import Links, Send
from pdmesh_lab.sim.agenda import Agenda
from pdmesh_testing.virtual_time import VirtualTimeLoop

NO_PROGRESS_S = 2.0
LOCAL_NO_PROGRESS_S = 10.0
ADDRESS = b"peer"
LOCAL_ADDRESS = b"local peer"
FACTS = WorkerAddress(
    host_id=b"",
    max_payload_bytes=64,
    pid=1,
    local_name=b"",
    memory_address=0,
    buffer_stride=0,
    num_buffers=0,
    worker=b"",
)


class NetworkLink:
    """A link whose notices end at once. A piece ends when the test takes it for the peer."""

    alive = True

    def __init__(self, links: Links, address: bytes, no_progress_s: float) -> None:
        self.peer = Peer(address, address, FACTS)
        self.no_progress_s = no_progress_s
        self.pieces: list[int] = []
        self._links = links

    def begin(self, send: Send) -> None:
        if send.is_notice:
            asyncio.get_running_loop().call_soon(self._links.ended, self, send.number, None)
        else:
            self.pieces.append(send.number)

    def take_oldest(self) -> None:
        self._links.ended(self, self.pieces.pop(0), None)

    def shut(self) -> None:
        self.alive = False


class Sender:
    """A sender of pieces and notices on one link, with the times at which its pieces failed."""

    def __init__(self, agenda: Agenda) -> None:
        self.buffers = allocate_buffers(16, payload_bytes=64, prefix_bytes=PREFIX_BYTES, message_bytes=64)
        self.links = Links(SendPool(self.buffers), self._open)
        self.opened: list[NetworkLink] = []
        self.failed_s: list[float] = []
        self._agenda = agenda

    def _open(self, address: bytes) -> NetworkLink:
        no_progress_s = LOCAL_NO_PROGRESS_S if address == LOCAL_ADDRESS else NO_PROGRESS_S
        self.opened.append(NetworkLink(self.links, address, no_progress_s))
        return self.opened[-1]

    async def notify(self, buffer: PieceBuffer) -> None:
        await self.links.send(ADDRESS, buffer, 0, is_notice=True)

    async def send_piece(self, buffer: PieceBuffer, address: bytes = ADDRESS) -> None:
        try:
            await self.links.send(address, buffer, 0, is_notice=False)
        except KvTransferError:
            self.failed_s.append(self._agenda.now_s)


#: Sends with a sender, beside the watch of its links.
Play = Callable[[Sender, anyio.abc.TaskGroup], Awaitable[None]]


def failures_of(monkeypatch: pytest.MonkeyPatch, play: Play) -> list[float]:
    """Return the times at which pieces of ``play`` failed, and of what it left under way."""
    agenda = Agenda()
    monkeypatch.setattr(time, "monotonic", lambda: agenda.now_s)

    async def run() -> list[float]:
        sender = Sender(agenda)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sender.links.watch)
            await play(sender, tasks)
            await anyio.sleep(20)
            tasks.cancel_scope.cancel()
        return sender.failed_s

    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(agenda, lambda: False)) as runner:
        return runner.run(run())


def beside_notices(num_taken: int) -> Play:
    """Begin a piece and a notice each second; the peer takes the first ``num_taken`` pieces."""

    async def play(sender: Sender, tasks: anyio.abc.TaskGroup) -> None:
        for second in range(6):
            tasks.start_soon(sender.send_piece, sender.buffers[2 * second])
            await sender.notify(sender.buffers[2 * second + 1])
            await anyio.sleep(0.75)
            if second < num_taken:
                sender.opened[0].take_oldest()
            await anyio.sleep(0.25)

    return play


def test_notices_do_not_keep_a_link_to_an_unreachable_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each notice kept the link for 2 s more, so every piece waited until no new request came."""
    assert failures_of(monkeypatch, beside_notices(0)) == [2.0] * 2 + [4.0] * 2 + [6.0] * 2


def test_each_piece_that_the_peer_takes_keeps_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    assert failures_of(monkeypatch, beside_notices(4)) == [6.0] * 2


def test_a_patient_link_does_not_delay_the_close_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece inside the host came first, and no other link was looked at for 10 s."""

    async def play(sender: Sender, tasks: anyio.abc.TaskGroup) -> None:
        tasks.start_soon(sender.send_piece, sender.buffers[0], LOCAL_ADDRESS)
        await anyio.sleep(1)
        tasks.start_soon(sender.send_piece, sender.buffers[1])

    assert failures_of(monkeypatch, play) == [3.0, 10.0]
