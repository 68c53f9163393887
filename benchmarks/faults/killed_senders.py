"""Kill senders in the middle of their pieces, and see whether the receiver lives.

    python -m benchmarks.faults.killed_senders [--kills 200] [--piece-bytes 1048576] [--tls ...]

A process sends pieces to a receiver, as many at once as a transfer does, and is killed with -9 up to ``--within-ms``
after its first one has been taken; every second one has had a piece back before, as a prefill worker has. After each
kill another sender's piece must get through. Counted: receivers that died (and by what), and those that took nothing
more. Each is replaced by a new one. Exits with 1 unless all lived.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import random
import signal
import time
from collections import Counter
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import anyio
import anyio.to_thread

from benchmarks.harness.report import Limits, heading
from pdmesh.config import TransferConfig
from pdmesh.errors import KvTransferError
from pdmesh.kv.lane import PIECES_IN_FLIGHT
from pdmesh.transport.ucx import UcxTransport

#: A piece that gets through does so in less.
DEAF_S = 3.0


async def receive(pipe: Connection, config: TransferConfig) -> None:
    """Take pieces; a piece whose payload begins with an address is answered."""

    async def answer(address: bytes) -> None:
        with contextlib.suppress(KvTransferError):
            async with transport.lend() as buffer:
                await transport.send(address, buffer, 0)

    async def be_told_of_peers() -> None:
        while True:
            transport.admit(await anyio.to_thread.run_sync(pipe.recv, abandon_on_cancel=True))
            pipe.send("admitted")

    async with UcxTransport(config) as transport, anyio.create_task_group() as tasks:
        pipe.send(transport.address)
        tasks.start_soon(be_told_of_peers)
        async for piece in transport.receive():
            if (address_bytes := int.from_bytes(piece.header[:4], "little")) and piece.load():
                tasks.start_soon(answer, bytes(piece.payload[:address_bytes]))
            piece.release()


async def flood(pipe: Connection, config: TransferConfig, destination: bytes, wants_answer: bool) -> None:
    async with UcxTransport(config) as transport, anyio.create_task_group() as tasks:

        async def send_on() -> None:
            while True:
                async with transport.lend() as buffer:
                    buffer.header[:4] = bytes(4)
                    await transport.send(destination, buffer, transport.max_payload_bytes)
                begun.set()

        begun = anyio.Event()
        transport.admit(destination)
        pipe.send(transport.address)
        await anyio.to_thread.run_sync(pipe.recv)  # the receiver knows us
        if wants_answer:
            async with transport.lend() as buffer:
                buffer.header[:4] = len(transport.address).to_bytes(4, "little")
                buffer.payload[: len(transport.address)] = transport.address
                await transport.send(destination, buffer, transport.max_payload_bytes)
            async for piece in transport.receive():
                piece.release()
                break
        for _ in range(PIECES_IN_FLIGHT):
            tasks.start_soon(send_on)
        await begun.wait()
        pipe.send("begun")


def run_side(side: Any, *arguments: Any) -> None:
    anyio.run(partial(side, *arguments), backend_options={"use_uvloop": True})


def start(side: Any, *arguments: Any) -> tuple[Any, Connection]:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_side, args=(side, theirs, *arguments))
    process.start()
    theirs.close()
    return process, ours


def introduce(address: bytes, receiver: Connection) -> None:
    """What the scheduler does before a transfer."""
    with contextlib.suppress(OSError, EOFError):  # it has died: the next piece will tell
        receiver.send(address)
        receiver.recv()


async def kill_senders(config: TransferConfig, num_kills: int, within_s: float, rng: random.Random) -> Counter[str]:
    ends: Counter[str] = Counter()
    left = num_kills
    slowest_s = 0.0
    while left > 0:
        receiver, pipe = start(receive, config)
        address = pipe.recv()
        async with UcxTransport(config) as witness:
            introduce(witness.address, pipe)
            while left > 0:
                left -= 1
                victim, begun = start(flood, config, address, left % 2 == 0)
                introduce(await anyio.to_thread.run_sync(begun.recv), pipe)
                begun.send("go")
                await anyio.to_thread.run_sync(begun.recv)
                await anyio.sleep(rng.uniform(0, within_s))
                victim.kill()
                victim.join()
                began_s = time.monotonic()
                try:
                    async with witness.lend() as buffer:
                        buffer.header[:4] = bytes(4)
                        await witness.send(address, buffer, witness.max_payload_bytes)
                except KvTransferError:
                    await anyio.to_thread.run_sync(receiver.join, 1)
                    code = receiver.exitcode
                    ends["deaf" if code is None else f"died of {signal.Signals(-code).name if code < 0 else code}"] += 1
                    break
                slowest_s = max(slowest_s, time.monotonic() - began_s)
                ends["lived"] += 1
        receiver.kill()
        receiver.join()
    print(f"slowest piece after a kill: {slowest_s * 1e3:.1f} ms")
    return ends


def main() -> None:
    parser = argparse.ArgumentParser(description="Senders killed in the middle of their pieces")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--piece-bytes", type=int, default=1024**2)
    parser.add_argument("--within-ms", type=float, default=5.0)
    parser.add_argument("--tls", help="UCX_TLS")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(heading("Senders killed in the middle of their pieces"), flush=True)
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["pdmesh.transport.ucx", "uvloop", "ucxx._lib.libucxx"]
    )
    config = TransferConfig(
        max_payload_bytes=options.piece_bytes, ucx_tls=options.tls, no_progress_s=DEAF_S, network_no_progress_s=2.0
    )
    rng = random.Random(options.seed)
    ends = anyio.run(kill_senders, config, options.kills, options.within_ms * 1e-3, rng)
    limits = Limits()
    stands = limits.at_least("receivers that lived", ends["lived"], options.kills)
    print(", ".join(f"{end}: {count}" for end, count in ends.most_common()), f"({stands})")
    limits.end()


if __name__ == "__main__":
    main()
