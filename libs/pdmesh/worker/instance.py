"""The requests of one model replica: messages of the scheduler and the transport go to the part that handles them.

No I/O: messages come in through `Instance.handle` and go out through the callables that it was given, and only the step
loop (`pdmesh.worker.steps`) touches the engine. Everything runs on the event loop. An instance executes and does not
decide: it *refuses* whatever it cannot take (`RequestDropped`), and the scheduler starts the request again elsewhere.

* `intake`: requests are taken or refused. `groups`: prompts that several instances compute.
* `plans`, `results`: the steps of the engine and their results. `growth`: room for generated tokens.
* `leaving_kv`, `arrivals`: KV that leaves, and KV that comes. `moves`: running decodes that move, at their source.
* `spread`, `lost_ranges`: contexts with ranges on other instances, on both sides.
* `sequences`: the table of held requests. `endings`: how requests end. `context`: state that these modules share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

import structlog

from pdmesh.core.commands import (
    AdmitPrefill,
    FetchKept,
    FreeKv,
    GrantTransfer,
    Hold,
    InstanceCommand,
    InstanceRequestCommand,
    PlaceDecode,
    RunStep,
    SendKept,
    SetPlaces,
    SetRole,
    StopCopy,
    StopInstance,
)
from pdmesh.core.events import InstanceEvent, KvReleased, LoadReported
from pdmesh.core.instances.own_steps import OwnSteps
from pdmesh.errors import ProtocolError
from pdmesh.instance.sequence_phases import SeqPhase
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
    Epoch,
    InstanceId,
    PrefixHashes,
    RequestId,
    RequestKey,
    Resident,
    Role,
    TransferPurpose,
)
from pdmesh.plans import PrefillGroup
from pdmesh.prefixes import PrefixHasher
from pdmesh.telemetry.tracing import Tracing
from pdmesh.wire.messages import PeerGone, PeersHere, Prompt
from pdmesh.worker.addresses import Addresses
from pdmesh.worker.arrivals import Arrivals
from pdmesh.worker.block_tables import BlockTables
from pdmesh.worker.context import InstanceContext
from pdmesh.worker.drafts import Drafter
from pdmesh.worker.endings import Endings
from pdmesh.worker.groups import PrefillGroups
from pdmesh.worker.growth import RoomGrowth
from pdmesh.worker.intake import Intake
from pdmesh.worker.leaving_kv import LeavingCopies
from pdmesh.worker.lost_ranges import LostRanges
from pdmesh.worker.moves import MovingDecodes
from pdmesh.worker.plans import Plans
from pdmesh.worker.replies import ToGateways, TokenSink
from pdmesh.worker.results import Results
from pdmesh.worker.sequences import Drawn, LocalRequest, Sequences
from pdmesh.worker.spans import FREED
from pdmesh.worker.spread import SpreadContexts
from pdmesh.worker.windows import Windows
from pdmesh.worker.worker_metrics import WorkerMetrics

log = structlog.get_logger()

#: What the scheduler tells an instance: core commands, and which peers there are.
Instruction = InstanceCommand | PeersHere | PeerGone


class Instance:
    """One model replica, put together from its parts. The step loop takes from ``plans`` and gives to ``results``."""

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
        self.role = role
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
            pool, mover, windows=windows, keep_drawn=tables.keep_drawn, on_released=self._released
        )
        endings = Endings(instance_id, sequences=sequences, own=own, report=report)
        #: What was given up since it was registered last, and decodes nowhere: a scheduler can start it again at once.
        self.dropped: list[RequestKey] = []
        self.plans = Plans(
            instance_id,
            sequences,
            own,
            windows=windows,
            wakeup=wakeup,
            report=report,
            drop=endings.drop,
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
            endings=endings,
            report=report,
            gateways=ToGateways(tokens),
            metrics=metrics,
            tracing=tracing,
            grammars=self.plans.grammars,
            wake=self.plans.wake,
        )
        self._endings = endings
        self._growth = growth = RoomGrowth(context)
        self._groups = groups = PrefillGroups(context, wakeup=wakeup)
        self._intake = intake = Intake(context, groups=groups)
        moves = MovingDecodes(context)
        self._copies = copies = LeavingCopies(context, intake=intake, growth=growth, moves=moves)
        lost_ranges = self.plans.ranges = LostRanges(context, copies=copies)
        self._spread = spread = SpreadContexts(
            context, intake=intake, growth=growth, copies=copies, lost_ranges=lost_ranges
        )
        self._arrivals = Arrivals(context, intake=intake, copies=copies, growth=growth, spread=spread)
        self.results = Results(
            context, own=own, groups=groups, moves=moves, growth=growth, spread=spread, lost_ranges=lost_ranges
        )

    # --- what it is told ------------------------------------------------------------------------------------

    def handle(self, message: Instruction, prompt: Prompt | None = None) -> None:
        """Take a message of the scheduler. Nothing that a peer can say makes it raise."""
        match message:
            case PeersHere():
                self._addresses.add(message.data_addresses)
            case PeerGone(data_address=data_address):
                self._addresses.remove(data_address)
                self._mover.forget(data_address)
            case RunStep(plan=plan):
                self.plans.queue(plan)
            case SetRole(role=role):
                self.role = role
            case StopInstance():
                self._stop()  # as SIGTERM does
            case _:
                try:
                    self._handle(message, prompt)
                except ProtocolError as error:
                    request = self._sequences.get(message.request_id, message.epoch)
                    if request is not None:
                        self._endings.drop(request, str(error))

    def _handle(self, command: InstanceRequestCommand, prompt: Prompt | None) -> None:
        """Take a command for a request. Raises ProtocolError if it names an unknown instance."""
        match command:
            case AdmitPrefill():
                self._release_older(command.request_id, command.epoch)
                self._intake.admit(command, prompt)
            case PlaceDecode(transfer=transfer) if transfer.purpose is TransferPurpose.MOVE:
                self._arrivals.expect_move(command)
            case PlaceDecode(transfer=transfer) if transfer.is_of_part:
                self._spread.expect(command)
            case PlaceDecode():
                self._arrivals.expect(command, prompt)
            case FetchKept():
                self._arrivals.fetch(command)
            case SendKept():
                self._copies.send_cached(command)
            case GrantTransfer(transfer=transfer) if transfer.purpose is TransferPurpose.LOST_PART:
                self._spread.send_tokens(command)
            case Hold(decodes=False):
                self._growth.grow(command)
            case GrantTransfer() | StopCopy() | Hold():
                self._copies.obey(command)
            case SetPlaces():
                self._set_places(command)
            case FreeKv():
                self._free(command)
            case _:
                assert_never(command)

    def _set_places(self, command: SetPlaces) -> None:
        match command.places:
            case PrefillGroup() as group:
                self._groups.regroup(command, group, self.plans.newest_plan_id)
            case str() as home_id:
                self._spread.rehome(command, home_id)
            case members:
                self._spread.respread(command, members)

    def on_outcome(self, outcome: TransferOutcome) -> None:
        """Take the end, or a pause, of a KV transfer from the mover."""
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
                self._endings.drop(request, reason)
            case _:
                assert_never(outcome)

    def stop_waiting(self) -> None:
        """End a running step that waits for KV, because nothing will use its result."""
        self._sequences.abort_waiting("the instance is stopping")
        self._mover.parts.abort("the instance is stopping")

    # --- blocks go back --------------------------------------------------------------------------------------

    def _free(self, command: FreeKv) -> None:
        request_id, epoch = command.request_id, command.epoch
        requests = self._sequences.up_to(request_id, epoch)
        if not self._sequences.is_leaving(request_id, epoch) and all(request.epoch != epoch for request in requests):
            self._report(KvReleased(self.instance_id, request_id, epoch, command.transfer_id))
        for request in requests:
            self._sequences.release(request)

    def _release_older(self, request_id: RequestId, epoch: Epoch) -> None:
        """Free a request's KV of epochs before: perhaps an acknowledgement is waited for that was lost on its way."""
        for request in self._sequences.up_to(request_id, Epoch(epoch - 1)):
            self._sequences.release(request)

    def _released(self, request: LocalRequest, drawn: Drawn) -> None:
        request.end_trace(FREED)  # of what was still open when it was cancelled or dropped
        log.debug("request released", request_id=request.request_id, epoch=request.epoch)
        self._report(KvReleased(self.instance_id, *request.state.key, request.state.received_by, *drawn))
        self._growth.blocks_freed()
        self.plans.wake()  # one may wait for frames

    # --- counts -----------------------------------------------------------------------------------------------

    @property
    def num_decoding(self) -> int:
        return self._sequences.num_decoding

    def num_of_stage(self) -> dict[str, int]:
        """See `Sequences.num_of_stage`."""
        return self._sequences.num_of_stage()

    def load(self) -> LoadReported:
        """Return how many requests and blocks are held, for a heartbeat."""
        return LoadReported(
            instance_id=self.instance_id,
            num_free_blocks=self._pool.num_free,
            num_held_blocks=self._pool.num_held,
            num_quarantined_blocks=self._pool.num_quarantined,
            num_decoding=self._sequences.num_decoding,
            num_kept_blocks=self._pool.num_kept,
            num_offloaded_granules=0 if self._tables.tier is None else len(self._tables.tier),
        )

    @property
    def kept(self) -> PrefixHashes:
        """What is kept for requests to come, those used longest ago first: for a scheduler that it registers with."""
        return self._tables.kept.hashes

    @property
    def offloaded(self) -> PrefixHashes:
        """What the offload tier has, likewise."""
        tier = self._tables.tier
        return () if tier is None else tier.hashes

    async def drop_all_but_decoding(self) -> None:
        """Forget all plans and all requests that do not decode, here or with a range here, and wait until all is free.

        A scheduler that this instance registers with knows nothing of them; gateways start them again. It is told of
        those that decode nowhere (`dropped`).
        """
        self._growth.end_alone()
        self.plans.clear()
        for request in self._sequences:
            self._copies.end_with_scheduler(request)
            if request.phase not in (SeqPhase.DECODING, SeqPhase.HOLDING):
                if request.decodes_nowhere:
                    self.dropped.append((request.request_id, request.epoch))
                self._sequences.release(request)
        await self._sequences.settled()

    def registered(self) -> None:
        """Forget the reports that a scheduler has with the registration, and the addresses that it will send again."""
        self.dropped.clear()
        self._addresses.clear()

    def lose_scheduler(self) -> None:
        """Let residents go on by themselves until the instance registers again."""
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
        self._intake.close()

    async def emptied(self) -> None:
        """Wait until no request is held."""
        await self._sequences.emptied()

    def check_integrity(self) -> None:
        self._sequences.check_integrity()
        self._tables.check_integrity()
        self._mover.check_integrity()
