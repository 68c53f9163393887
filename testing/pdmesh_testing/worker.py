"""Instances without processes and sockets, for tests: the real runtime, its reports and tokens kept in lists."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import anyio
import msgspec

from pdmesh.config import TransferConfig
from pdmesh.core.commands import (
    AdmitPrefill,
    ExpectCopy,
    FreeKv,
    Hold,
    RunStep,
    SendCopy,
    Stop,
    StopCopy,
)
from pdmesh.core.events import CacheReported, InstanceEvent, TransferOffered
from pdmesh.engine.base import Engine
from pdmesh.kv.blocks import BlockPool
from pdmesh.kv.gate import Wakeup
from pdmesh.kv.mover import KvMover
from pdmesh.kv.offload.tier import OffloadTier
from pdmesh.kv.outcome import TransferOutcome
from pdmesh.kv.store import KvStore
from pdmesh.kv_layout import GRANULE_TOKENS, IndexRange, KvLayout, KvPart, blocks_of_granule, num_blocks_for
from pdmesh.model import Epoch, GatewayId, InstanceId, PrefixHashes, RequestId, Role, SamplingParams, TransferId
from pdmesh.plans import ChunkPlan, Evictions, KvShard, StepPlan, TransferPlan
from pdmesh.prefixes import PrefixHasher
from pdmesh.telemetry.tracing import Tracing
from pdmesh.transport.kv_transport import KvTransport
from pdmesh.wire.messages import (
    Generation,
    PeersHere,
    Prompt,
    TokenMessage,
    TokenOut,
    pack_token_ids,
)
from pdmesh.worker.drafts import Drafter
from pdmesh.worker.instance import Instance
from pdmesh.worker.steps import run_steps
from pdmesh.worker.threads import EngineThread
from pdmesh.worker.worker_metrics import WorkerMetrics

T = TypeVar("T")

#: Makes the offload tier of an instance. The last argument is called with lost granules.
TierOf = Callable[[KvStore, BlockPool, Wakeup, Callable[[PrefixHashes], object]], OffloadTier]

CAPABILITY = 0x5EC12E7
WAIT_LIMIT_S = 60.0

#: Of the mesh that instances are in.
HASHER = PrefixHasher("")

#: Where KV that moves goes, by name.
DECODE_INSTANCE = InstanceId("decode")


@dataclass(slots=True, eq=False)
class RunningInstance:
    """An instance with its step loop, and all that it has said so far."""

    engine: Engine
    pool: BlockPool
    mover: KvMover
    address: bytes
    tier: OffloadTier | None = None
    instance: Instance = field(init=False)
    reports: list[InstanceEvent] = field(default_factory=list[InstanceEvent])
    tokens: list[TokenMessage] = field(default_factory=list[TokenMessage])
    failure: Exception | None = None
    told_to_stop: anyio.Event = field(default_factory=anyio.Event)
    _plan_ids: itertools.count[int] = field(default_factory=itertools.count)
    _said: anyio.Event = field(default_factory=anyio.Event)
    #: The same, looked up after each thing that is said: of a kind and a request, of a request and an epoch.
    _reports: dict[tuple[type, str], list[InstanceEvent]] = field(default_factory=lambda: defaultdict(list))
    _tokens: dict[tuple[str, int], list[TokenOut]] = field(default_factory=lambda: defaultdict(list))

    def report(self, message: InstanceEvent) -> None:
        self.reports.append(message)
        self._reports[type(message), getattr(message, "request_id", "")].append(message)
        self.notify()

    def open(self, address: str, gateway_id: GatewayId) -> None:
        """`pdmesh.worker.replies.TokenSink`."""

    def send(self, address: str, gateway_id: GatewayId, message: TokenMessage) -> None:
        self.tokens.append(message)
        if isinstance(message, TokenOut):
            self._tokens[message.request_id, message.epoch].append(message)
        self.notify()

    def notify(self) -> None:
        self._said.set()
        self._said = anyio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something that is said or freed makes ``condition`` true."""
        with anyio.fail_after(WAIT_LIMIT_S):
            while not condition():
                await self._said.wait()

    async def reported(self, kind: type[T], request_id: str, *, count: int = 1) -> T:
        """Wait for the request's report of this kind and return the latest."""
        await self.until(lambda: len(self.reports_of(kind, request_id)) >= count)
        return self.reports_of(kind, request_id)[-1]

    def reports_of(self, kind: type[T], request_id: str) -> list[T]:
        return [report for report in self._reports.get((kind, request_id), ()) if isinstance(report, kind)]

    def tokens_of(self, request_id: str, epoch: int = 0) -> list[TokenOut]:
        return list(self._tokens.get((request_id, epoch), ()))

    def admit(
        self,
        generation: Generation,
        *,
        kv_moves: bool,
        num_blocks: int | None = None,
        awaits_receiver: bool = False,
        num_reused: int = 0,
        num_loaded: int = 0,
        drop: PrefixHashes = (),
        offload: PrefixHashes = (),
        evict: PrefixHashes = (),
        states: tuple[int, ...] = (),
        evicted_states: PrefixHashes = (),
    ) -> None:
        """Admit a request with room for all of it, or with ``num_blocks``.

        ``awaits_receiver``: no receiver is known yet.
        The first ``num_reused`` granules are reused, the last ``num_loaded`` of them from the tier. Granules to
        ``drop``, ``offload`` and ``evict`` make room before. The ``states`` with these numbers are cached.
        """
        num_cached = 0 if kv_moves else generation.max_tokens_left - 1
        shard = self.shard(num_blocks or num_blocks_for(generation.num_tokens + num_cached, self.block_size))
        command = AdmitPrefill(
            instance_id=self.instance.instance_id,
            request_id=generation.request_id,
            epoch=generation.epoch,
            shards=(shard,),
            transfer=a_transfer(shard, a_shard(DECODE_INSTANCE, 1)) if kv_moves and not awaits_receiver else None,
            awaits_receiver=awaits_receiver,
            num_reused_granules=num_reused,
            num_loaded_granules=num_loaded,
            room=Evictions(drop=drop, offload=offload, evict=evict, states=evicted_states),
            states=states,
        )
        self.instance.handle(command, prompt_of(self._hashed_for_own_weights(generation)))

    def _hashed_for_own_weights(self, generation: Generation) -> Generation:
        """Return a request whose prefix hashes stand for KV of this instance's weights, as a gateway's do."""
        return msgspec.structs.replace(generation, prefix_weights=self.engine.weights)

    def expect(
        self,
        generation: Generation,
        source: RunningInstance,
        *,
        with_tokens: bool = False,
        number: int = 1,
        num_reused: int = 0,
    ) -> None:
        num_tokens = generation.num_tokens
        generation = self._hashed_for_own_weights(generation)
        bare = generation if with_tokens else msgspec.structs.replace(generation, token_ids=b"")
        has_tail = bool(generation.prefix_root) and not with_tokens
        num_blocks = num_blocks_for(num_tokens + generation.max_tokens_left - 1, self.block_size)
        sent = source.shard(num_blocks_for(num_tokens, self.block_size))
        command = ExpectCopy(
            instance_id=self.instance.instance_id,
            request_id=generation.request_id,
            epoch=generation.epoch,
            transfer=a_transfer(sent, self.shard(num_blocks), number, num_reused),
        )
        introduce(source, self)
        tail = generation.token_ids[4 * GRANULE_TOKENS * len(generation.prefix) :] if has_tail else b""
        self.instance.handle(command, Prompt(generation=bare, num_context_tokens=num_tokens, tail=tail))

    def run(
        self,
        chunks: Iterable[ChunkPlan],
        *,
        with_decodes: bool = False,
        holds_decodes: bool = False,
        in_parallel: bool = False,
        at_once: bool = False,
    ) -> int:
        """Queue one plan and return its id."""
        plan_id = next(self._plan_ids)
        plan = StepPlan(
            plan_id=plan_id,
            chunks=tuple(chunks),
            with_decodes=with_decodes,
            holds_decodes=holds_decodes,
            in_parallel=in_parallel,
            at_once=at_once,
        )
        self.instance.handle(RunStep(instance_id=self.instance.instance_id, plan=plan))
        return plan_id

    def grant(
        self, generation: Generation, destination: RunningInstance, *, number: int = 1, num_reused: int = 0
    ) -> None:
        num_blocks = num_blocks_for(generation.num_tokens, self.block_size)
        command = SendCopy(
            instance_id=self.instance.instance_id,
            request_id=generation.request_id,
            epoch=generation.epoch,
            transfer=a_transfer(self.shard(num_blocks), destination.shard(num_blocks), number, num_reused),
        )
        introduce(self, destination)
        self.instance.handle(command)

    def move(
        self,
        request_id: str,
        target: RunningInstance,
        num_blocks: int,
        *,
        number: int = 2,
        epoch: int = 0,
        chain: PrefixHashes = (),
        num_reused: int = 0,
    ) -> None:
        """Send both sides of a move to ``target`` the commands of a scheduler; ``number`` names the move."""
        plan = msgspec.structs.replace(self.plan_of_move(target, num_blocks, number), num_reused_granules=num_reused)
        what = RequestId(request_id), Epoch(epoch)
        introduce(self, target)
        target.instance.handle(
            ExpectCopy(
                instance_id=target.instance.instance_id,
                request_id=what[0],
                epoch=what[1],
                transfer=plan,
                chain=chain,
            )
        )
        grant = SendCopy(instance_id=self.instance.instance_id, request_id=what[0], epoch=what[1], transfer=plan)
        self.instance.handle(grant)

    def plan_of_move(self, target: RunningInstance, num_blocks: int, number: int = 2) -> TransferPlan:
        return TransferPlan(
            transfer_id=TransferId(number),
            decoding=True,
            sources=(self.shard(num_blocks),),
            destinations=(target.shard(num_blocks),),
            capability=CAPABILITY + number,
        )

    def pause(self, request_id: str, epoch: int = 0) -> None:
        self.instance.handle(
            StopCopy(
                instance_id=self.instance.instance_id,
                request_id=RequestId(request_id),
                epoch=Epoch(epoch),
                transfer_id=TransferId(1),
                how=Stop.PAUSE,
            )
        )

    def withdraw(self, request_id: str, *, number: int = 1) -> None:
        self.instance.handle(
            StopCopy(
                instance_id=self.instance.instance_id,
                request_id=RequestId(request_id),
                epoch=Epoch(0),
                transfer_id=TransferId(number),
                how=Stop.WITHDRAW,
            )
        )

    def keep(self, generation: Generation) -> None:
        num_tokens = generation.num_tokens + generation.max_tokens_left - 1
        self.instance.handle(
            Hold(
                instance_id=self.instance.instance_id,
                request_id=generation.request_id,
                epoch=generation.epoch,
                num_blocks=num_blocks_for(num_tokens, self.block_size),
                decodes=True,
            )
        )

    def free(self, request_id: str, epoch: int = 0) -> None:
        instance_id = self.instance.instance_id
        self.instance.handle(FreeKv(instance_id=instance_id, request_id=RequestId(request_id), epoch=Epoch(epoch)))

    def shard(self, num_blocks: int) -> KvShard:
        """Return a shard of ``num_blocks`` blocks on this instance."""
        return a_shard(self.instance.instance_id, num_blocks, self.engine.kv.layout)

    @property
    def block_size(self) -> int:
        return self.engine.kv.layout.block_size

    def assert_all_free(self, *, num_cached: int = 0) -> None:
        """Assert that no block is held, ``num_cached`` granules are cached, and the counts of blocks agree."""
        self.instance.check_integrity()
        assert self.pool.num_cached == num_cached * blocks_of_granule(self.block_size), (
            f"{self.pool.num_cached} blocks kept"
        )
        mesh = (self.pool.num_free, self.pool.num_held, self.pool.num_quarantined)
        assert mesh == (self.pool.num_blocks - self.pool.num_cached, 0, 0), f"free, held, quarantined: {mesh}"


