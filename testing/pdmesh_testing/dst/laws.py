"""The laws of every simulation. `pdmesh_testing.dst.clients` has the laws that only clients can check."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator

from pdmesh.core.commands import Command, ExpectCopy, ForgetRequest, Reject, Restart, RunStep
from pdmesh.core.events import CacheReported, Event, GatewayJoined, InstanceJoined, LoadReported, RequestArrived
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.instance.sequence_phases import SeqPhase
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import Epoch, PrefixHash, RequestId
from pdmesh.worker.instance import Instance
from pdmesh_testing.dst.engine import SimulatedEngine
from pdmesh_testing.dst.process import Process
from pdmesh_testing.dst.services import Gateway
from pdmesh_testing.dst.timeline import Timeline
from pdmesh_testing.local_decode import waiting_in_vain

BLOCKS = "blocks balance"
CAPABILITY = "no capability twice"
ENDS_ONCE = "each request ends once"
KEPT = "instances keep what the core thinks"
LOCAL = "what an instance could decode waits for no other that is not there"
FREE = "all is free when nothing runs"
STATES = "a state has the position of the KV"
CACHED_STATES = "equal cached prefixes have equal states"
NO_FAILURE = "no service fails"
PROGRESS = "something progresses once faults stop"


class Laws:
    """Checks of the cores' decisions and the instances' blocks. ``is_healthy``: the plan has no faults."""

    def __init__(self, timeline: Timeline, *, is_healthy: bool) -> None:
        self._timeline = timeline
        self._is_healthy = is_healthy
        self._capabilities: set[tuple[int, str]] = set()
        self._ended: dict[int, set[tuple[RequestId, Epoch]]] = {}
        self._plan_ids: dict[int, set[tuple[str, int]]] = {}
        # References, so that no two cores have the same id().
        self._cores: list[SchedulerCore] = []
        # States behind each granule that was seen in a cache with them.
        self._cached_states: dict[PrefixHash, list[list[int]]] = {}
        self.num_events = 0

    def on_decision(self, core: SchedulerCore, event: Event, now_s: float, commands: list[Command]) -> None:
        """Check a core's state and commands after an event."""
        timeline = self._timeline
        self.num_events += 1
        if id(core) not in self._ended:
            self._cores.append(core)
            self._ended[id(core)], self._plan_ids[id(core)] = set(), set()
        if timeline.wanted and not isinstance(event, LoadReported):
            timeline.note("core", event)
            for command in commands:
                timeline.note("core", f"    -> {command}")
        if isinstance(event, InstanceJoined):
            # The instance has forgotten all plans, so their numbers start again.
            plan_ids = self._plan_ids[id(core)]
            plan_ids -= {plan for plan in plan_ids if plan[0] == event.profile.instance_id}
        if isinstance(event, RequestArrived | GatewayJoined | InstanceJoined):
            # A gateway that did not hear how a request ended has sent it again, or found it where it still decodes.
            ended = self._ended[id(core)]
            ended -= {key for key in ended if core.is_active(key)}
        if commands or not isinstance(event, LoadReported):
            try:
                core.check_integrity()
            except AssertionError as error:
                timeline.broke(BLOCKS, f"the core's state after {event}: {error}")
            for waiting in waiting_in_vain(core):
                timeline.broke(LOCAL, f"after {event}: {waiting}")
        if isinstance(event, CacheReported) and event.kept is not None and self._is_healthy:
            timeline.broke(KEPT, f"an instance keeps other KV than the core thought: {event}")
        for command in commands:
            match command:
                case ExpectCopy():
                    # A transfer may have several receivers.
                    capability = (command.transfer.capability, command.instance_id)
                    if capability in self._capabilities:
                        timeline.broke(CAPABILITY, str(command))
                    self._capabilities.add(capability)
                case ForgetRequest():
                    key = (command.request_id, command.epoch)
                    if key in self._ended[id(core)]:
                        timeline.broke(ENDS_ONCE, f"the core forgot {key} twice")
                    self._ended[id(core)].add(key)
                case RunStep():
                    plan = (command.instance_id, command.plan.plan_id)
                    if plan in self._plan_ids[id(core)]:
                        timeline.broke(ENDS_ONCE, f"plan {plan} was given twice")
                    self._plan_ids[id(core)].add(plan)
                case Reject() | Restart() | _:
                    pass

    def on_failure(self, process: Process, error: BaseException) -> None:
        """Report an uncaught error that ended a process, or a handler of its streams."""
        trace = "".join(traceback.format_exception(error, limit=-6)[-8:])
        self._timeline.broke(NO_FAILURE, f"{process.name}: {type(error).__name__}: {error}\n{trace}")

    def check_instances(self, processes: Iterable[Process]) -> None:
        """Check each living instance: blocks add up, tables hold them, and states are there and right."""
        for process in processes:
            instance: Instance | None = process.parts.get("instance")
            if instance is not None and not process.is_dead:
                try:
                    instance.check_integrity()
                except AssertionError as error:
                    self._timeline.broke(BLOCKS, f"{process.name}: {error}")
                engine: SimulatedEngine = process.parts["engine"]
                for missing in _missing_states(instance, engine):
                    self._timeline.broke(STATES, f"{process.name}: {missing}")
                for wrong in self._wrong_states(instance, engine):
                    self._timeline.broke(CACHED_STATES, f"{process.name}: {wrong}")

    def _wrong_states(self, instance: Instance, engine: SimulatedEngine) -> Iterator[str]:
        """Yield descriptions of cached granules in whose page is not the state behind the granule."""
        frames = engine.kv.frames
        if frames is None:
            return
        for granule in instance.kept:
            block_id = instance._tables.kept.blocks_of(granule)[-1]
            if frames.of_block[block_id] == frames.zeros:
                continue
            states = engine.states_in(block_id).reshape(-1, 3).tolist()
            behind = [state for state in states if state[0] and state[0] % GRANULE_TOKENS == 0]
            if not behind or self._cached_states.setdefault(granule, behind) != behind:
                yield f"block {block_id} of cached tokens has the states {states}"

    def not_free(self, processes: Iterable[Process]) -> list[str]:
        """Return descriptions of everything that living processes still hold though no request runs."""
        return [held for process in processes if not process.is_dead for held in _held(process)]


