"""KV that one member of a prefill group passes on to another one on this host: in pieces, and by peer reads, in turn.

    python benchmarks/kv_exchange.py [--tokens 16384] [--chunk-tokens 1024] [--rounds 7] [--at-once]

Two processes with a cache of 16 layers of 32 KiB blocks (8 KV heads of 64, 16 tokens, bf16). One publishes a prompt's
KV, chunk by chunk and layer by layer, as if it computed in no time; a round ends when the other one has all of it.
Medians of the rounds after the first, of GB (10^9 bytes) a second and of the processor's time that both processes spend
for each. ``--at-once`` passes each layer on by itself, as of the parallel step that ends a prompt. Compare ratios of
one run, never figures of two.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import NamedTuple

import anyio
import anyio.to_thread
from report import heading

from pdmesh.config import TransferConfig
from pdmesh.engine.kv_cache import TorchKvStore
from pdmesh.kv.blocks import BlockPool
from pdmesh.kv.exchange import KvExchange
from pdmesh.kv.gate import Urgent, Wakeup
from pdmesh.kv.mover import KvMover
from pdmesh.kv.pages import Blocks
from pdmesh.model import Epoch, KvLayout, RequestId
from pdmesh.policy.pacing import ChunkPace
from pdmesh.transport.ucx import UcxTransport

LAYOUT = KvLayout(num_layers=16, num_kv_heads=8, head_dim=64, block_size=16, dtype="bfloat16")
REQUEST, CAPABILITY = RequestId("prompt"), 1
NEVER = Urgent(lambda: False, lambda: None)


@dataclass(frozen=True, slots=True)
class Load:
    """What is passed on in each round."""

    num_tokens: int
    chunk_tokens: int
    rounds: int
    pace: ChunkPace

    @property
    def num_blocks(self) -> int:
        return self.num_tokens // LAYOUT.block_size

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * LAYOUT.num_layers * LAYOUT.block_bytes


class Side(NamedTuple):
    """One process of a round."""

    began_s: float
    ended_s: float
    cpu_s: float


def publish(exchange: KvExchange, load: Load) -> None:
    """On a thread, as an engine does."""
    chunk_blocks = load.chunk_tokens // LAYOUT.block_size
    for first in range(0, load.num_blocks, chunk_blocks):
        num_blocks = min(chunk_blocks, load.num_blocks - first)
        for layer in range(LAYOUT.num_layers):
            exchange.publish(Blocks(0, layer, first, num_blocks), load.pace)


async def take_part(pipe: Connection, number: int, load: Load) -> None:
    """A member: number 1 computes, number 0 waits."""
    async with AsyncExitStack() as stack:
        transport = await stack.enter_async_context(UcxTransport(TransferConfig()))
        pipe.send(transport.address)
        addresses = await anyio.to_thread.run_sync(pipe.recv)
        store, pool = TorchKvStore(LAYOUT, load.num_blocks), BlockPool(load.num_blocks)
        for pages in store.layers:
            pages.fill_(number)
        peer_reads = await anyio.to_thread.run_sync(pipe.recv)
        config = replace(TransferConfig(), peer_reads=peer_reads)
        mover = KvMover(transport=transport, store=store, pool=pool, config=config, on_outcome=print)
        await stack.enter_async_context(mover)
        for epoch in range(load.rounds):
            block_ids = pool.allocate(load.num_blocks)
            exchange = mover.groups.open(
                REQUEST, Epoch(epoch), capability=CAPABILITY, block_ids=block_ids, wakeup=Wakeup()
            )
            mover.groups.set_members(REQUEST, Epoch(epoch), number, addresses)
            if number == 1:
                assert exchange.begin(0, load.num_blocks)
            pipe.send("ready")
            await anyio.to_thread.run_sync(pipe.recv)
            cpu_s, began_s = time.process_time(), time.monotonic()
            if number == 1:
                await anyio.to_thread.run_sync(publish, exchange, load)
                ended_s = time.monotonic()
                await anyio.to_thread.run_sync(pipe.recv)
            else:
                for layer in range(LAYOUT.num_layers):
                    await anyio.to_thread.run_sync(exchange.gate.wait, layer, load.num_blocks, NEVER, 1)
                ended_s = time.monotonic()
            pipe.send(Side(began_s, ended_s, time.process_time() - cpu_s))
            mover.cancel(REQUEST, Epoch(epoch))
            pool.free(block_ids)
        if number == 0:
            counters = mover.counters()
            num_bytes = counters.num_bytes_exchanged.received
            assert num_bytes == load.rounds * load.num_bytes
            assert counters.num_bytes_peer_read == (num_bytes if peer_reads else 0)


def run_member(pipe: Connection, number: int, load: Load) -> None:
    anyio.run(partial(take_part, pipe, number, load), backend_options={"use_uvloop": True})


class Pair:
    """Two members in processes of their own."""

    def __init__(self, load: Load, *, peer_reads: bool) -> None:
        context = multiprocessing.get_context("spawn")
        ends = [context.Pipe() for _ in range(2)]
        self._pipes = [ours for ours, _ in ends]
        self._processes = [
            context.Process(target=run_member, args=(theirs, number, load)) for number, (_, theirs) in enumerate(ends)
        ]
        for process in self._processes:
            process.start()
        addresses = [pipe.recv() for pipe in self._pipes]
        for pipe in self._pipes:
            pipe.send(addresses)
            pipe.send(peer_reads)

    def round(self) -> tuple[float, float]:
        """(seconds, processor's seconds of both) until the one has what the other one published."""
        reader, owner = self._pipes
        for pipe in self._pipes:
            pipe.recv()
        time.sleep(0.1)  # they greet each other
        for pipe in self._pipes:
            pipe.send("go")
        read: Side = reader.recv()
        owner.send("it is there")
        owned: Side = owner.recv()
        return read.ended_s - owned.began_s, read.cpu_s + owned.cpu_s

    def join(self) -> None:
        for process in self._processes:
            process.join()


def summary(rounds: Sequence[tuple[float, float]], load: Load) -> str:
    gigabytes = load.num_bytes / 1e9
    rates = sorted(gigabytes / seconds for seconds, _ in rounds[1:])
    cpu = sorted(cpu_s / gigabytes for _, cpu_s in rounds[1:])
    return (
        f"{statistics.median(rates):5.2f} GB/s ({rates[0]:.2f} to {rates[-1]:.2f}), "
        f"{1e3 * statistics.median(cpu):4.0f} ms of CPU a GB ({1e3 * cpu[0]:.0f} to {1e3 * cpu[-1]:.0f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--chunk-tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--at-once", action="store_true")
    options = parser.parse_args()
    pace = ChunkPace.AT_ONCE if options.at_once else ChunkPace.IN_TURN
    load = Load(options.tokens, options.chunk_tokens, options.rounds, pace)
    print(heading("KV passed on within a host"))
    pairs = {peer_reads: Pair(load, peer_reads=peer_reads) for peer_reads in (False, True)}
    found: dict[bool, list[tuple[float, float]]] = {peer_reads: [] for peer_reads in pairs}
    for _ in range(load.rounds):
        for peer_reads, pair in pairs.items():
            found[peer_reads].append(pair.round())
    for peer_reads, pair in pairs.items():
        pair.join()
        print(f"{'peer reads' if peer_reads else 'in pieces':10}", summary(found[peer_reads], load))


if __name__ == "__main__":
    main()
