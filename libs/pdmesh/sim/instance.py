"""A modelled instance: it carries out the core's commands as a worker does, in the time that a latency model says.

It runs the next plan if there is one, else a decode step over its residents, unless a plan has them held. Consecutive
decode steps are one appointment. When a plan or a resident comes in between, it is cut short to the end of the step
that is then running, so the result is the same as step by step.

An urgent plan runs when a planned step that is running comes to the end of its layer; all layers take equally long.
What is left of the interrupted step is computed after it.

KV moves layer by layer. A chunk's KV may move from the moment its step begins, except the last layer's, which may when
the step has ended; so a transfer never lands before its prompt is computed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

from pdmesh.core.commands import (
    AdmitPrefill,
    Command,
    FreeKv,
    GrantTransfer,
    GrowKv,
    PauseTransfer,
    PlaceDecode,
    RunStep,
    SetRole,
)
from pdmesh.core.events import (
    CreditLow,
    DecodeReserved,
    DecodeStepsDone,
    Event,
    KvReleased,
    RequestFinished,
    StepDone,
    TransferLanded,
    TransferOffered,
    TransferPaused,
    TransferSent,
)
from pdmesh.core.own_steps import HOLD_LIMIT_S, OwnSteps
from pdmesh.model import (
    NO_TRANSFER,
    ChunkDone,
    ChunkPlan,
    FinishReason,
    GroupChunk,
    InstanceId,
    InstanceProfile,
    RequestKey,
    StepPlan,
    TransferId,
    TransferPlan,
)
from pdmesh.policy.latency import ChunkShape, LatencyModel, StepShape
from pdmesh.sim.agenda import Agenda, Appointment
from pdmesh.sim.links import SimulatedLinks
from pdmesh.sim.residents import Residents
from pdmesh.sim.result import RequestRun, StepSpan


@dataclass(slots=True, eq=False)
class _Prefill:
    """A request whose prompt is computed here."""

    run: RequestRun
    transfer: TransferPlan | None  # that moves its KV on; None if it stays
    num_computed_tokens: int = 0
    last_turn: int | None = None  # the planned step that had its latest chunk
    granted: bool = False
    granted_s: float | None = None  # for the first time
    computed_s: float | None = None
    num_unsent_bytes: float = 0.0


@dataclass(slots=True, eq=False)
class _Step:
    """A planned step that is running, or was interrupted."""

    plan: StepPlan
    num_decodes: int
    num_context_tokens: int  # of the decodes
    started_s: float
    duration_s: float
    end_s: float
    end: Appointment | None = None  # of a group's step: not its own
    interruption: Appointment | None = None
    nested_s: float = 0.0  # of the urgent steps that ran inside it


def _alone(group: GroupChunk) -> None:
    raise AssertionError(f"a chunk for {group.members} on an instance that is in no group")


class SimInstance:
    """``report`` takes events for the scheduler; ``want_turn`` asks to `begin` after all else of this instant."""

    def __init__(
        self,
        profile: InstanceProfile,
        model: LatencyModel,
        *,
        agenda: Agenda,
        links: SimulatedLinks,
        runs: dict[RequestKey, RequestRun],
        report: Callable[[Event], None],
        land: Callable[[TransferPlan, RequestKey, float], None],
        want_turn: Callable[[InstanceId], None],
        max_decode_steps: int,
        group_model: LatencyModel | None = None,
        meet: Callable[[GroupChunk], None] = _alone,
    ) -> None:
        self.profile = profile
        self.instance_id = profile.instance_id
        self.steps: list[StepSpan] = []
        layout = profile.kv_layout
        self._token_bytes = layout.num_layers * layout.block_bytes / layout.block_size
        self._last_layer_share = 1 / layout.num_layers
        self._model = model
        self._group_model = group_model or model
        self._agenda = agenda
        self._links = links
        self._runs = runs
        self._report = report
        self._land = land
        self._want_turn = want_turn
        self._meet = meet
        self._max_decode_steps = max_decode_steps
        self._plans: deque[StepPlan] = deque()
        self._blocks: dict[RequestKey, int] = {}
        self._received_by: dict[RequestKey, TransferId] = {}
        self._num_free_blocks = profile.num_blocks
        self._prefills: dict[RequestKey, _Prefill] = {}
        self._residents = Residents(layout.block_size)
        self._num_turns = 0
        self._busy = False
        self._step: _Step | None = None
        self._interrupted: _Step | None = None
        self._decode_run: list[float] = []  # when each step of the running decode run ends
        self._run_started_s = 0.0
        self._end_of_run: Appointment | None = None
        self._own = OwnSteps()
        self._release_of_hold: Appointment | None = None

    # --- commands ---

    def take(self, command: Command) -> None:
        match command:
            case AdmitPrefill():
                key = (command.request_id, command.epoch)
                self._hold(key, command.num_blocks)
                if not command.leads:
                    return  # the leader has the books of it
                run = self._runs[key]
                run.prefill_id = self.instance_id
                if run.placed_s is None:
                    run.placed_s = self._agenda.now_s
                run.num_shards = len(command.shards)
                self._prefills[key] = _Prefill(run, command.transfer)
            case PlaceDecode():
                key = (command.request_id, command.epoch)
                self._received_by[key] = command.transfer.transfer_id
                self._hold(key, command.num_blocks)
                self._report(DecodeReserved(self.instance_id, *key, command.transfer.transfer_id))
            case RunStep():
                if command.plan.urgent:
                    self._plans.appendleft(command.plan)
                    self._plan_interruption()
                else:
                    self._plans.append(command.plan)
                self._stir()
            case GrantTransfer():
                self._grant((command.request_id, command.epoch))
            case PauseTransfer():
                self._pause((command.request_id, command.epoch))
            case FreeKv():
                key = (command.request_id, command.epoch)
                assert key not in self._prefills, f"{self.instance_id}: {key} is freed while it is computed"
                if self._residents.free(key):
                    self._stir()
                else:
                    self._release(key)
            case GrowKv():
                self._grow((command.request_id, command.epoch), command.num_blocks)
            case SetRole():
                pass
            case _:
                raise AssertionError(f"{command} is not for an instance")

    def _hold(self, key: RequestKey, num_blocks: int) -> None:
        assert key not in self._blocks, f"{self.instance_id} holds {key} already"
        self._blocks[key] = num_blocks
        self._num_free_blocks -= num_blocks
        assert self._num_free_blocks >= 0, f"{self.instance_id}: no room for {key}"

    def _grow(self, key: RequestKey, num_blocks: int) -> None:
        num_more = num_blocks - self._blocks.get(key, num_blocks)
        if num_more <= 0:
            return  # it ended meanwhile, or has more
        self._blocks[key] += num_more
        self._num_free_blocks -= num_more
        assert self._num_free_blocks >= 0, f"{self.instance_id}: no room for {key} to grow"
        if self._residents.grow(key, num_blocks):
            self._stir()

    def drawn_s(self, key: RequestKey) -> Sequence[float]:
        """When the tokens of a request that decodes here came, up to now."""
        return self._residents.drawn_s(key, self._agenda.now_s, self._decode_run if self._end_of_run else ())

    def _release(self, key: RequestKey) -> None:
        self._num_free_blocks += self._blocks.pop(key)
        self._report(KvReleased(self.instance_id, *key, self._received_by.pop(key, NO_TRANSFER)))

    # --- steps ---

    def _stir(self) -> None:
        """There is something new to do: now if idle, else when the step that is running has ended."""
        if not self._busy:
            self._want_turn(self.instance_id)
        elif self._end_of_run is not None:
            index = bisect_left(self._decode_run, self._agenda.now_s)
            if index < len(self._decode_run) - 1:
                del self._decode_run[index + 1 :]
                self._end_of_run.cancel()
                self._end_of_run = self._agenda.at(self._decode_run[index], self._end_decodes)

    def begin(self) -> None:
        """Start the next batch, if there is one and the instance is idle."""
        if self._busy:
            return
        for key in self._residents.seat():
            self._release(key)
        if self._plans:
            if (group := self._plans[0].group) is not None:
                self._meet(group)
            else:
                self._begin_step(self._plans.popleft())
        elif self._own.held:
            if self._release_of_hold is None:
                self._release_of_hold = self._agenda.at(self._agenda.now_s + HOLD_LIMIT_S, self._decode_on)
        elif self._residents:
            self._begin_decodes()

    def _decode_on(self) -> None:
        """Nothing was planned since it was held."""
        self._release_of_hold = None
        self._own.held = False
        self._stir()

    def _begin_step(self, plan: StepPlan) -> None:
        step = self._start(plan)
        step.end = self._agenda.at(step.end_s, self._end_step)

    def is_at(self, group: GroupChunk) -> bool:
        """Whether the instance is idle, and the group's chunk next."""
        return not self._busy and bool(self._plans) and self._plans[0].group == group

    def start_group_step(self) -> float:
        """All members are there. When this one is done; the caller ends the step, when all are."""
        return self._start(self._plans.popleft()).end_s

    def end_group_step(self) -> None:
        self._end_step()

    def _start(self, plan: StepPlan) -> _Step:
        self._busy = True
        self._own.planned(plan)
        if self._release_of_hold is not None:
            self._release_of_hold.cancel()
            self._release_of_hold = None
        if self._interrupted is None:
            self._num_turns += 1
        shapes: list[ChunkShape] = []
        shared_s = 0.0
        for chunk in plan.chunks:
            shape = self._begin_chunk(chunk)
            if plan.group is not None and chunk.request_id == plan.group.request_id:
                shared_s = self._group_model.step_s(StepShape((shape,), 0, 0))
            else:
                shapes.append(shape)
        num_decodes = len(self._residents) if plan.with_decodes else 0
        num_context_tokens = self._residents.num_context_tokens if num_decodes else 0
        own_s = self._model.step_s(StepShape(tuple(shapes), num_decodes, num_context_tokens))
        now_s, duration_s = self._agenda.now_s, shared_s + own_s
        step = self._step = _Step(plan, num_decodes, num_context_tokens, now_s, duration_s, now_s + duration_s)
        return step

    def _plan_interruption(self) -> None:
        """At the end of the layer that is being computed, if it is not the last one."""
        step, now_s = self._step, self._agenda.now_s
        if step is None or step.plan.urgent or step.plan.group is not None:
            return
        num_layers = self.profile.kv_layout.num_layers
        layer_s = step.duration_s / num_layers
        num_done = ceil((now_s - step.started_s - step.nested_s) / layer_s - 1e-9)
        if num_done < num_layers:
            at_s = max(now_s, step.started_s + step.nested_s + num_done * layer_s)
            step.interruption = self._agenda.at(at_s, self._interrupt)

    def _interrupt(self) -> None:
        """Run the urgent plan now; what is left of the running step comes after it."""
        step = self._interrupted = self._step
        assert step is not None
        assert step.end is not None
        step.end.cancel()
        for chunk in step.plan.chunks:
            self._prefills[chunk.request_id, chunk.epoch].run.num_preemptions += 1
        self._begin_step(self._plans.popleft())

    def _resume(self, step: _Step, nested_s: float) -> None:
        self._busy = True
        self._step, self._interrupted = step, None
        step.nested_s += nested_s
        step.end_s += nested_s
        step.end = self._agenda.at(max(step.end_s, self._agenda.now_s), self._end_step)

    def _begin_chunk(self, chunk: ChunkPlan) -> ChunkShape:
        key = (chunk.request_id, chunk.epoch)
        prefill = self._prefills.get(key)
        if prefill is None:
            assert key in self._blocks, f"{key}: a chunk of a request that is not here"
            return ChunkShape(chunk.num_tokens, chunk.start)  # a group's, led by another
        assert chunk.start == prefill.num_computed_tokens, f"{key}: chunk at {chunk.start} out of order"
        if prefill.last_turn is None:
            if prefill.run.started_s is None:
                prefill.run.started_s = self._agenda.now_s
            if prefill.transfer is not None:
                self._report(TransferOffered(self.instance_id, *key, prefill.transfer.transfer_id))
        elif self._num_turns - prefill.last_turn > 1:
            prefill.run.num_preemptions += 1
        prefill.last_turn = self._num_turns
        self._move(key, prefill, chunk.num_tokens * self._token_bytes * (1 - self._last_layer_share))
        return ChunkShape(chunk.num_tokens, chunk.start)

    def _end_step(self) -> None:
        step, now_s = self._step, self._agenda.now_s
        assert step is not None
        plan, num_decodes = step.plan, step.num_decodes
        self._busy = False
        self._step = None
        duration_s = now_s - step.started_s - step.nested_s
        self.steps.append(StepSpan(step.started_s, now_s, plan.chunks, num_decodes, nested_s=step.nested_s))
        done = tuple(
            [
                ChunkDone(request_id=c.request_id, epoch=c.epoch, num_tokens=c.num_tokens, is_last=c.is_last)
                for c in plan.chunks
            ]
        )
        self._report(
            StepDone(
                self.instance_id,
                plan.plan_id,
                duration_s,
                done,
                num_decodes,
                step.num_context_tokens,
                self._own.take(),
                step.started_s,
                now_s,
            )
        )
        for chunk in plan.chunks:
            self._end_chunk(chunk)
        if num_decodes:
            self._decoded([now_s])
        if self._interrupted is not None:
            self._resume(self._interrupted, now_s - step.started_s)
        else:
            self._want_turn(self.instance_id)

    def _end_chunk(self, chunk: ChunkPlan) -> None:
        key = (chunk.request_id, chunk.epoch)
        prefill = self._prefills.get(key)
        if prefill is None:
            return  # a group's, led by another
        prefill.num_computed_tokens += chunk.num_tokens
        if chunk.is_last:
            prefill.computed_s = self._agenda.now_s
            prefill.run.token_times_s = [*prefill.run.token_times_s, self._agenda.now_s]
            if prefill.run.num_output_tokens == len(prefill.run.token_times_s):
                self._links.drop(key)
                del self._prefills[key]
                self._finish(prefill.run)
                return
            if prefill.transfer is None:
                del self._prefills[key]
                self._join(prefill.run)
                return
        self._move(key, prefill, chunk.num_tokens * self._token_bytes * self._last_layer_share)

    def _begin_decodes(self) -> None:
        self._busy = True
        num_decodes, num_context_tokens = len(self._residents), self._residents.num_context_tokens
        num_steps = min(self._residents.steps_left, self._max_decode_steps, self._own.num_left)
        end_s, step_s = self._agenda.now_s, self._model.step_s
        self._run_started_s = end_s
        ends_s: list[float] = []
        for _ in range(num_steps):
            end_s += step_s(StepShape((), num_decodes, num_context_tokens))
            ends_s.append(end_s)
            num_context_tokens += num_decodes
        self._decode_run = ends_s
        self._end_of_run = self._agenda.at(end_s, self._end_decodes)

    def _end_decodes(self) -> None:
        self._busy = False
        self._end_of_run = None
        num_decodes, num_steps = len(self._residents), len(self._decode_run)
        self._own.made(
            num_steps=num_steps,
            num_tokens=num_steps * num_decodes,
            num_context_tokens=num_steps * self._residents.num_context_tokens
            + num_decodes * num_steps * (num_steps - 1) // 2,
            duration_s=self._agenda.now_s - self._run_started_s,
            began_s=self._run_started_s,
            ended_s=self._agenda.now_s,
        )
        before = self.steps[-1] if self.steps else None
        if (
            before is not None
            and not before.chunks
            and before.num_decodes == num_decodes
            and before.end_s == self._run_started_s
        ):
            before.end_s = self._agenda.now_s
            before.num_steps += num_steps
        else:
            self.steps.append(StepSpan(self._run_started_s, self._agenda.now_s, (), num_decodes, num_steps))
        self._decoded(self._decode_run)
        if self._own.num_left <= 0 and (own_steps := self._own.take()) is not None:
            self._report(DecodeStepsDone(self.instance_id, own_steps))
        self._want_turn(self.instance_id)

    def _decoded(self, ends_s: Sequence[float]) -> None:
        """Every resident has a token more for each of the steps; those with all of theirs end."""
        told = self._residents.decoded(ends_s)
        for run in told.finished:
            self._finish(run)
        if told.low:
            self._report(CreditLow(self.instance_id, told.low))

    def _finish(self, run: RequestRun) -> None:
        key = (run.current.request_id, run.current.epoch)
        self._report(
            RequestFinished(self.instance_id, *key, FinishReason.LENGTH, run.num_output_tokens, self._own.take())
        )
        self._release(key)

    # --- transfers ---

    def _grant(self, key: RequestKey) -> None:
        prefill = self._prefills.get(key)
        if prefill is None:
            return  # the request ended with its first token while the grant was on its way
        assert prefill.last_turn is not None, f"{key}: granted without an offer"
        prefill.granted = True
        if prefill.granted_s is None:
            prefill.granted_s = self._agenda.now_s
        self._move(key, prefill, 0.0)

    def _pause(self, key: RequestKey) -> None:
        prefill = self._prefills[key]
        assert prefill.granted, f"{key}: paused without a grant"
        assert prefill.transfer is not None
        prefill.granted = False
        prefill.num_unsent_bytes += self._links.drop(key)
        self._report(TransferPaused(self.instance_id, *key, prefill.transfer.transfer_id))

    def _move(self, key: RequestKey, prefill: _Prefill, num_bytes: float) -> None:
        if prefill.transfer is None:
            return
        prefill.num_unsent_bytes += num_bytes
        if prefill.granted:
            self._links.send(key, self.instance_id, prefill.transfer.destination_ids[0], prefill.num_unsent_bytes)
            prefill.num_unsent_bytes = 0.0

    def drained(self, key: RequestKey) -> None:
        """All KV that may move so far has moved; it has landed if that is all of it."""
        prefill = self._prefills[key]
        if prefill.computed_s is None:
            return
        assert prefill.granted_s is not None
        assert prefill.transfer is not None
        plan, now_s = prefill.transfer, self._agenda.now_s
        num_bytes, duration_s = self._num_kv_bytes(prefill.run), now_s - prefill.granted_s
        prefill.run.granted_s, prefill.run.landed_s = prefill.granted_s, now_s
        prefill.run.exposed_s = now_s - prefill.computed_s
        del self._prefills[key]
        self._land(plan, key, duration_s)
        self._report(
            TransferSent(self.instance_id, *key, plan.transfer_id, num_bytes, duration_s, prefill.run.exposed_s)
        )
        self._release(key)

    def land(self, plan: TransferPlan, key: RequestKey, duration_s: float) -> None:
        """A request's whole KV is here."""
        run = self._runs[key]
        self._report(TransferLanded(self.instance_id, *key, plan.transfer_id, self._num_kv_bytes(run), duration_s))
        self._join(run)

    def _join(self, run: RequestRun) -> None:
        run.decode_id = self.instance_id
        self._residents.join(run, self._blocks[run.current.request_id, run.current.epoch])
        self._stir()

    def _num_kv_bytes(self, run: RequestRun) -> int:
        return round(run.current.num_prompt_tokens * self._token_bytes)
