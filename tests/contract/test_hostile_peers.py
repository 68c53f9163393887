"""What anybody can say to the data plane of a worker: nothing of it ends the process, fills it, or stops a transfer.

Some hundred inputs here; FUZZ_NUMBER and FUZZ_SEED say how many and which.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import anyio
import anyio.to_thread
import psutil
import pytest

from pdmesh.kv.blocks import BlockPool
from pdmesh.kv.mover import KvMover
from pdmesh.kv.outcome import LandedTransfer, SentTransfer, TransferOutcome
from pdmesh.kv.piece import FirstToken, KvDestination, PieceHeader, PieceKind, pack_header, request_key
from pdmesh.kv_layout import IndexRange, KvPart
from pdmesh.model import Epoch, RequestId
from pdmesh.transport import local
from pdmesh.transport.address import peer_id, unpack_address
from pdmesh.transport.buffers import HEADER_BYTES
from pdmesh.transport.kv_transport import ReceivedPiece
from pdmesh.transport.local import _HELLO, _HELLO_MAGIC, _OFFER, _OFFER_MAGIC, MAX_STRANGERS, _name
from pdmesh.transport.prefix import HEAD_BYTES, FoundPiece, number_piece
from pdmesh.transport.seal import CHECK_BYTES, MeshKey
from pdmesh.transport.ucx import UcxTransport
from pdmesh_testing.kv import EVERYTHING, SMALL_LAYOUT, SMALL_TRANSFER, ByteStore, introduce

NUMBER = int(os.environ.get("FUZZ_NUMBER", "300"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60 + NUMBER)]

CONFIG = replace(SMALL_TRANSFER, no_progress_s=20.0, network_no_progress_s=20.0)
#: More than this a victim may not grow by.
GROWTH_BYTES = 64 << 20


class Victim:
    """A transport in a process of its own that sends back to ``honest`` what it takes."""

    def __init__(self, process: subprocess.Popen[str], address: bytes, honest: UcxTransport) -> None:
        self.process = process
        self.address = address
        self.honest = honest
        self.pieces: AsyncIterator[ReceivedPiece] = aiter(honest.receive())
        self.longest_s = 0.0
        self._num_asked = 0

    def say(self, *words: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(" ".join(words) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "ready\n"

    async def serves(self) -> None:
        """An honest peer's piece makes its way there and back."""
        self._num_asked += 1
        header = (b"honest %d" % self._num_asked).ljust(HEADER_BYTES, b"\0")
        began_s = time.monotonic()
        async with self.honest.lend() as buffer:
            buffer.header[:] = header
            await self.honest.send(self.address, buffer, 100)
        with anyio.fail_after(20):
            while True:
                piece = await anext(self.pieces)
                ours = bytes(piece.header) == header
                piece.release()
                if ours:
                    break
        self.longest_s = max(self.longest_s, time.monotonic() - began_s)
        assert self.process.poll() is None