@asynccontextmanager
async def running_instance(
    engine: Engine,
    transport: KvTransport,
    *,
    role: Role = Role.MIXED,
    config: TransferConfig | None = None,
    tracing: Tracing | None = None,
    instance_id: str | None = None,
    drafter: Drafter | None = None,
    tier: TierOf | None = None,
    range_tokens: int = 0,
) -> AsyncGenerator[RunningInstance]:
    """Run one instance on an open ``transport``; check its integrity at the end of the block.

    Its engine divides contexts into ranges of ``range_tokens``, if there are any.
    """
    pool = BlockPool(engine.kv.num_blocks)

    def on_outcome(outcome: TransferOutcome) -> None:
        running.instance.on_outcome(outcome)
        running.notify()

    def on_lost(granules: PrefixHashes) -> None:
        running.report(CacheReported(running.instance.instance_id, lost=granules))

    async with (
        EngineThread() as thread,
        nullcontext() if tier is None else tier(engine.kv, pool, thread.wakeup, on_lost) as offloads,
        KvMover(
            transport=transport,
            store=engine.kv,
            pool=pool,
            config=config or TransferConfig(),
            on_outcome=on_outcome,
            attend_part=engine.attend_part if range_tokens else None,
            wakeup=thread.wakeup,
            weights=engine.weights,
        ) as mover,
        anyio.create_task_group() as tasks,
    ):
        running = RunningInstance(engine, pool, mover, transport.address, offloads)
        running.instance = instance = Instance(
            instance_id=InstanceId(instance_id or role),
            role=role,
            max_model_len=engine.max_model_len,
            store=engine.kv,
            pool=pool,
            hasher=HASHER,
            mover=mover,
            wakeup=thread.wakeup,
            report=running.report,
            tokens=running,
            metrics=WorkerMetrics(),
            tracing=tracing or Tracing(),
            stop=running.told_to_stop.set,
            drafter=drafter,
            tier=offloads,
            num_stages=engine.num_stages,
            range_tokens=range_tokens,
            weights=engine.weights,
        )

        async def step() -> None:
            running.failure = await run_steps(instance, engine, thread)
            running.notify()

        tasks.start_soon(step)
        yield running
        instance.check_integrity()
        tasks.cancel_scope.cancel()


