"""How much of KV's way from one process to another prefill hides on a GPU: `python -m benchmarks.gpu.kv_gpu`.

Llama-3-8B's shape in bf16 with random weights, 1P+1D as two processes on the one device: KV by peer reads, then in
pieces, as it travels between hosts: from the device into pinned memory, checked, read by the other process, checked,
and back onto the device. Besides, what bounds pieces on this machine, one thread each: the copies from and to a device
at the offset that a payload has in its buffer, the checksum, and the read of another process's memory.

    python -m benchmarks.gpu.kv_gpu [--only pieces] [--tokens 2048 8192 32768] [--repeats 5] [--shape tiny]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.mesh_gpu import (
    SHAPES,
    System,
    device_line,
    exposed_shares,
    print_logs,
    serving,
    warm_up,
    write_model,
)
from benchmarks.harness.report import Limits, heading, unavailable
from benchmarks.speed.kv_transport import Places, device_store, measure_handover
from pdmesh.config import TransferConfig
from pdmesh.transport.buffers import PieceBuffer, allocate_buffers
from pdmesh.transport.prefix import PREFIX_BYTES
from pdmesh.transport.reading import allow_readers, read_memory
from pdmesh.transport.seal import MeshKey

EXPOSED_LIMIT = 0.03  # of the prefill's time
EXPOSED_TOKENS = (2048, 8192, 32_768)
PIECE_BYTES = TransferConfig().device_payload_bytes
NUM_PIECES = 512  # of transfers alone: 2 GiB

SYSTEMS = {
    "peer reads": System(1, 1, 0),
    "pieces": System(1, 1, 0, {"TRANSFER_PEER_READS": "false"}),
    "encrypted": System(1, 1, 0, {"TRANSFER_PEER_READS": "false", "TRANSFER_ENCRYPT": "true"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS), metavar="WAY")
    parser.add_argument("--tokens", type=int, nargs="+", default=EXPOSED_TOKENS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gap", type=float, default=2.5, help="seconds from one prompt to the next")
    parser.add_argument("--no-bounds", action="store_true", help="only what prefill does not hide")
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3-8b", help="tiny: for a trial without a GPU")
    options = parser.parse_args()
    shape, kv_gib = SHAPES[options.shape]
    device = device_line()
    print(heading(f"KV that prefill does not hide, two processes on one GPU: {options.shape} bf16, random weights"))
    if device is None and options.shape != "tiny":
        unavailable("there is no CUDA device here")
    print(f"{device}; medians of {options.repeats}")
    if not options.no_bounds:
        print_bounds()
        print_transfers()
    shape = replace(shape, max_position_embeddings=max(options.tokens) + 1024)
    limits = Limits()
    with tempfile.TemporaryDirectory() as name:
        model = write_model(Path(name, "model"), shape)
        for way in options.only:
            folder = Path(name, way.replace(" ", "-"))
            began_s = time.perf_counter()
            try:
                with serving(SYSTEMS[way], model, folder, int(kv_gib * 2**30)) as mesh:
                    print(f"{way}: serves after {time.perf_counter() - began_s:.0f} s")
                    warm_up(mesh, max(options.tokens))
                    shares = exposed_shares(mesh, options.tokens, options.repeats, options.gap)
                    mesh.wait_until_idle(60)
            except Exception as error:  # the other ways' figures are worth having
                print(f"{way}: failed: {type(error).__name__}: {str(error)[:500]}")
                print_logs(folder)
                limits.at_most(f"failures of {way}", 1, 0.5)
                continue
            for num_tokens, share in shares.items():
                stands = limits.at_most(f"{way}: exposed KV of {num_tokens} tokens", share, EXPOSED_LIMIT)
                print(f"{way}: KV of {num_tokens} tokens exposed for {share:.2%} of its prefill ({stands} of 3%)")
    limits.end()


def print_transfers() -> None:
    """Rates of transfers alone, without a model."""
    config = TransferConfig(max_payload_bytes=PIECE_BYTES, peer_reads=False)
    for name, each in (("pieces", config), ("encrypted", replace(config, encrypt=True))):
        moved = max(measure_handover(each, NUM_PIECES, Places(), device_store) for _ in range(2))
        print(f"transfers alone, {name}: GB/s, CPU s a GB of sender + receiver: {moved}")


def print_bounds() -> None:
    """Rates of what a piece goes through, of one thread each."""
    payload, into = (pinned_if_can(allocate_buffers(1, PIECE_BYTES, PREFIX_BYTES)[0]) for _ in range(2))
    key = MeshKey("any")
    print(f"one thread, pieces of {PIECE_BYTES >> 20} MiB, GB/s:")
    print(f"  checksum {rate(lambda: key.close_payload(payload.payload)):.1f}")
    print(f"  read of another process's memory {read_rate(into):.1f}")
    if torch.cuda.is_available():
        on_device = torch.zeros(PIECE_BYTES, dtype=torch.uint8, device="cuda")
        on_host = torch.frombuffer(payload.payload, dtype=torch.uint8)
        aligned = torch.frombuffer(payload.memory, dtype=torch.uint8)[:PIECE_BYTES]
        print(f"  from the device {rate(lambda: copy(on_device, on_host)):.1f}, to a page's beginning"
              f" {rate(lambda: copy(on_device, aligned)):.1f}")  # fmt: skip
        print(f"  to the device {rate(lambda: copy(on_host, on_device)):.1f}, from a page's beginning"
              f" {rate(lambda: copy(aligned, on_device)):.1f}")  # fmt: skip


def pinned_if_can(buffer: PieceBuffer) -> PieceBuffer:
    if torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(runtime.cudaHostRegister(buffer.address, buffer.memory.nbytes, 0))
    return buffer


def copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
    torch.cuda.current_stream().synchronize()


def rate(act: Callable[[], object], num_bytes: int = PIECE_BYTES) -> float:
    """GB/s: the median of a few dozen."""
    return num_bytes / statistics.median(seconds(act) for _ in range(50)) / 1e9


def seconds(act: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    act()
    return time.perf_counter() - began_s


def read_rate(into: PieceBuffer) -> float:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=own_memory, args=(theirs,), daemon=True)
    process.start()
    pid, address = ours.recv()
    try:
        return rate(lambda: read_memory(pid, address, PIECE_BYTES, into.address))
    finally:
        ours.send("end")
        process.join()


def own_memory(pipe: Connection) -> None:
    """Hold a buffer until told to end."""
    allow_readers()
    buffer = pinned_if_can(allocate_buffers(1, PIECE_BYTES, PREFIX_BYTES)[0])
    pipe.send((os.getpid(), buffer.address))
    pipe.recv()


if __name__ == "__main__":
    main()
