"""KV pieces between two processes of this machine: ours beside UCX's own `ucx_perftest`, in one run.

    python -m benchmarks.speed.kv_transport [--sizes 16384 65536 1048576 16777216] [--megabytes 2048]
        [--tls ...] [--hosts]

For each piece size, best of ``--rounds``, forth and back in turn: ``ucx_perftest -t tag_bw`` (one buffer at each end,
which stays in the processor's cache, and spinning), *one* (our transport with one buffer at each end too: headers,
Python, the event loop, asleep when idle), *ring* (the same with the rings of buffers the mesh uses), *hand-over*
(`KvMover`: gather, checksum, send, check, scatter), *encrypted* (the same with ``transfer.encrypt``), *staged* (the
same through the store of a device, or of one whose memory is the host's: copies on threads and streams of their own,
from and to the transport's buffers, which are pinned where there is a device) and *peer reads* (the same KV, copied
from cache to cache). GB are 10^9 bytes. Behind each figure but perftest's, which spins: seconds of processor time that
sender and receiver take for a GB, which says the most that two idle cores could move. Compare ratios of one run, never
figures of two.

With ``--hosts`` the two are network namespaces on a switch (`pdmesh_testing.hosts`; it takes root): all goes over UCX
with TCP, and no peer reads.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import torch

from benchmarks.harness.report import heading
from pdmesh.config import TransferConfig
from pdmesh.engine.cuda.kv_store import DeviceKvStore
from pdmesh.engine.cuda.streams import CudaStreams
from pdmesh.engine.kv_cache import TorchKvStore
from pdmesh.garbage import rare_collections
from pdmesh.kv.blocks import BlockPool
from pdmesh.kv.lane import PIECES_IN_FLIGHT
from pdmesh.kv.mover import KvMover
from pdmesh.kv.outcome import LandedTransfer, SentTransfer, TransferOutcome
from pdmesh.kv.piece import FirstToken, KvDestination
from pdmesh.kv.store import KvStore
from pdmesh.kv_layout import KvLayout
from pdmesh.model import Epoch, RequestId
from pdmesh.transport.ucx import UcxTransport
from pdmesh_testing.cuda import FakeStreams
from pdmesh_testing.hosts import Host, running_hosts
from pdmesh_testing.kv import EVERYTHING

EPOCH, CAPABILITY = Epoch(0), 1
NUM_LAYERS = 16
SENDERS = PIECES_IN_FLIGHT  # sends under way at once, as in one transfer
OURS = ("one", "ring", "hand-over", "encrypted", "staged")
PEER_READS = "peer reads"

#: Makes the cache of an instance, with so many blocks.
StoreOf = Callable[[KvLayout, int], KvStore]


class Moved(NamedTuple):
    """What one measurement gave."""

    gb_per_s: float
    cpu_s_per_gb: tuple[float, float] | None = None  # of sender and receiver; None: they spin

    def __str__(self) -> str:
        cpu = "" if self.cpu_s_per_gb is None else " {:4.2f}+{:4.2f}".format(*self.cpu_s_per_gb)
        return f"{self.gb_per_s:>6.2f}{cpu}"


class Part(NamedTuple):
    """One side's of a measurement."""

    at_s: float  # the sender's: when it began; the receiver's: when it had everything
    num_bytes: int
    cpu_s: float


class Places(NamedTuple):
    """Where the two processes are; None: on this machine, as it is."""

    sender: Host | None = None
    receiver: Host | None = None


def layout_for(piece_bytes: int) -> KvLayout:
    """Blocks of 64 KiB (8 KV heads of 128, 16 tokens, bf16), or of a piece if that is less."""
    block_bytes = min(piece_bytes, 64 * 1024)
    return KvLayout(
        num_layers=NUM_LAYERS, num_kv_heads=8, head_dim=block_bytes // (2 * 8 * 16 * 2), block_size=16, dtype="bfloat16"
    )


# --- our side, each function in a process of its own -----------------------------------------------------------------


async def send_raw(pipe: Connection, config: TransferConfig, num_pieces: int) -> None:
    async with UcxTransport(config) as transport:
        pipe.send(transport.address)
        destination = await anyio.to_thread.run_sync(pipe.recv)
        left = num_pieces
        began_s, cpu_s = time.monotonic(), time.process_time()

        async def send_some() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                async with transport.lend() as buffer:
                    await transport.send(destination, buffer, transport.max_payload_bytes)

        async with anyio.create_task_group() as tasks:
            for _ in range(min(SENDERS, config.num_send_buffers)):
                tasks.start_soon(send_some)
        pipe.send(Part(began_s, num_pieces * config.max_payload_bytes, time.process_time() - cpu_s))
        await anyio.to_thread.run_sync(pipe.recv)