def introduce(*instances: RunningInstance) -> None:
    """Send each instance the data addresses of all, as a scheduler does."""
    here = PeersHere(data_addresses={each.instance.instance_id: each.address for each in instances})
    for each in instances:
        each.instance.handle(here)


def prompt_of(generation: Generation) -> Prompt:
    """Return the prompt that goes with the command that admits a request."""
    return Prompt(generation=generation, num_context_tokens=generation.num_tokens)


def a_shard(instance_id: str, num_blocks: int, layout: KvLayout | None = None) -> KvShard:
    """Return the first blocks of a request on an instance, of all layers and heads (of one, without a ``layout``)."""
    num_layers, num_heads = (1, 1) if layout is None else (layout.num_layers, layout.num_kv_heads)
    part = KvPart(IndexRange(0, num_blocks), IndexRange(0, num_layers), IndexRange(0, num_heads))
    return KvShard(instance_id=InstanceId(instance_id), part=part)


def a_transfer(source: KvShard, destination: KvShard, number: int = 1, num_reused: int = 0) -> TransferPlan:
    """The ``number`` th of its request, with a capability of its own."""
    return TransferPlan(
        transfer_id=TransferId(number),
        sources=(source,),
        destinations=(destination,),
        capability=CAPABILITY + number - 1,
        num_reused_granules=num_reused,
    )