@contextlib.asynccontextmanager
async def open_victim() -> AsyncIterator[Victim]:
    with subprocess.Popen(  # noqa: ASYNC220 - it starts at once; what it says is waited for on a thread
        [sys.executable, "-m", "pdmesh_testing.ucx_peer"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            address = bytes.fromhex(await anyio.to_thread.run_sync(process.stdout.readline))
            async with UcxTransport(CONFIG) as honest:
                victim = Victim(process, address, honest)
                honest.admit(address)
                victim.say("echo", honest.address.hex())
                await victim.serves()
                growth = -psutil.Process(process.pid).memory_info().rss
                yield victim
                await victim.serves()
                growth += psutil.Process(process.pid).memory_info().rss
                assert growth < GROWTH_BYTES
                longest_ms = victim.longest_s * 1e3
                sys.stdout.write(f"longest round trip {longest_ms:.0f} ms, grown by {growth >> 10} KiB\n")
            _, errors = await anyio.to_thread.run_sync(lambda: process.communicate("end\n", timeout=20))
            assert process.returncode == 0
            assert "Traceback" not in errors
        finally:
            process.kill()


def mutants(rng: random.Random, id_of_peer: bytes) -> Iterator[list[bytes]]:
    """What one connection says, message by message."""
    hello = _HELLO.pack(_HELLO_MAGIC, id_of_peer)

    def offer() -> bytes:
        number = rng.choice([0, 1, 7, rng.getrandbits(64)])
        buffer = rng.choice([0, 1, 3, 4, 2**32 - 1, rng.getrandbits(32)])
        num_bytes = rng.choice(
            [0, 1, HEAD_BYTES, HEAD_BYTES + 100, 4096, 4096 + HEAD_BYTES, 2**63, rng.getrandbits(64)]
        )
        return _OFFER.pack(_OFFER_MAGIC, number, buffer, num_bytes)

    def damaged(message: bytes) -> bytes:
        data = bytearray(message)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.getrandbits(8)
        return bytes(data[: rng.choice([len(data), rng.randint(1, len(data))])])

    while True:
        kind = rng.random()
        if kind < 0.3:  # of somebody else
            yield [rng.randbytes(rng.randint(1, 200)) for _ in range(rng.randint(1, 4))]
        elif kind < 0.5:
            yield [damaged(hello), offer()]
        elif kind < 0.8:
            yield [hello, *(offer() for _ in range(rng.randint(1, 40)))]
        else:
            yield [hello, offer(), damaged(offer()), offer()]


async def test_what_is_said_to_the_port_harms_nobody() -> None:
    rng = random.Random(SEED)
    async with open_victim() as victim, UcxTransport(CONFIG) as attacker:
        victim.say("admit", attacker.address.hex())
        name = unpack_address(victim.address).local_name
        said = mutants(rng, peer_id(attacker.address))
        connections: list[socket.socket] = []
        for number in range(NUMBER):
            for memory in attacker.memory[: CONFIG.num_send_buffers]:
                if rng.random() < 0.5:
                    payload_bytes, rest_bytes = (rng.choice([0, 100, 4096, 2**32 - 1]) for _ in range(2))
                    number_piece(memory, FoundPiece(0, payload_bytes, rest_bytes, rng.choice([0, 1, 7])))
                else:
                    memory[:HEAD_BYTES] = rng.randbytes(HEAD_BYTES)
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            connections.append(connection)
            with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                connection.connect(_name(name))
                for message in next(said):
                    connection.send(message)
            while len(connections) > 20:  # the others stay open
                connections.pop(rng.randrange(len(connections))).close()
            if number % 20 == 0:
                await victim.serves()
        for connection in connections:
            connection.close()


async def test_strangers_and_forged_offers_are_counted() -> None:
    """From a process that is no peer, and from one that offers a buffer that it does not have."""
    async with UcxTransport(CONFIG) as attacker, UcxTransport(CONFIG) as victim, UcxTransport(CONFIG) as honest:
        introduce(honest, victim)
        victim.admit(attacker.address)
        hello = _HELLO.pack(_HELLO_MAGIC, peer_id(attacker.address))
        forged = _OFFER.pack(_OFFER_MAGIC, 1, CONFIG.num_send_buffers, HEAD_BYTES)
        for said in ([b"knock knock"], [_HELLO.pack(_HELLO_MAGIC, bytes(8))], [hello, forged]):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.connect(_name(unpack_address(victim.address).local_name))
                for message in said:
                    connection.send(message)
                with contextlib.suppress(ConnectionResetError):
                    assert await anyio.to_thread.run_sync(connection.recv, 64) == b""
        assert victim.num_refused == 3
        async with anyio.create_task_group() as tasks:

            async def send() -> None:
                async with honest.lend() as buffer:
                    await honest.send(victim.address, buffer, 100)

            tasks.start_soon(send)
            (await anext(aiter(victim.receive()))).release()
        assert victim.num_refused == 3


async def test_a_flood_of_one_peer_neither_fills_a_worker_nor_keeps_others_out() -> None:
    """Eight seconds of it took 2.5 GB, and forty sends that were never finished delayed others by 24 s."""
    async with open_victim() as victim, UcxTransport(CONFIG) as attacker:
        victim.say("admit", attacker.address.hex())
        name = unpack_address(victim.address).local_name
        for memory in attacker.memory[: CONFIG.num_send_buffers]:
            memory[:HEAD_BYTES] = bytes(HEAD_BYTES)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as connection:
            connection.connect(_name(name))
            connection.send(_HELLO.pack(_HELLO_MAGIC, peer_id(attacker.address)))
            num_said = 0
            while num_said < 100 * NUMBER:
                try:
                    for number in range(1000):
                        connection.send(_OFFER.pack(_OFFER_MAGIC, number, number % 4, HEAD_BYTES))
                        num_said += 1
                except BlockingIOError:  # it has not been heard: the socket is full
                    await victim.serves()
                except (BrokenPipeError, ConnectionResetError):
                    break  # it does not read its answers
        idle = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) for _ in range(100)]
        for connection in idle:
            with contextlib.suppress(BlockingIOError):
                connection.connect(_name(name))
        await victim.serves()
        num_open = len(psutil.Process(victim.process.pid).net_connections("unix"))
        assert num_open < MAX_STRANGERS + 20
        for connection in idle:
            connection.close()