async def receive_raw(pipe: Connection, config: TransferConfig, num_pieces: int) -> None:
    async with UcxTransport(config) as transport:
        pipe.send(transport.address)
        transport.admit(await anyio.to_thread.run_sync(pipe.recv))
        pipe.send("ready")
        left, cpu_s = num_pieces, time.process_time()
        async for piece in transport.receive():
            piece.load()
            piece.release()
            left -= 1
            if left == 0:
                break
        pipe.send(Part(time.monotonic(), num_pieces * config.max_payload_bytes, time.process_time() - cpu_s))
        await anyio.to_thread.run_sync(pipe.recv)


async def ask(pipe: Connection, config: TransferConfig, num_pieces: int) -> None:
    """Empty pieces one after another, and then there and back."""
    async with UcxTransport(config) as transport:
        pipe.send(transport.address)
        destination = await anyio.to_thread.run_sync(pipe.recv)
        pieces = aiter(transport.receive())

        async def send(word: bytes) -> None:
            async with transport.lend() as buffer:
                buffer.header[:4] = word
                await transport.send(destination, buffer, 0)

        began_s = time.perf_counter()
        for _ in range(num_pieces):
            await send(b"take")
        sent_s = time.perf_counter()
        for _ in range(num_pieces):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(send, b"echo")
                (await anext(pieces)).release()
        pipe.send(((sent_s - began_s) / num_pieces, (time.perf_counter() - sent_s) / num_pieces))
        await send(b"last")
        await anyio.to_thread.run_sync(pipe.recv)


async def answer(pipe: Connection, config: TransferConfig, num_pieces: int) -> None:
    async with UcxTransport(config) as transport:
        pipe.send(transport.address)
        peer = await anyio.to_thread.run_sync(pipe.recv)
        transport.admit(peer)
        pipe.send("ready")
        async for piece in transport.receive():
            word = bytes(piece.header[:4])
            piece.release()
            if word == b"echo":
                async with transport.lend() as buffer:
                    await transport.send(peer, buffer, 0)
            elif word == b"last":
                break
        await anyio.to_thread.run_sync(pipe.recv)


async def send_kv(store_of: StoreOf, pipe: Connection, config: TransferConfig, num_pieces: int) -> None:
    await move(store_of, pipe, config, num_pieces, sending=True)


async def receive_kv(store_of: StoreOf, pipe: Connection, config: TransferConfig, num_pieces: int) -> None:
    await move(store_of, pipe, config, num_pieces, sending=False)


def device_store(layout: KvLayout, num_blocks: int) -> DeviceKvStore:
    """A device's; in host memory where there is no device."""
    if torch.cuda.is_available():
        return DeviceKvStore(layout, num_blocks, CudaStreams(torch.device("cuda", 0)))
    return DeviceKvStore(layout, num_blocks, FakeStreams())


