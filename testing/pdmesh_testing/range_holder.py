"""A process that holds the first range of contexts, for an owner in another process that times spread contexts.

Weights and KV are random. The process is `python -m pdmesh_testing.range_holder MODEL RANGE_TOKENS`. A line of its
standard input names a request and its owner's data address; an empty one asks for the CPU time so far.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import anyio
import anyio.to_thread
import structlog

from pdmesh.config import TransferConfig
from pdmesh.engine.base import SequenceSlice
from pdmesh.engine.runner import TorchEngine
from pdmesh.kv.blocks import BlockPool
from pdmesh.kv.mover import KvMover
from pdmesh.kv.spread import PartHolder, SpreadKv
from pdmesh.model import Epoch, RequestId
from pdmesh.transport.ucx import UcxTransport
from pdmesh.worker.threads import EngineThread
from pdmesh_testing.stepping import new_sequence

_BLOCK, _EPOCH, _CAPABILITY = 16, Epoch(1), 0x5EED


def random_engine(model: Path, num_tokens: int, range_tokens: int) -> TorchEngine:
    """Return an engine of one thread with room for a context. Its cache is full of random numbers."""
    engine = TorchEngine(
        model,
        num_blocks=num_tokens // _BLOCK + 8,
        block_size=_BLOCK,
        num_threads=1,
        has_random_weights=True,
        range_tokens=range_tokens,
    )
    for cache in engine.kv.layers:
        cache.normal_(std=0.5)
    return engine


@dataclass(frozen=True, slots=True)
class RangeDataPlane:
    """What an instance has beside its engine."""

    transport: UcxTransport
    mover: KvMover
    thread: EngineThread


@asynccontextmanager
async def data_plane(engine: TorchEngine) -> AsyncIterator[RangeDataPlane]:
    config = TransferConfig()
    async with EngineThread() as thread, UcxTransport(config) as transport:
        mover = KvMover(
            transport=transport,
            store=engine.kv,
            pool=BlockPool(engine.kv.num_blocks),
            config=config,
            on_outcome=print,
            attend_part=engine.attend_part,
            wakeup=thread.wakeup,
        )
        async with mover:
            yield RangeDataPlane(transport, mover, thread)


def decode(engine: TorchEngine, length: int, kv: SpreadKv | None = None) -> list[float]:
    """Decode the last of ``length`` tokens, of which ``kv`` has the first. Return each layer's seconds."""
    num_here = length - (0 if kv is None else kv.num_tokens)
    sequence = new_sequence([7] * length, range(-(-num_here // _BLOCK)))
    sequence.elsewhere = kv
    part = SequenceSlice(sequence=sequence, start=length - 1, num_tokens=1, sample=True)
    times_s = [time.perf_counter()]
    engine.execute([part], on_layer=lambda _: times_s.append(time.perf_counter()))
    return [after - before for before, after in pairwise([*times_s, time.perf_counter()])]


def _tell(**told: object) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


async def _hold(model: Path, range_tokens: int) -> None:
    async with data_plane(random_engine(model, range_tokens, range_tokens)) as plane:
        _tell(address=plane.transport.address.hex())
        while line := await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            if said := json.loads(line):
                request_id, owner = RequestId(said["request"]), bytes.fromhex(said["owner"])
                plane.mover.parts.hold(
                    request_id,
                    _EPOCH,
                    capability=_CAPABILITY,
                    block_ids=range(range_tokens // _BLOCK),
                    home_address=owner,
                    member=0,
                )
                plane.mover.parts.landed(request_id, _EPOCH)
            _tell(cpu_s=time.process_time())


@dataclass(slots=True)
class RangeHolder:
    """The process, as its owner sees it."""

    process: subprocess.Popen[str]
    range_tokens: int
    address: bytes = b""

    async def cpu_s(self) -> float:
        cpu_s: float = (await anyio.to_thread.run_sync(self._say, {}))["cpu_s"]
        return cpu_s

    async def hold(self, name: str, owner: RangeDataPlane) -> SpreadKv:
        """Let the process hold a context's first range, and ``owner`` the rest."""
        await anyio.to_thread.run_sync(self._say, {"request": name, "owner": owner.transport.address.hex()})
        members = [PartHolder(self.address, _CAPABILITY)]
        return owner.mover.parts.open(RequestId(name), _EPOCH, members=members, num_tokens=self.range_tokens)

    def _say(self, said: dict[str, str]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(said) + "\n")
        self.process.stdin.flush()
        return self.hear()

    def hear(self) -> dict[str, Any]:
        stdout: IO[str] | None = self.process.stdout
        assert stdout is not None
        for line in stdout:
            if line.startswith("{"):
                return json.loads(line)  # type: ignore[no-any-return]
        raise RuntimeError("the holder has ended")


@contextmanager
def range_holder(model: Path, range_tokens: int) -> Iterator[RangeHolder]:
    command = [sys.executable, "-m", "pdmesh_testing.range_holder", str(model), str(range_tokens)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        holder = RangeHolder(process, range_tokens)
        try:
            holder.address = bytes.fromhex(holder.hear()["address"])
            yield holder
        finally:
            process.stdin.close()  # type: ignore[union-attr]  # it is a pipe
            process.wait(30)


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    anyio.run(_hold, Path(sys.argv[1]), int(sys.argv[2]))