@pytest.mark.skipif(os.getuid() != 0, reason="takes root to become another user")
async def test_another_user_is_hung_up_on() -> None:
    program = (
        "import socket, sys\n"
        "with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:\n"
        "    s.settimeout(20)\n"
        "    s.connect(b'\\0pdmesh-' + sys.argv[1].encode())\n"
        "    try: s.send(bytes.fromhex(sys.argv[2]))\n"
        "    except OSError: pass\n"
        "    try: print(s.recv(64))\n"
        "    except ConnectionResetError: print(b'')\n"
    )
    async with open_victim() as victim, UcxTransport(CONFIG) as attacker:
        victim.say("admit", attacker.address.hex())
        hello = _HELLO.pack(_HELLO_MAGIC, peer_id(attacker.address))
        name = unpack_address(victim.address).local_name.hex()
        done = await anyio.to_thread.run_sync(
            lambda: subprocess.run(
                ["/usr/bin/env", "python3", "-c", program, name, hello.hex()],
                user=65534,
                capture_output=True,
                text=True,
                check=False,
                timeout=30,
            )
        )
        assert (done.stdout, done.stderr) == ("b''\n", "")


async def test_a_port_without_descriptors_waits_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[None] = []

    class Full(socket.socket):
        def accept(self) -> tuple[socket.socket, Any]:
            attempts.append(None)
            if len(attempts) < 3:
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    monkeypatch.setattr(local, "FULL_S", 0.01)
    monkeypatch.setattr(socket, "socket", Full)
    async with UcxTransport(CONFIG) as a, UcxTransport(CONFIG) as b, anyio.create_task_group() as tasks:
        introduce(a, b)

        async def send() -> None:
            async with a.lend() as buffer:
                await a.send(b.address, buffer, 0)

        tasks.start_soon(send)
        (await anext(aiter(b.receive()))).release()
    assert 3 <= len(attempts) < 10