def _missing_states(instance: Instance, engine: SimulatedEngine) -> Iterator[str]:
    """Yield descriptions of requests without the state behind their latest token with KV."""
    for request in instance._sequences:
        if request.in_step or request.phase in (SeqPhase.EXPECTED, SeqPhase.HOLDING):
            continue
        is_computing = request.phase is SeqPhase.PREFILLING
        num_tokens = request.num_computed_tokens if is_computing else len(request.sequence.token_ids) - 1
        if num_tokens > 0 and not engine.has_states(request.sequence, num_tokens):
            yield f"{request.request_id} ({request.phase}) lacks the state behind token {num_tokens}"


def _held(process: Process) -> Iterator[str]:
    instance: Instance | None = process.parts.get("instance")
    if instance is not None:
        beat = instance.load()
        if beat.num_held_blocks or beat.num_quarantined_blocks or beat.num_decoding:
            yield f"{process.name}: {beat}"
        counters = instance._mover.counters()
        if counters.num_sending or counters.num_receiving:
            yield f"{process.name}: {counters.num_sending} transfers go out, {counters.num_receiving} come in"
        if num_parts := len(instance._mover.parts):
            yield f"{process.name}: {num_parts} parts of spread contexts"
    gateway: Gateway | None = process.parts.get("gateway")
    if gateway is not None and len(gateway.transcripts):
        yield f"{process.name}: {len(gateway.transcripts)} transcripts"
    driver = process.parts.get("driver")
    if driver is not None:
        core: SchedulerCore = driver._core
        if core.num_waiting or core.num_running:
            yield f"{process.name}: {core.num_waiting} requests wait, {core.num_running} run"
        for view in core.instances:
            if view.num_free_blocks != view.num_blocks or view.num_seats_taken or view.num_queued_tokens:
                yield f"{process.name}: its state of {view}"
        if driver._prompts.num_whole:
            yield f"{process.name}: {driver._prompts.num_whole} prompts kept"
