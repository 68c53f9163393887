"""A prompt's KV on its whole way out of an instance, layer by layer, while the prompt is computed.

Real senders and receivers: gather out of the device, checksum, transport, checksum, scatter into another cache on the
same device. *Exposed* is what `pdmesh.kv.outcome.SentTransfer` says: from the end of the step that drew the first token
to the acknowledgement.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial

import anyio

from pdmesh.config import TransferConfig
from pdmesh.engine.base import SequenceSlice
from pdmesh.engine.runner import TorchEngine
from pdmesh.kv.blocks import BlockPool
from pdmesh.kv.granted import KvDestination
from pdmesh.kv.mover import KvMover
from pdmesh.kv.outcome import LandedTransfer, SentTransfer, TransferOutcome
from pdmesh.kv.receiver import FirstToken
from pdmesh.kv.sender import KvSender
from pdmesh.kv.store import KvStore
from pdmesh.model import Epoch
from pdmesh.testing.kv import EVERYTHING
from pdmesh.transport.base import KvTransport
from pdmesh.transport.memory import MemoryFabric, MemoryTransport
from pdmesh.worker.threads import EngineThread

_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class KvOut:
    transport: str
    num_bytes: int
    step_s: float  # with the KV on its way, median
    plain_s: float  # without, median
    exposed_s: float  # median


def device_transfer() -> TransferConfig:
    """The settings of an instance with its KV on a device; through shared memory where UCX is not installed."""
    config = TransferConfig(transport="ucx" if importlib.util.find_spec("ucxx") else "memory")
    return replace(config, max_payload_bytes=config.device_payload_bytes)


async def kv_out(
    engine: TorchEngine, target: KvStore, chunk: SequenceSlice, config: TransferConfig, rounds: int
) -> KvOut:
    """``chunk`` is a whole prompt, whose blocks ``target`` has at least as many of."""
    outcomes_in, outcomes = anyio.create_memory_object_stream[TransferOutcome](16)
    blocks = chunk.sequence.block_table
    layout = engine.kv.layout
    steps: list[float] = []
    plain: list[float] = []
    exposed: list[float] = []
    num_bytes = 0
    async with AsyncExitStack() as stack:
        thread = await stack.enter_async_context(EngineThread())
        transports = await _transports(stack, config)
        sending, receiving = [
            await stack.enter_async_context(
                KvMover(
                    transport=transport,
                    store=store,
                    pool=BlockPool(store.num_blocks),
                    config=config,
                    on_outcome=outcomes_in.send_nowait,
                )
            )
            for transport, store in zip(transports, (engine.kv, target), strict=True)
        ]
        for number in range(rounds + 1):
            plain.append(await thread.run(partial(_step_s, engine, chunk, None)))
            request, epoch = chunk.sequence.request_id, Epoch(number)
            receiving.arrivals.expect(
                request,
                epoch,
                capability=1,
                block_ids=range(len(blocks)),
                num_context_tokens=chunk.num_tokens,
                source_addresses=(transports[0].address,),
            )
            sender = sending.departures.offer(request, epoch, block_ids=blocks, num_context_tokens=chunk.num_tokens)
            sending.departures.grant(
                request, epoch, destinations=[KvDestination(transports[1].address, EVERYTHING)], capability=1
            )
            hook = partial(_layer_ready, sender, len(blocks))
            steps.append(await thread.run(partial(_step_s, engine, chunk, hook)))
            sender.commit(FirstToken(1, 0))
            with anyio.fail_after(_LIMIT_S):
                pair = [await outcomes.receive(), await outcomes.receive()]
            assert {type(outcome) for outcome in pair} == {SentTransfer, LandedTransfer}, pair
            (sent,) = (outcome for outcome in pair if isinstance(outcome, SentTransfer))
            exposed.append(sent.exposed_s)
            num_bytes = sent.num_bytes
    assert num_bytes == len(blocks) * layout.num_layers * layout.block_bytes
    medians = [statistics.median(values[1:]) for values in (steps, plain, exposed)]  # the first round does not count
    return KvOut(config.transport, num_bytes, *medians)


async def _transports(stack: AsyncExitStack, config: TransferConfig) -> list[KvTransport]:
    if config.transport == "ucx":
        from pdmesh.transport.ucx import UcxTransport

        return [await stack.enter_async_context(UcxTransport(config)) for _ in range(2)]
    fabric = MemoryFabric()
    return [await stack.enter_async_context(MemoryTransport(config, fabric)) for _ in range(2)]


def _layer_ready(sender: KvSender, num_blocks: int, layer: int) -> None:
    sender.blocks_ready(chunk=0, layer=layer, first_block=0, num_blocks=num_blocks)


def _step_s(engine: TorchEngine, chunk: SequenceSlice, on_layer: Callable[[int], None] | None) -> float:
    began_s = time.perf_counter()
    engine.execute([chunk], on_layer=on_layer)
    return time.perf_counter() - began_s