async def move(store_of: StoreOf, pipe: Connection, config: TransferConfig, num_pieces: int, *, sending: bool) -> None:
    """Requests of 16 layers, each layer of four pieces, one after another but for the two under way at once."""
    layout = layout_for(config.max_payload_bytes)
    num_blocks = 4 * config.max_payload_bytes // layout.max_page_bytes
    num_requests = max(2, num_pieces // (4 * NUM_LAYERS))
    pool = BlockPool(num_blocks)
    store = store_of(layout, num_blocks)
    block_ids = pool.allocate(num_blocks)
    for layer in range(NUM_LAYERS):  # memory that was never written would be committed while it is measured
        store.scatter(layer, block_ids, memoryview(bytearray(os.urandom(num_blocks * layout.max_page_bytes))))
    ended, slots = anyio.Semaphore(0), anyio.Semaphore(2)

    def on_outcome(outcome: TransferOutcome) -> None:
        assert isinstance(outcome, SentTransfer | LandedTransfer), outcome
        ended.release()
        slots.release()

    transport = UcxTransport(config)
    mover = KvMover(transport=transport, store=store, pool=pool, config=config, on_outcome=on_outcome)
    async with transport, mover:
        pipe.send(transport.address)
        peer = await anyio.to_thread.run_sync(pipe.recv)
        request_ids = [RequestId(str(number)) for number in range(num_requests)]
        num_context_tokens = num_blocks * layout.block_size
        at_s, cpu_s = 0.0, time.process_time()
        if not sending:
            for request_id in request_ids:
                mover.arrivals.expect(
                    request_id,
                    EPOCH,
                    capability=CAPABILITY,
                    block_ids=block_ids,
                    num_context_tokens=num_context_tokens,
                    source_addresses=(peer,),
                )
            pipe.send("ready")
        else:
            await anyio.to_thread.run_sync(pipe.recv)
            at_s, cpu_s = time.monotonic(), time.process_time()
            for request_id in request_ids:
                await slots.acquire()
                sender = mover.departures.offer(
                    request_id, EPOCH, block_ids=block_ids, num_context_tokens=num_context_tokens
                )
                mover.departures.grant(
                    request_id, EPOCH, destinations=[KvDestination(peer, EVERYTHING)], capability=CAPABILITY
                )
                for layer in range(NUM_LAYERS):
                    sender.blocks_ready(chunk=0, layer=layer, first_block=0, num_blocks=num_blocks)
                sender.commit(FirstToken(0, 0))
        for _ in request_ids:
            await ended.acquire()
        num_bytes = num_requests * NUM_LAYERS * num_blocks * layout.max_page_bytes
        pipe.send(Part(at_s or time.monotonic(), num_bytes, time.process_time() - cpu_s))
        await anyio.to_thread.run_sync(pipe.recv)


def run_side(side: Any, pipe: Connection, config: TransferConfig, num_pieces: int, host: Host | None) -> None:
    with contextlib.nullcontext() if host is None else host.entered(), rare_collections():
        anyio.run(partial(side, pipe, config, num_pieces), backend_options={"use_uvloop": True})


@contextlib.contextmanager
def two_processes(
    sender: Any, receiver: Any, config: TransferConfig, num_pieces: int, places: Places
) -> Iterator[tuple[Any, Any]]:
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    for side, host in ((sender, places.sender), (receiver, places.receiver)):
        ours, theirs = context.Pipe()
        process = context.Process(target=run_side, args=(side, theirs, config, num_pieces, host))
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    try:
        yield pipes[0], pipes[1]
    finally:
        for pipe in pipes:
            with contextlib.suppress(OSError):
                pipe.send("end")
        for process in processes:
            process.join(20)
            if process.exitcode is None:
                process.kill()


def introduce(sender: Connection, receiver: Connection) -> None:
    receiver.send(sender.recv())
    address = receiver.recv()
    assert receiver.recv() == "ready"
    sender.send(address)


def moved(sender: Connection, receiver: Connection) -> Moved:
    """What the two say at their ends."""
    sent, received = sender.recv(), receiver.recv()
    gb = received.num_bytes / 1e9
    return Moved(gb / (received.at_s - sent.at_s), (sent.cpu_s / gb, received.cpu_s / gb))


def measure_raw(config: TransferConfig, num_pieces: int, places: Places) -> Moved:
    with two_processes(send_raw, receive_raw, config, num_pieces, places) as (sender, receiver):
        introduce(sender, receiver)
        return moved(sender, receiver)


def measure_empty(config: TransferConfig, num_pieces: int, places: Places) -> tuple[float, float]:
    """Seconds that the send of an empty piece takes, and that one takes there and back."""
    with two_processes(ask, answer, config, num_pieces, places) as (asker, answerer):
        introduce(asker, answerer)
        sending_s, round_trip_s = asker.recv()
        return sending_s, round_trip_s


def measure_handover(
    config: TransferConfig, num_pieces: int, places: Places, store_of: StoreOf = TorchKvStore
) -> Moved:
    sides = partial(send_kv, store_of), partial(receive_kv, store_of)
    with two_processes(*sides, config, num_pieces, places) as (sender, receiver):
        sender_address, receiver_address = sender.recv(), receiver.recv()
        receiver.send(sender_address)
        assert receiver.recv() == "ready"
        sender.send(receiver_address)
        sender.send("go")
        return moved(sender, receiver)


# --- UCX's own --------------------------------------------------------------------------------------------------------


def measure_perftest(piece_bytes: int, num_pieces: int, tls: str | None, places: Places) -> Moved:
    """Bandwidth that ``ucx_perftest -t tag_bw`` reports, GB/s."""
    spec = find_spec("libucx")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    environment = {**os.environ, "LD_LIBRARY_PATH": str(root / "lib")}
    if tls is not None:
        environment["UCX_TLS"] = tls
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    address, size, number = "127.0.0.1", str(piece_bytes), str(num_pieces)
    if places.receiver is not None:
        address, environment["UCX_NET_DEVICES"], environment["UCX_TLS"] = places.receiver.address, "eth0", "tcp"
    command = [str(root / "bin" / "ucx_perftest"), "-p", port]
    with subprocess.Popen(
        [*inside(places.receiver), *command],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as server:
        try:
            while True:
                client = subprocess.run(
                    [
                        *inside(places.sender),
                        *command,
                        address,
                        "-t",
                        "tag_bw",
                        "-f",
                        "-s",
                        size,
                        "-n",
                        number,
                    ],
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=120,
                )
                if client.returncode == 0:
                    numbers = re.findall(r"[\d.]+", client.stdout.strip().splitlines()[-1])
                    return Moved(float(numbers[5]) * 2**20 / 1e9)  # its MB are MiB
                time.sleep(0.1)  # the server is not listening yet
        finally:
            server.kill()


def inside(host: Host | None) -> list[str]:
    """What a command on a host begins with."""
    return [] if host is None else host.command([])


def main() -> None:
    parser = argparse.ArgumentParser(description="KV pieces between two processes, beside ucx_perftest")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[16 * 1024, 64 * 1024, 128 * 1024, 1024**2, 4 * 1024**2, 16 * 1024**2]
    )
    parser.add_argument("--megabytes", type=int, default=2048, help="moved per measurement")
    parser.add_argument("--rounds", type=int, default=3, help="the best of so many, alternating")
    parser.add_argument("--tls", help="UCX_TLS for all three")
    parser.add_argument("--hosts", action="store_true", help="the two processes are on two hosts")
    options = parser.parse_args()
    print(heading("KV pieces between two processes"))
    with contextlib.ExitStack() as stack:
        places, base = Places(), TransferConfig(ucx_tls=options.tls)
        if options.hosts:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            hosts = stack.enter_context(running_hosts(folder, ("a", "b")))
            places = places._replace(sender=hosts["a"], receiver=hosts["b"])
            base = replace(base, ucx_net_devices="eth0", trusted_network=True)
        compare(options, base, places)


def compare(options: argparse.Namespace, base: TransferConfig, places: Places) -> None:
    """Print a line for each size of pieces."""
    names = OURS if options.hosts else (*OURS, PEER_READS)
    empty = [measure_empty(base, 2000, places) for _ in range(options.rounds)]
    sending_us, round_trip_us = (min(times) * 1e6 for times in zip(*empty, strict=True))
    print(f"an empty piece: sent and taken in {sending_us:.0f} µs, there and back in {round_trip_us:.0f} µs")
    print(f"{'piece':>10} {'perftest':>8}" + "".join(f" {name:>16} ratio" for name in names) + "   (GB/s, CPU s/GB)")
    for size in options.sizes:
        num_pieces = min(20_000, max(64, options.megabytes * 1_000_000 // size))
        config = replace(base, max_payload_bytes=size, peer_reads=False)
        single = replace(config, num_send_buffers=1, num_receive_buffers=1)
        ways: list[Callable[[], Moved]] = [
            partial(measure_perftest, size, num_pieces, options.tls, places),
            partial(measure_raw, single, num_pieces, places),
            partial(measure_raw, config, num_pieces, places),
            partial(measure_handover, config, num_pieces, places),
            partial(measure_handover, replace(config, encrypt=True), num_pieces, places),
            partial(measure_handover, config, num_pieces, places, device_store),
        ]
        if PEER_READS in names:
            ways.append(partial(measure_handover, replace(config, peer_reads=True), num_pieces, places))
        best = [Moved(0.0)] * len(ways)
        for number in range(options.rounds):
            for index in range(len(ways))[:: -1 if number % 2 else 1]:
                best[index] = max(best[index], ways[index]())
        perftest, *ours = best
        ratios = "".join(f" {each!s:>16} {each.gb_per_s / perftest.gb_per_s:>5.0%}" for each in ours)
        print(f"{size:>10} {perftest!s:>8}{ratios}   load {os.getloadavg()[0]:.0f}", flush=True)


if __name__ == "__main__":
    main()