def make_generation(
    request_id: str, prompt: Sequence[int], params: SamplingParams, *, output: Sequence[int] = (), epoch: int = 0
) -> Generation:
    """Return a request as the gateway sends it; ``output`` are tokens delivered in earlier epochs."""
    return Generation(
        request_id=RequestId(request_id),
        epoch=Epoch(epoch),
        gateway_id=GatewayId("gateway"),
        token_address="",
        token_ids=pack_token_ids([*prompt, *output]),
        num_prompt_tokens=len(prompt),
        params=params,
    )


def with_prefix(generation: Generation, salt: bytes = b"") -> Generation:
    """Return the request with the hashes of its granules, so that its KV is cached and may be reused."""
    root = HASHER.root(salt)
    return msgspec.structs.replace(generation, prefix_root=root, prefix=HASHER.granules(root, generation.token_ids))


def chunk_plans(generation: Generation, sizes: Sequence[int], start: int = 0) -> list[ChunkPlan]:
    """Return the request's chunks of these sizes from ``start`` on; the last size is repeated to the prompt's end."""
    plans: list[ChunkPlan] = []
    while start < generation.num_tokens:
        end = min(start + sizes[min(len(plans), len(sizes) - 1)], generation.num_tokens)
        plans.append(
            ChunkPlan(
                request_id=generation.request_id,
                epoch=generation.epoch,
                start=start,
                num_tokens=end - start,
                is_last=end == generation.num_tokens,
            )
        )
        start = end
    return plans


async def hand_over(
    generation: Generation,
    prefill: RunningInstance,
    decode: RunningInstance,
    sizes: Sequence[int],
    *,
    with_tokens: bool = False,
    num_reused: tuple[int, int] = (0, 0),
) -> None:
    """Do for one request what the scheduler does, up to the grant; the rest goes by itself.

    ``num_reused`` are the granules that are cached on either.
    """
    decode.expect(generation, prefill, with_tokens=with_tokens, num_reused=num_reused[1])
    prefill.admit(generation, kv_moves=True, num_reused=num_reused[0])
    for chunk in chunk_plans(generation, sizes, num_reused[0] * GRANULE_TOKENS):
        prefill.run([chunk])
    await prefill.reported(TransferOffered, generation.request_id)
    prefill.grant(generation, decode, num_reused=num_reused[1])