async def test_whatever_a_peer_of_the_mesh_says_in_a_header_is_no_error_of_the_receiver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the right seal: a bug, or a worker that was taken over."""
    monkeypatch.setattr("pdmesh.kv.context.log", Mock())
    rng = random.Random(SEED)
    request, key = RequestId("request"), MeshKey("secret")
    outcomes: list[TransferOutcome] = []

    def kv_mover(transport: UcxTransport, pool: BlockPool) -> KvMover:
        store = ByteStore(SMALL_LAYOUT, 8)
        return KvMover(
            transport=transport, store=store, pool=pool, config=CONFIG, on_outcome=outcomes.append, mesh_token="secret"
        )

    values = [0, 1, 2, 3, 4, 96, 192, 2**16 - 1, 2**32 - 1]
    others = {"kind", "request_key", "epoch", "has_token", "part", "check"}
    numbers = [name for name in PieceHeader._fields if name not in others]

    def span() -> IndexRange:
        return IndexRange(rng.choice([0, 0, 1, 2, 2**16 - 1]), rng.choice([0, 1, 2, 2, 2**16 - 1]))

    async with UcxTransport(CONFIG) as a, UcxTransport(CONFIG) as b:
        introduce(a, b)
        pools = BlockPool(8), BlockPool(8)
        async with kv_mover(a, pools[0]) as sending, kv_mover(b, pools[1]) as receiving:
            for number in range(NUMBER):
                block_ids = pools[1].allocate(2)
                epoch = Epoch(number)
                receiving.arrivals.expect(
                    request,
                    epoch,
                    capability=1,
                    block_ids=block_ids,
                    num_context_tokens=8,
                    source_addresses=(a.address,),
                )
                for _ in range(3):
                    changes: dict[str, Any] = {
                        name: rng.choice(values) % (1 << 16) for name in rng.sample(numbers, rng.randint(0, 4))
                    }
                    payload_bytes = rng.choice(
                        [0, 1, SMALL_LAYOUT.max_page_bytes, 2 * SMALL_LAYOUT.max_page_bytes, 4096]
                    )
                    header = PieceHeader(
                        kind=rng.choice(list(PieceKind)), request_key=request_key(request), epoch=epoch, capability=1
                    )
                    if rng.random() < 0.8:
                        heads = rng.choice([span(), IndexRange(0, SMALL_LAYOUT.num_kv_heads)])
                        changes |= {"part": KvPart(span(), span(), heads), "has_token": rng.random() < 0.5}
                    if rng.random() < 0.3:
                        changes["check"] = rng.randbytes(CHECK_BYTES)
                    async with a.lend() as buffer:
                        pack_header(header._replace(**changes), buffer.header, key)
                        await a.send(b.address, buffer, payload_bytes)
                receiving.cancel(request, epoch)
                pools[1].free(block_ids)
            outcomes.clear()
            await _hand_over(sending, receiving, pools, a, b, outcomes)
            receiving.check_integrity()


async def test_whatever_a_receiver_says_in_a_header_is_no_error_of_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for what it was sent, or was not, gives up, and says that it has everything: in any order."""
    monkeypatch.setattr("pdmesh.kv.context.log", Mock())
    rng = random.Random(SEED)
    request, key = RequestId("request"), MeshKey("secret")
    outcomes: list[TransferOutcome] = []

    def kv_mover(transport: UcxTransport, pool: BlockPool) -> KvMover:
        return KvMover(
            transport=transport,
            store=ByteStore(SMALL_LAYOUT, 8),
            pool=pool,
            config=CONFIG,
            on_outcome=outcomes.append,
            mesh_token="secret",
        )

    def span(most: int) -> IndexRange:
        return IndexRange(rng.choice([0, 0, 1, 2]), rng.choice([1, 2, most, most, 2**16 - 1]))

    async with UcxTransport(CONFIG) as a, UcxTransport(CONFIG) as b:
        introduce(a, b)
        pools = BlockPool(8), BlockPool(8)
        async with kv_mover(a, pools[0]) as sending, kv_mover(b, pools[1]) as receiving:
            for number in range(NUMBER):
                block_ids, epoch = pools[0].allocate(2), Epoch(number)
                sender = sending.departures.offer(request, epoch, block_ids=block_ids, num_context_tokens=8)
                destination = KvDestination(b.address, EVERYTHING)
                sending.departures.grant(request, epoch, destinations=[destination], capability=1)
                for layer in range(rng.randint(0, SMALL_LAYOUT.num_layers)):
                    sender.blocks_ready(chunk=0, layer=layer, first_block=0, num_blocks=2)
                if rng.random() < 0.5:
                    sender.commit(FirstToken(1, 0))
                for _ in range(rng.choice([1, 3, 3, 100])):
                    header = PieceHeader(
                        kind=rng.choice([PieceKind.AGAIN, PieceKind.AGAIN, *PieceKind]),
                        request_key=request_key(request),
                        epoch=epoch,
                        capability=1,
                        destination=rng.choice([0, 0, 0, 1, 2**16 - 1]),
                        source=rng.choice([0, 0, 2**16 - 1]),
                        part=KvPart(span(2), span(SMALL_LAYOUT.num_layers), IndexRange(0, SMALL_LAYOUT.num_kv_heads)),
                    )
                    async with b.lend() as buffer:
                        pack_header(header, buffer.header, key)
                        await b.send(a.address, buffer, 0)
                sending.cancel(request, epoch)
                pools[0].free(block_ids)
                sending.check_integrity()
            outcomes.clear()
            await _hand_over(sending, receiving, pools, a, b, outcomes)


async def _hand_over(
    sending: KvMover,
    receiving: KvMover,
    pools: tuple[BlockPool, BlockPool],
    a: UcxTransport,
    b: UcxTransport,
    outcomes: list[TransferOutcome],
) -> None:
    """An honest transfer lands."""
    request, epoch = RequestId("honest"), Epoch(0)
    tables = pools[0].allocate(2), pools[1].allocate(2)
    receiving.arrivals.expect(
        request, epoch, capability=9, block_ids=tables[1], num_context_tokens=8, source_addresses=(a.address,)
    )
    sender = sending.departures.offer(request, epoch, block_ids=tables[0], num_context_tokens=8)
    sending.departures.grant(request, epoch, destinations=[KvDestination(b.address, EVERYTHING)], capability=9)
    for layer in range(SMALL_LAYOUT.num_layers):
        sender.blocks_ready(chunk=0, layer=layer, first_block=0, num_blocks=2)
    sender.commit(FirstToken(1, 0))
    with anyio.fail_after(20):
        while len(outcomes) < 2:
            await anyio.wait_all_tasks_blocked()
    assert {type(outcome) for outcome in outcomes} == {LandedTransfer, SentTransfer}
