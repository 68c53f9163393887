"""A UCX transport in a process of its own, for tests that stop, kill or overload it.

``python -m pdmesh_testing.ucx_peer [--max-payload-bytes N] [--tls T] [--net-devices D]`` prints its address in hex, and
then reads lines: ``echo ADDRESS`` sends back there whatever arrives from now on, if it can, and prints a line when
pieces from there will be taken (``admit ADDRESS`` does only that); ``flood ADDRESS N`` sends N pieces there at once;
``end``, or the end of its input, ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from functools import partial

import anyio
import anyio.abc
import anyio.to_thread
import structlog

from pdmesh.config import TransferConfig
from pdmesh.errors import KvTransferError
from pdmesh.transport.buffers import HEADER_BYTES
from pdmesh.transport.ucx import UcxTransport


async def _echo(transport: UcxTransport, address: bytes) -> None:
    async for piece in transport.receive():
        async with transport.lend() as buffer:
            piece.load()
            buffer.header[:] = piece.header
            buffer.payload[: len(piece.payload)] = piece.payload
            num_bytes = len(piece.payload)
            piece.release()
            with contextlib.suppress(KvTransferError):
                await transport.send(address, buffer, num_bytes)


async def _send_one(transport: UcxTransport, address: bytes, number: int) -> None:
    async with transport.lend() as buffer:
        buffer.header[:] = (b"%d" % number).ljust(HEADER_BYTES, b"\0")
        with contextlib.suppress(KvTransferError):
            await transport.send(address, buffer, transport.max_payload_bytes)


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def _obey(transport: UcxTransport, tasks: anyio.abc.TaskGroup) -> None:
    while line := await anyio.to_thread.run_sync(sys.stdin.readline):
        command, *arguments = line.split()
        if command == "echo":
            transport.admit(bytes.fromhex(arguments[0]))
            _print("ready")
            tasks.start_soon(_echo, transport, bytes.fromhex(arguments[0]))
        elif command == "admit":
            transport.admit(bytes.fromhex(arguments[0]))
            _print("ready")
        elif command == "flood":
            for number in range(int(arguments[1])):
                tasks.start_soon(_send_one, transport, bytes.fromhex(arguments[0]), number)
        else:
            break
    tasks.cancel_scope.cancel()


async def _serve(config: TransferConfig) -> None:
    async with UcxTransport(config) as transport:
        _print(transport.address.hex())
        async with anyio.create_task_group() as tasks:
            await _obey(transport, tasks)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-payload-bytes", type=int, default=4096)
    parser.add_argument("--tls")
    parser.add_argument("--net-devices", default="")
    options = parser.parse_args()
    # An unread log would fill its pipe.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    config = TransferConfig(
        max_payload_bytes=options.max_payload_bytes,
        ucx_tls=options.tls,
        ucx_net_devices=options.net_devices,
        no_progress_s=0.3,
        network_no_progress_s=2.0,
    )
    anyio.run(partial(_serve, config))


if __name__ == "__main__":
    main()
