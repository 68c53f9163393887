"""A modelled instance: it carries out the core's commands as a worker does, in the time that a latency model says.

It runs the next plan if there is one, else a decode step over its residents, unless a plan has them held. Consecutive
decode steps are one appointment. When a plan or a resident comes in between, it is cut short to the end of the step
that is then running, so the result is the same as step by step.

An urgent plan runs when a planned step that is running comes to the end of its layer; all layers take equally long.
What is left of the interrupted step is computed after it.

A step with a chunk of a prompt that several instances compute in turn (`pdmesh.sim.exchange`) ends when it is computed,
and no sooner than a layer's time after the KV of the tokens before has come. While it waits, urgent plans run. The
members of a parallel step are all in the same layer, so a slice of it ends no sooner than the one before it, and its
last KV.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from math import ceil
from typing import assert_never

from pdmesh.core.commands import (
    AdmitPrefill,
    CancelMove,
    FreeKv,
    GrantTransfer,
    GrowKv,
    InstanceCommand,
    KeepKv,
    PauseTransfer,
    PlaceDecode,
    ResumeDecode,
    RunStep,
    SetGroup,
    SetRole,
    StopInstance,
    WithdrawTransfer,
)
from pdmesh.core.events import (
    DecodeReserved,
    DecodeStepsDone,
    Event,
    HelperJoined,
    KvLow,
    KvReleased,
    RequestFinished,
    TransferLanded,
)
from pdmesh.core.instances.own_steps import HOLD_LIMIT_S, OwnSteps
from pdmesh.model import FinishReason, InstanceId, InstanceProfile, RequestKey, TransferId, TransferPurpose
from pdmesh.plans import ChunkPlan, PrefillGroup, StepPlan, TransferPlan
from pdmesh.policy.latency import ChunkShape, LatencyModel, StepShape
from pdmesh.sim.agenda import Agenda, Appointment
from pdmesh.sim.departures import Prefill, SimulatedDepartures
from pdmesh.sim.exchange import SimulatedExchange
from pdmesh.sim.groups import SimulatedGroups
from pdmesh.sim.holdings import Holdings
from pdmesh.sim.links import SimulatedLinks
from pdmesh.sim.moves import SimulatedMoves
from pdmesh.sim.planned_step import PlannedStep
from pdmesh.sim.residents import Residents
from pdmesh.sim.result import RequestRun, StepSpan


class SimInstance:
    """``report`` takes events for the scheduler; ``want_turn`` asks to `begin` after all else of this instant."""

    def __init__(
        self,
        profile: InstanceProfile,
        model: LatencyModel,
        *,
        agenda: Agenda,
        links: SimulatedLinks,
        exchange: SimulatedExchange,
        runs: dict[RequestKey, RequestRun],
        report: Callable[[Event], None],
        land: Callable[[TransferPlan, RequestKey, float], None],
        want_turn: Callable[[InstanceId], None],
        max_decode_steps: int,
        parallel_step_s: float = 0.0,
    ) -> None:
        self.profile = profile
        self.instance_id = profile.instance_id
        self.steps: list[StepSpan] = []
        self.model = model
        self._agenda = agenda
        self._links = links
        self._exchange = exchange
        self._runs = runs
        self._report = report
        self._want_turn = want_turn
        self._max_decode_steps = max_decode_steps
        self._plans: deque[StepPlan] = deque()
        self._holdings = Holdings(profile.instance_id, profile.num_blocks, report)
        self._departures = SimulatedDepartures(
            profile, agenda=agenda, links=links, report=report, land=land, release=self._holdings.release
        )
        self._prefills = self._departures.prefills
        self._groups = SimulatedGroups(
            profile,
            agenda=agenda,
            exchange=exchange,
            departures=self._departures,
            parallel_step_s=parallel_step_s,
            report=report,
            end=self._end_step,
            go_on=self._go_on,
        )
        self._residents = Residents(profile.kv_layout.block_size)
        self._moves = SimulatedMoves(
            profile,
            agenda=agenda,
            links=links,
            residents=self._residents,
            runs=runs,
            report=report,
            land=land,
            stir=self._stir,
            join=self._join,
            release=self._holdings.release,
        )
        self._num_turns = 0
        self._busy = False
        self._step: PlannedStep | None = None
        self._interrupted: PlannedStep | None = None
        self._decode_run: list[float] = []  # when each step of the running decode run ends
        self._run_started_s = 0.0
        self._end_of_run: Appointment | None = None
        self._own = OwnSteps()
        self._release_of_hold: Appointment | None = None
        self._is_dead = False

    def die(self) -> None:
        """End the instance with all that it has; it does and reports nothing from now on."""
        self._is_dead = self._busy = True
        self._moves.end()
        running_s = self._decode_run if self._end_of_run is not None else ()
        self._residents.end(self._agenda.now_s, [end_s for end_s in running_s if end_s < self._agenda.now_s])
        steps = [step for step in (self._step, self._interrupted) if step is not None]
        kept = [*(step.end for step in steps), *(step.interruption for step in steps)]
        for appointment in (*kept, self._end_of_run, self._release_of_hold):
            if appointment is not None:
                appointment.cancel()
        self._step = self._interrupted = self._end_of_run = None
        self._exchange.lost(self.instance_id)
        self._links.cut_off(self.instance_id)

    # --- commands ---

    def take(self, command: InstanceCommand) -> None:
        if self._is_dead:
            return
        match command:
            case AdmitPrefill():
                key = (command.request_id, command.epoch)
                self._holdings.hold(key, command.num_blocks)
                if not command.leads:
                    self._report(HelperJoined(self.instance_id, *key))
                    return  # the leader has the books of it
                run = self._runs[key]
                run.prefill_id = self.instance_id
                if run.placed_s is None:
                    run.placed_s = self._agenda.now_s
                self._prefills[key] = Prefill(run, command.transfer, command.moves_on)
            case SetGroup():
                self._set_group((command.request_id, command.epoch), command.group)
            case PlaceDecode():
                key = (command.request_id, command.epoch)
                self._holdings.hold(key, command.num_blocks, command.transfer.transfer_id)
                self._report(DecodeReserved(self.instance_id, *key, command.transfer.transfer_id))
            case RunStep():
                if command.plan.urgent:
                    self._plans.appendleft(command.plan)
                    self._plan_interruption()
                else:
                    self._plans.append(command.plan)
                self._stir()
            case GrantTransfer(transfer=transfer) if transfer.purpose is TransferPurpose.MOVE:
                self._moves.begin((command.request_id, command.epoch), transfer)
            case GrantTransfer():
                self._departures.grant((command.request_id, command.epoch), command.transfer)
            case KeepKv():
                key = (command.request_id, command.epoch)
                self._holdings.grow(key, command.num_blocks)
                if (kept := self._departures.keep(key)) is not None:
                    self._join(kept)
            case PauseTransfer():
                self._departures.pause((command.request_id, command.epoch))
            case WithdrawTransfer():
                self._departures.withdraw((command.request_id, command.epoch), command.transfer_id)
            case CancelMove():
                self._cancel_move((command.request_id, command.epoch), command.transfer_id)
            case FreeKv():
                key = (command.request_id, command.epoch)
                self._moves.drop(key)
                self._groups.forget(key)
                if key in self._prefills:
                    self._departures.forget(key)
                    self._exchange.forget(key)
                if self._residents.free(key):
                    self._stir()
                elif key in self._holdings:
                    self._holdings.release(key)
                else:  # it has left at this very moment
                    self._report(KvReleased(self.instance_id, *key, command.transfer_id))
            case GrowKv():
                key, num_blocks = (command.request_id, command.epoch), command.num_blocks
                if self._holdings.grow(key, num_blocks) and self._residents.grow(key, num_blocks):
                    self._stir()
            case SetRole() | ResumeDecode():
                pass  # what fails to move has gone on meanwhile
            case StopInstance():
                raise AssertionError("a simulated mesh has no operators")
            case _:
                assert_never(command)

    def _set_group(self, key: RequestKey, group: PrefillGroup) -> None:
        steps = [step for step in (self._step, self._interrupted) if step is not None]
        self._groups.tell(key, group, self._plans, steps)
        if self._step is not None and self._step.gives_up and self._step.waits and self._step.end is None:
            self._end_step()

    def _cancel_move(self, key: RequestKey, transfer_id: TransferId) -> None:
        if key in self._holdings:  # else it has ended
            self._moves.cancel(key, transfer_id)

    def drawn_s(self, key: RequestKey) -> Sequence[float]:
        """Return the times of the tokens, up to now, of a request that decodes here."""
        if self._is_dead:
            return self._runs[key].token_times_s
        return self._residents.drawn_s(key, self._agenda.now_s, self._decode_run if self._end_of_run else ())

    # --- steps ---

    def _stir(self) -> None:
        """Take up new work: now if idle, else when the running step has ended."""
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
            if key in self._moves:
                self._moves.left(key)
            else:
                self._holdings.release(key)
        if self._plans:
            self._begin_step(self._plans.popleft())
        elif self._own.held:
            if self._release_of_hold is None:
                self._release_of_hold = self._agenda.at(self._agenda.now_s + HOLD_LIMIT_S, self._decode_on)
        elif self._residents:
            self._begin_decodes()

    def _decode_on(self) -> None:
        """Decode on, because nothing was planned since the hold began."""
        self._release_of_hold = None
        self._own.held = False
        self._stir()

    def _begin_step(self, plan: StepPlan) -> None:
        self._busy = True
        self._own.planned(plan)
        if self._release_of_hold is not None:
            self._release_of_hold.cancel()
            self._release_of_hold = None
        if self._interrupted is None:
            self._num_turns += 1
        held = [chunk for chunk in plan.chunks if (chunk.request_id, chunk.epoch) in self._holdings]
        shapes = [self._begin_chunk(chunk) for chunk in held]
        num_decodes = len(self._residents) if plan.with_decodes else 0
        num_context_tokens = self._residents.num_context_tokens if num_decodes else 0
        duration_s = self.model.step_s(StepShape(tuple(shapes), num_decodes, num_context_tokens))
        now_s = self._agenda.now_s
        step = self._step = PlannedStep(plan, num_decodes, num_context_tokens, now_s, duration_s, now_s + duration_s)
        step.undone = tuple([chunk for chunk in plan.chunks if chunk not in held])
        self._groups.began(step)
        step.end = self._agenda.at(step.end_s, self._end_step)

    def _plan_interruption(self) -> None:
        """Plan an interruption at the end of the layer that is being computed, unless that is the last one."""
        step, now_s = self._step, self._agenda.now_s
        if step is None or step.plan.urgent:
            return
        num_layers = self.profile.kv_layout.num_layers
        if step.waits:
            step.interruption = self._agenda.at(now_s, self._interrupt)
            return
        layer_s = step.duration_s / num_layers
        num_done = ceil((now_s - step.started_s - step.nested_s) / layer_s - 1e-9)
        if num_done < num_layers:
            at_s = max(now_s, step.started_s + step.nested_s + num_done * layer_s)
            step.interruption = self._agenda.at(at_s, self._interrupt)

    def _interrupt(self) -> None:
        """Run the urgent plan now; what is left of the running step comes after it."""
        step = self._interrupted = self._step
        assert step is not None
        if step.end is not None:
            step.end.cancel()
        for chunk in step.plan.chunks:
            if run := self._runs.get((chunk.request_id, chunk.epoch)):
                run.num_preemptions += 1
        self._begin_step(self._plans.popleft())

    def _resume(self, step: PlannedStep, nested_s: float) -> None:
        self._busy = True
        self._step, self._interrupted = step, None
        step.nested_s += nested_s
        if not step.waits:  # else it took no time of its own
            step.end_s += nested_s
        step.end = self._agenda.at(max(step.end_s, self._agenda.now_s), self._end_step)

    def _begin_chunk(self, chunk: ChunkPlan) -> ChunkShape:
        key = (chunk.request_id, chunk.epoch)
        prefill = self._prefills.get(key)
        is_shared = self._exchange.is_shared(key)
        if is_shared:
            self._exchange.began(key, chunk, self.instance_id)
        if prefill is None:
            assert key in self._holdings, f"{key}: a chunk of a request that is not here"
            return ChunkShape(chunk.num_tokens, chunk.start)  # a group's, led by another
        num_computed_tokens = prefill.num_computed_tokens  # by itself
        in_order = chunk.start == num_computed_tokens or (is_shared and chunk.start > num_computed_tokens)
        assert in_order, f"{key}: chunk at {chunk.start} out of order"
        if prefill.last_turn is None:
            if prefill.run.started_s is None:
                prefill.run.started_s = self._agenda.now_s
            self._departures.offer(key, prefill)
        elif self._num_turns - prefill.last_turn > 1:
            prefill.run.num_preemptions += 1
        prefill.last_turn = self._num_turns
        self._departures.began(key, prefill, chunk)
        return ChunkShape(chunk.num_tokens, chunk.start)

    def _end_step(self) -> None:
        step, now_s = self._step, self._agenda.now_s
        assert step is not None
        if self._groups.waits(step):
            return
        if step.interruption is not None:
            step.interruption.cancel()
        plan, num_decodes = step.plan, step.num_decodes
        self._busy = False
        self._step = None
        self.steps.append(step.span(now_s))
        self._report(step.done(self.instance_id, self._own.take(), now_s))
        for chunk in plan.chunks:
            if chunk not in step.undone:
                self._end_chunk(chunk)
        if num_decodes:
            self._decoded([now_s])
        if self._interrupted is not None:
            self._resume(self._interrupted, now_s - step.started_s)
        else:
            self._want_turn(self.instance_id)

    def _go_on(self, step: PlannedStep) -> None:
        """The KV that it waited for is here. One that is interrupted looks for itself when it is resumed."""
        if self._step is step:
            self._end_step()

    def _end_chunk(self, chunk: ChunkPlan) -> None:
        key = (chunk.request_id, chunk.epoch)
        if self._exchange.is_shared(key):
            self._exchange.ended(key, chunk, self.instance_id)
        prefill = self._prefills.get(key)
        if prefill is None:
            return  # a group's, led by another
        prefill.num_computed_tokens = chunk.start + chunk.num_tokens
        if chunk.is_last:
            self._groups.forget(key)
            prefill.computed_s = self._agenda.now_s
            prefill.run.token_times_s = [*prefill.run.token_times_s, self._agenda.now_s]
            if prefill.run.num_output_tokens == len(prefill.run.token_times_s):
                self._departures.forget(key)
                self._finish(prefill.run)
                return
            if not prefill.moves_on:
                self._departures.forget(key)
                self._join(prefill.run)
                return
        self._departures.ended(key, prefill, chunk)

    def _begin_decodes(self) -> None:
        self._busy = True
        num_decodes, num_context_tokens = len(self._residents), self._residents.num_context_tokens
        num_steps = min(self._residents.steps_left, self._max_decode_steps, self._own.num_left)
        end_s, step_s = self._agenda.now_s, self.model.step_s
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
            self._report(KvLow(self.instance_id, told.low))

    def _finish(self, run: RequestRun) -> None:
        key = (run.current.request_id, run.current.epoch)
        self._moves.drop(key)
        self._report(
            RequestFinished(self.instance_id, *key, FinishReason.LENGTH, run.num_output_tokens, self._own.take())
        )
        self._holdings.release(key)

    # --- transfers ---

    def drained(self, key: RequestKey) -> None:
        """All KV of a request that is computed or decodes here, and may move so far, has moved."""
        if key in self._moves:
            self._moves.drained(key)
        else:
            self._departures.drained(key)

    def land(self, plan: TransferPlan, key: RequestKey, duration_s: float) -> None:
        """A request's whole KV is here."""
        if self._is_dead:
            return
        run = self._runs[key]
        self._report(
            TransferLanded(self.instance_id, *key, plan.transfer_id, self._departures.num_kv_bytes(run), duration_s)
        )
        self._join(run)

    def _join(self, run: RequestRun) -> None:
        run.decode_id = self.instance_id
        self._residents.join(run, self._holdings.num_blocks((run.current.request_id, run.current.epoch)))
        self._stir()
