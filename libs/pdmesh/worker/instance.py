"""The requests of one model replica: messages of the scheduler and the transport go to the part that handles them.

There is no I/O here. Messages come in through `Instance.handle` and go out through callables, and only the step loop
(`pdmesh.worker.steps`) touches the engine. Everything runs on the event loop. An instance does not decide: it *refuses*
requests that it cannot take (`RequestDropped`), and the scheduler starts them again elsewhere.

`pdmesh.instance.machine` decides. The instance carries out what the machine asks for, by these modules:

* `local_floor`, `intake`, `growth`: blocks of new requests, and room for generated tokens.
* `plans`, `results`: the steps of the engine and their results. `groups`: prompts that several instances compute.
* `leaving_kv`, `arrivals`: KV that leaves, and KV that comes. `moves`: running decodes that move, at their source.
* `recomputing`: ranges of contexts that were lost, and are computed again here.
* `sequences`: the table of held requests. `context`: state that these modules share.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import assert_never

import structlog

from pdmesh.core.commands import (
    InstanceCommand,
    InstanceRequestCommand,
    SendCopy,
    Stop,
    StopCopy,
    ToInstanceOfRequest,
)
from pdmesh.core.events import InstanceEvent, KvReleased, LoadReported, RequestDropped
from pdmesh.core.instances.last_uses import UseLog
from pdmesh.core.instances.own_steps import OwnSteps
from pdmesh.errors import ProtocolError
from pdmesh.instance.effects import (
    CopyEvent,
    Effect,
    Expect,
    Froze,
    PauseSending,
    Refused,
    Regrouped,
    Rehomed,
    ResidentsChange,
    SendKv,
    StopSending,
    WaitNoLonger,
)
from pdmesh.instance.machine import InstanceMachine
from pdmesh.kv.blocks import BlockPool
from pdmesh.kv.gate import Wakeup
from pdmesh.kv.mover import KvMover
from pdmesh.kv.offload.tier import OffloadTier
from pdmesh.kv.outcome import (
    FailedExchange,
    FailedTransfer,
    LandedTransfer,
    PausedTransfer,
    SentTransfer,
    TransferOutcome,
)
from pdmesh.kv.store import KvStore
from pdmesh.model import (
    InstanceId,
    Jumps,
    LastUses,
    PrefixHashes,
    RequestKey,
    Resident,
    Role,
)
from pdmesh.prefixes import PrefixHasher
from pdmesh.telemetry.tracing import Tracing
from pdmesh.wire.messages import PeerGone, PeersHere, Prompt
from pdmesh.worker.addresses import Addresses
from pdmesh.worker.arrivals import Arrivals
from pdmesh.worker.block_tables import BlockTables
from pdmesh.worker.context import InstanceContext
from pdmesh.worker.drafts import Drafter
from pdmesh.worker.groups import PrefillGroups
from pdmesh.worker.growth import RoomGrowth
from pdmesh.worker.intake import Intake
from pdmesh.worker.leaving_kv import LeavingCopies
from pdmesh.worker.local_floor import RequestFloor
from pdmesh.worker.moves import MovingDecodes
from pdmesh.worker.plans import Plans
from pdmesh.worker.recomputing import RecomputedRanges
from pdmesh.worker.replies import ToGateways, TokenSink
from pdmesh.worker.results import Results
from pdmesh.worker.sequences import Drawn, LocalRequest, Sequences
from pdmesh.worker.spans import FAILED, FREED
from pdmesh.worker.windows import Windows
from pdmesh.worker.worker_metrics import WorkerMetrics

log = structlog.get_logger()

#: Effects that need the request of a sequence.
OfSequence = Expect | Rehomed | Froze | SendKv | StopSending | PauseSending | Regrouped | WaitNoLonger

#: Messages of the scheduler to an instance: core commands, and changes of peers.
Instruction = InstanceCommand | PeersHere | PeerGone


class Instance:
    """A model replica. The step loop takes batches from ``plans`` and hands their results to ``results``."""

    def __init__(
        self,
        *,
        instance_id: InstanceId,
        role: Role,
        max_model_len: int,
        store: KvStore,
        pool: BlockPool,
        hasher: PrefixHasher,
        mover: KvMover,
        wakeup: Wakeup,
        report: Callable[[InstanceEvent], None],
        tokens: TokenSink,
        metrics: WorkerMetrics,
        tracing: Tracing,
        stop: Callable[[], None],
        drafter: Drafter | None = None,
        tier: OffloadTier | None = None,
        num_stages: int = 1,
        range_tokens: int = 0,
        weights: str = "",
    ) -> None:
        self.instance_id = instance_id
        self._pool = pool
        self._mover = mover
        self._report = report
        self._stop = stop
        own = OwnSteps()
        block_size = store.layout.block_size
        self.windows = windows = Windows(store, pool)
        self._tables = tables = BlockTables(instance_id, pool, block_size, hasher, report, windows, tier)
        self._sequences = sequences = Sequences(
            pool, mover, windows=windows, keep_end=tables.keep_end, on_released=self._released
        )
        #: Requests dropped since the last registration that decode nowhere, so that a scheduler can restart them now.
        self.dropped: list[RequestKey] = []
        self._uses = UseLog()
        self.plans = Plans(
            instance_id,
            sequences,
            own,
            windows=windows,
            wakeup=wakeup,
            report=report,
            drop=self._drop,
            begin_chunk=self._begin_chunk,
            drafter=drafter,
            num_stages=num_stages,
        )
        self._addresses = Addresses()
        context = InstanceContext(
            instance_id=instance_id,
            max_model_len=max_model_len,
            block_size=block_size,
            range_tokens=range_tokens,
            weights=weights,
            tables=tables,
            windows=windows,
            mover=mover,
            sequences=sequences,
            addresses=self._addresses,
            report=report,
            do=self._do,
            drop=self._drop,
            freeze=self._freeze,
            hear=self._hear,
            gateways=ToGateways(tokens),
            metrics=metrics,
            tracing=tracing,
            grammars=self.plans.grammars,
            wake=self.plans.wake,
        )
        self._context = context
        self._growth = growth = RoomGrowth(context)
        self._groups = groups = PrefillGroups(context, wakeup=wakeup)
        self._intake = intake = Intake(context, groups=groups)
        self._moves = moves = MovingDecodes(context)
        floor = RequestFloor(context, intake=intake, growth=growth, moves=moves, own=own, carry_out=self._carry_out)
        self._machine = InstanceMachine(floor, self.plans, role)
        self._copies = LeavingCopies(context, moves=moves)
        lost_ranges = RecomputedRanges(context, self.plans.lost_ranges)
        self._arrivals = Arrivals(context, intake=intake, growth=growth, lost_ranges=lost_ranges)
        self.results = Results(
            context,
            self._machine,
            own=own,
            groups=groups,
            moves=moves,
            growth=growth,
            lost_ranges=lost_ranges,
        )

    # --- messages of the scheduler ----------------------------------------------------------------------------------

    def handle(self, message: Instruction, prompt: Prompt | None = None) -> None:
        """Handle a message of the scheduler. No message of a peer makes this raise."""
        match message:
            case PeersHere():
                self._addresses.add(message.data_addresses)
            case PeerGone(data_address=data_address):
                self._addresses.remove(data_address)
                self._mover.forget(data_address)
            case ToInstanceOfRequest():
                self._intake.last_prompt = prompt
                self._obey(message)
            case _:
                self._do(self._machine.obey(message))
                if self._machine.is_told_to_stop:
                    self._stop()

    def _obey(self, command: InstanceRequestCommand) -> None:
        """Obey a command for a request. Drop the request if the command names an unknown instance."""
        request = self._sequences.get(command.request_id, command.epoch)
        was_decoding = request is not None and request.state.is_decoding
        if request is not None:
            request.note_commit()
        try:
            self._do(self._machine.obey(command))
        except ProtocolError as error:
            request = self._sequences.get(command.request_id, command.epoch)
            if request is not None:
                self._drop(request, str(error))
        if request is not None and request.state.is_decoding and not was_decoding:
            self._growth.tell([request])

    # --- effects of the machine ----------------------------------------------------------------------------

    def _carry_out(self) -> None:
        self._do(self._machine.done())

    def _do(self, effects: list[Effect]) -> None:
        """Carry out effects, in order."""
        for effect in effects:
            match effect:
                case RequestDropped(request_id=request_id, epoch=epoch, reason=reason):
                    log.warning("request dropped", request_id=request_id, epoch=epoch, reason=reason)
                    request = self._sequences.get(request_id, epoch)
                    if request is not None:
                        request.end_trace(FAILED)
                    self._report(effect)
                case Refused(command=command, reason=reason):
                    self._refused(command, reason)
                case ResidentsChange():
                    for request in self._sequences:
                        self.results.between_steps(request)
                case Expect() | Rehomed() | Froze() | SendKv() | StopSending() | PauseSending():
                    self._carry_out_for(effect)
                case Regrouped() | WaitNoLonger():
                    self._carry_out_for(effect)
                case tuple():
                    # The release of a request ends its copies.
                    pass
                case _:
                    self._report(effect)

    def _carry_out_for(self, effect: OfSequence) -> None:
        """Carry out an effect on a sequence, unless an earlier effect has dropped the sequence."""
        key = effect.sequence.key
        request = self._sequences.get(*key)
        if request is None or request.state is not effect.sequence:
            return
        match effect:
            case Expect(command=command):
                self._arrivals.expect(request, command)
            case Rehomed(home_id=home_id):
                (address,) = self._addresses.of([home_id])
                self._mover.parts.rehome(*key, address)
            case Froze():
                self._sequences.pause(request)
                self._moves.send_rest(request)
            case SendKv(transfer=transfer, is_renewed=is_renewed):
                self._copies.send(request, transfer, is_renewed=is_renewed)
            case StopSending(transfer=transfer):
                self._copies.stop(request, transfer)
            case PauseSending():
                self._mover.departures.pause(*key)
            case Regrouped(sequence=sequence, known=known):
                group = sequence.prompt.group
                assert group is not None, f"{key} has no group"
                self._groups.regroup(request, group, is_new=known is None)
            case WaitNoLonger():
                self._groups.wait_no_longer(request, self.plans.newest_plan_id)
            case _:
                assert_never(effect)

    def _refused(self, command: InstanceCommand, reason: str) -> None:
        """Drop a request if the scheduler would wait for a copy that never begins or pauses."""
        log.warning("command refused", command=type(command).__name__, reason=reason)
        if isinstance(command, SendCopy) or (isinstance(command, StopCopy) and command.how is Stop.PAUSE):
            request = self._sequences.get(command.request_id, command.epoch)
            if request is not None and request.state.onward is not None:
                self._drop(request, reason)

    def _hear(self, request: LocalRequest, event: CopyEvent) -> None:
        """Handle an event of a copy."""
        request.note_commit()
        self._do(self._machine.copy_event(event))

    def _freeze(self, request: LocalRequest) -> None:
        self._do(self._machine.freeze(request.state, len(request.sequence.token_ids)))

    def _begin_chunk(self, request: LocalRequest) -> None:
        self._do(self._machine.begin_chunk(request.state))

    def _drop(self, request: LocalRequest, reason: str) -> None:
        """Drop a request that cannot continue here, whatever the state of its KV."""
        self._do(self._machine.drop(request.state, reason))

    # --- outcomes of copies and exchanges -----------------------------------------------------------------------

    def on_outcome(self, outcome: TransferOutcome) -> None:
        """Handle the end or a pause of a KV transfer. The outcome of an unknown request is ignored."""
        request = self._sequences.get(outcome.request_id, outcome.epoch)
        if request is None:
            return
        match outcome:
            case LandedTransfer():
                self._arrivals.landed(request, outcome)
            case SentTransfer():
                self._copies.sent(request, outcome)
            case PausedTransfer():
                self._copies.paused(request)
            case FailedTransfer(sending=True):
                self._copies.failed(request, outcome)
            case FailedTransfer(reason=reason):
                self._arrivals.failed(request, reason)
            case FailedExchange(reason=reason):
                self._drop(request, reason)
            case _:
                assert_never(outcome)

    def stop_waiting(self) -> None:
        """End a running step that waits for KV, because nothing will use its result."""
        self._sequences.abort_waiting("the instance is stopping")
        self._mover.parts.abort("the instance is stopping")

    # --- released blocks -------------------------------------------------------------------------------------

    def _released(self, request: LocalRequest, drawn: Drawn) -> None:
        request.end_trace(FREED)
        log.debug("request released", request_id=request.request_id, epoch=request.epoch)
        key, granules, num_known, states = request.state.key, drawn.granules, drawn.num_known, drawn.states
        received_by = request.state.received_by
        generation, kept = request.generation, self._tables.kept
        num_prompt_tokens = generation.num_prompt_tokens
        # Also called back by the loop, where anyio tells no time.
        now_s = asyncio.get_running_loop().time()
        self._uses.ended(generation.user, (*request.chain, *granules), num_prompt_tokens, now_s)
        self._uses.forget(kept, len(kept))
        self._report(KvReleased(self.instance_id, *key, received_by, granules, num_known, states))
        self._growth.blocks_freed()
        # A plan may wait for frames.
        self.plans.wake()

    @property
    def role(self) -> Role:
        return self._machine.role

    # --- counts -----------------------------------------------------------------------------------------------

    @property
    def num_decoding(self) -> int:
        return self._sequences.num_decoding

    def num_of_stage(self) -> dict[str, int]:
        """Return the number of requests by stage (`Sequences.num_of_stage`)."""
        return self._sequences.num_of_stage()

    def load(self) -> LoadReported:
        """Return how many requests and blocks are held, for a heartbeat."""
        return LoadReported(
            instance_id=self.instance_id,
            num_free_blocks=self._pool.num_free,
            num_held_blocks=self._pool.num_held,
            num_quarantined_blocks=self._pool.num_quarantined,
            num_decoding=self._sequences.num_decoding,
            num_cached_blocks=self._pool.num_cached,
            num_offloaded_granules=0 if self._tables.tier is None else len(self._tables.tier),
        )

    @property
    def kept(self) -> PrefixHashes:
        """Cached granules for the registration, the least recently used first."""
        return self._tables.kept.hashes

    @property
    def jumps(self) -> Jumps:
        """Return the jumps of `kept` for the registration (`pdmesh.core.instances.kept_chains`)."""
        return self._tables.kept.jumps

    @property
    def last_uses(self) -> LastUses:
        """Return the last uses of `kept` for the registration (`pdmesh.core.instances.last_uses`)."""
        return self._uses.report(self.kept, asyncio.get_running_loop().time())

    @property
    def states(self) -> PrefixHashes:
        """Cached granules with a state, for the registration."""
        return self._tables.states.hashes

    @property
    def offloaded(self) -> PrefixHashes:
        """Granules in the offload tier for the registration, in the same order."""
        tier = self._tables.tier
        return () if tier is None else tier.hashes

    async def drop_all_but_decoding(self) -> None:
        """Drop all plans, and all requests that neither decode here nor have a range here; wait until they are free.

        A new scheduler does not know these requests, and gateways start them again. `dropped` lists the requests that
        decode nowhere, for the registration. Cached granules without the beginning of their chains are evicted.
        """
        self._growth.end_alone()
        for request in self._sequences:
            request.note_commit()
            if request.decodes_nowhere:
                self.dropped.append(request.state.key)
        self._do(self._machine.drop_all_but_decoding())
        await self._sequences.settled()
        self._tables.kept.drop_headless()

    def registered(self) -> None:
        """Forget the reports that the registration contained, and the addresses that the scheduler will send again."""
        self.dropped.clear()
        self._addresses.clear()

    def lose_scheduler(self) -> None:
        """Let residents decode without a scheduler until the instance registers again."""
        self.plans.release_decodes()
        self._growth.go_alone()

    def residents(self) -> tuple[Resident, ...]:
        return tuple(request.as_resident(self._tables.granules_of(request)) for request in self._sequences)

    @property
    def admits(self) -> bool:
        """Whether the instance takes new requests."""
        return self._intake.is_open

    def stop_admitting(self) -> None:
        """Refuse new requests from now on."""
        self._intake.is_open = False

    async def emptied(self) -> None:
        """Wait until no request is held."""
        await self._sequences.emptied()

    def check_integrity(self) -> None:
        self._sequences.check_integrity()
        self._tables.check_integrity()
        self._mover.check_integrity()
