"""A simulated instance: an instance machine whose times come from a latency model and the links.

An idle instance runs the next plan if there is one, else a decode step over its residents, unless a plan holds these.
Consecutive decode steps are one appointment. A plan or a resident that arrives meanwhile cuts the appointment short, to
the end of the running step. So the result is the same as step by step.

An urgent plan runs when the running planned step reaches the end of its layer; all layers take equally long. The rest
of the interrupted step is computed afterwards.

A step with a chunk of a shared prompt (`pdmesh_lab.sim.exchange`) ends when it is computed, but no sooner than a
layer's time after the KV before the chunk has come. While it waits, urgent plans run. The members of a parallel step
are all in the same layer. So a slice ends no sooner than the slice before it, and the last KV of that slice.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from math import ceil
from typing import assert_never

from pdmesh.core.commands import InstanceCommand
from pdmesh.core.events import GroupPrefix
from pdmesh.core.instances.own_steps import HOLD_LIMIT_S
from pdmesh.instance.counted import CountedMachine
from pdmesh.instance.effects import (
    Admitted,
    BeganToDecode,
    Computed,
    CopyEvent,
    CopyLanded,
    CopyPaused,
    Effect,
    Expect,
    Forget,
    Froze,
    OwnerEffect,
    PauseSending,
    Planned,
    Refused,
    Regrouped,
    Rehomed,
    ResidentsChange,
    SendKv,
    Stood,
    StopSending,
    WaitNoLonger,
)
from pdmesh.instance.lost_ranges import LostRanges
from pdmesh.instance.residents import Length
from pdmesh.instance.sequence_phases import SeqPhase
from pdmesh.model import InstanceId, InstanceProfile, RequestKey, Then
from pdmesh.plans import ChunkPlan
from pdmesh.policy.latency import ChunkShape, LatencyModel, StepShape
from pdmesh_lab.sim.agenda import Timer
from pdmesh_lab.sim.context import SimContext
from pdmesh_lab.sim.departures import Prefill
from pdmesh_lab.sim.flows import SimulatedFlows
from pdmesh_lab.sim.groups import SimulatedGroups
from pdmesh_lab.sim.loads import SimulatedLoads
from pdmesh_lab.sim.planned_step import PlannedStep
from pdmesh_lab.sim.result import RequestRun, StepSpan
from pdmesh_lab.sim.sent_kv import SimulatedCopies


class SimInstance:
    """Simulated instance whose latency model gives the time of each step."""

    def __init__(self, profile: InstanceProfile, model: LatencyModel, context: SimContext) -> None:
        self.profile = profile
        self.instance_id = profile.instance_id
        self.steps: list[StepSpan] = []
        self.model = model
        self._agenda = agenda = context.agenda
        self._links = links = context.links
        self._exchange = context.exchange
        self._runs = context.runs
        self._want_turn = context.want_turn
        self._max_decode_steps = context.max_decode_steps
        self._part_exchange_s = context.part_exchange_s * profile.kv_layout.num_layers
        self._report = context.report
        self._machine = machine = CountedMachine(profile, self._length_of)
        self._steps, self._residents = machine.steps, machine.residents
        flows = SimulatedFlows(
            profile, agenda=agenda, links=links, tell=self._tell, land=context.land, land_ranges=context.land_ranges
        )
        self.copies = copies = SimulatedCopies(flows, context.runs, machine.residents)
        self._departures = departures = copies.departures
        self._groups = SimulatedGroups(
            profile,
            agenda=agenda,
            exchange=context.exchange,
            departures=departures,
            sequences=machine.sequences,
            parallel_step_s=context.parallel_step_s,
            end=self._end_step,
            go_on=self._go_on,
        )
        self._loads = SimulatedLoads(profile, agenda=agenda, end=self._end_step)
        self._lost_ranges = LostRanges()
        self._range_step: Timer | None = None  # end of the step
        self._num_turns = 0
        self._busy = False
        self._step: PlannedStep | None = None
        self._interrupted: PlannedStep | None = None
        self._decode_run: list[float] = []  # end of each step in the running decode run
        self._run_started_s = 0.0
        self._end_of_run: Timer | None = None
        self._ends_s = array("d")  # ends of all steps with decodes; a resident's token times are a slice
        self._release_of_hold: Timer | None = None
        self._is_dead = False

    def die(self) -> None:
        """End the instance with all its state. From now on it does and reports nothing."""
        self._is_dead = self._busy = True
        self.copies.end()
        self._lost_ranges.clear()
        for key in self._residents.staying():
            if (run := self._runs.get(key)) is not None:  # otherwise its tokens belong to a later epoch
                run.token_times_s = self._drawn_s(key, run, bisect_left(self._running_s, self._agenda.now_s))
        steps = [step for step in (self._step, self._interrupted) if step is not None]
        kept = [*(step.end for step in steps), *(step.interruption for step in steps)]
        for appointment in (*kept, self._end_of_run, self._release_of_hold, self._range_step):
            if appointment is not None:
                appointment.cancel()
        self._step = self._interrupted = self._end_of_run = None
        self._exchange.lost(self.instance_id)
        self._links.cut_off(self.instance_id)

    # --- commands and their effects ---

    def lose_member(self, instance_id: InstanceId) -> None:
        """Take note that another instance is lost, which may hold ranges of contexts that decode here."""
        if not self._is_dead:
            self._do(self._machine.lose_member(instance_id))

    def take(self, command: InstanceCommand) -> None:
        if not self._is_dead:
            self._do(self._machine.obey(command))

    def _tell(self, event: CopyEvent) -> None:
        self._do(self._machine.copy_event(event))

    def _length_of(self, key: RequestKey) -> Length:
        run = self._runs[key]
        num_total_tokens = run.request.num_prompt_tokens + run.num_output_tokens
        current = run.current
        return Length(num_total_tokens, run.num_output_tokens, current.max_total_tokens, current.chain, run.drawn)

    def _do(self, effects: list[Effect]) -> None:
        """Carry out the machine's effects, in order."""
        for effect in effects:
            if isinstance(effect, tuple):
                self._carry_out(effect)
            else:
                self._report(effect)

    def _carry_out(self, effect: OwnerEffect) -> None:
        match effect:
            case Planned(plan=plan):
                if plan.urgent:
                    self._plan_interruption()
                self._residents_change()
            case ResidentsChange():
                self._residents_change()
            case Computed():
                self._computed(effect)
            case Stood(key=key, joined_step=joined_step):
                self._stood(key, joined_step)
            case Admitted():
                self._admitted(effect)
            case Forget(sequence=sequence):
                self._forget(sequence.key)
            case BeganToDecode(sequence=sequence):
                prefill = self._departures.forget(sequence.key)
                run = self._runs[sequence.key] if prefill is None else prefill.run
                run.decode_id = self.instance_id
            case SendKv(sequence=sequence, transfer=transfer):
                self.copies.send(sequence, transfer)
            case StopSending(sequence=sequence, transfer=transfer):
                self.copies.stop(sequence.key, transfer)
            case PauseSending(sequence=sequence, transfer=transfer):
                self.copies.stop(sequence.key, transfer)
                self._tell(CopyPaused(sequence.key, transfer.transfer_id))
            case Froze(sequence=sequence):
                self.copies.send_rest(sequence)
            case Regrouped(sequence=sequence):
                if sequence.leads:
                    self._groups.lead(sequence, [step.plan for step in self._steps.running])
            case WaitNoLonger():
                self._wait_no_longer(effect)
            case Expect(sequence=sequence) if sequence.prefix.num_loaded:
                self._loads.begin(sequence, self._land_load)
            case Expect() | Rehomed():
                pass
            case Refused(command=command, reason=reason):
                raise AssertionError(f"{self.instance_id} refuses {command}: {reason}")
            case _:
                assert_never(effect)

    def _admitted(self, effect: Admitted) -> None:
        sequence = effect.sequence
        num_reused_tokens = sequence.prompt.num_computed_tokens
        run = self._runs[sequence.key]
        run.prefill_id = self.instance_id
        if run.placed_s is None:
            run.placed_s = self._agenda.now_s
            run.num_reused_tokens = num_reused_tokens
        self._loads.begin(sequence)
        num_ready_bytes = num_reused_tokens * self._departures.token_bytes
        self._departures.prefills[sequence.key] = Prefill(sequence, run, num_ready_bytes=num_ready_bytes)

    def _forget(self, key: RequestKey) -> None:
        self._loads.forget(key)
        if self.copies.forget(key):
            self._exchange.forget(key)

    def _wait_no_longer(self, effect: WaitNoLonger) -> None:
        sequence, step = effect.sequence, self._step
        if sequence.leads:
            num_tokens = self._groups.num_present_tokens(sequence.key)
            self._report(GroupPrefix(self.instance_id, *sequence.key, num_tokens, len(effect.group.lost_ids)))
        given_up = sequence.prompt.given_up
        if step is not None and step.waits and step.end is None and step.plan.plan_id in given_up:
            self._end_step()

    # --- when tokens were drawn ---

    @property
    def _running_s(self) -> Sequence[float]:
        """End of each decode step of the running decode run."""
        return self._decode_run if self._end_of_run is not None else ()

    def _stood(self, key: RequestKey, joined_step: int) -> None:
        run = self._runs.get(key)
        if run is not None:  # otherwise resumed in a later epoch, with its tokens
            run.token_times_s = array("d", [*run.token_times_s, *self._ends_s[joined_step:]])

    def drawn_s(self, key: RequestKey, run: RequestRun) -> Sequence[float]:
        """Return the times of the tokens, up to now, of a request that decodes here."""
        if self._is_dead:
            return run.token_times_s
        return self._drawn_s(key, run, bisect_right(self._running_s, self._agenda.now_s))

    def _drawn_s(self, key: RequestKey, run: RequestRun, num_running: int) -> Sequence[float]:
        """Return the times of a request's tokens in all ended steps and the first ``num_running`` running ones."""
        joined_step = self._residents.joined_step(key)
        if joined_step is None:
            return [*run.token_times_s]
        return [*run.token_times_s, *self._ends_s[joined_step:], *self._running_s[:num_running]]

    # --- steps ---

    def _residents_change(self) -> None:
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
        self._do(self._machine.turn())
        if self._lost_ranges.next is not None and not (self._steps.plans and self._lost_ranges.is_plans_turn):
            self._begin_range_step()
        elif self._steps.plans:
            self._lost_ranges.is_plans_turn = False
            self._begin_step()
        elif self._machine.own.held:
            if self._release_of_hold is None:
                self._release_of_hold = self._agenda.at(self._agenda.now_s + HOLD_LIMIT_S, self._decode_on)
        elif self._residents:
            self._begin_decodes()

    def _decode_on(self) -> None:
        """End the hold of decodes, because nothing was planned since it began."""
        self._release_of_hold = None
        self._machine.own.held = False
        self._residents_change()

    def _begin_step(self) -> None:
        self._busy = True
        step = self._step = self._next_step()
        step.end = self._agenda.at(step.end_s, self._end_step)

    def _next_step(self) -> PlannedStep:
        """Begin the step of the next plan and return it."""
        self._do(self._machine.begin_step())
        running = self._steps.running[-1]
        if self._release_of_hold is not None:
            self._release_of_hold.cancel()
            self._release_of_hold = None
        if self._interrupted is None:
            self._num_turns += 1
        sequences = self._machine.sequences
        chunks = [chunk for chunk in running.plan.chunks if (chunk.request_id, chunk.epoch) in sequences]
        shapes = tuple([self._begin_chunk(chunk) for chunk in chunks])
        duration_s = self._step_s(StepShape(shapes, running.num_decodes, running.num_context_tokens))
        if any(sequences[chunk.request_id, chunk.epoch].asks_others for chunk in chunks):
            duration_s += self._part_exchange_s
        now_s = self._agenda.now_s
        return PlannedStep(running, now_s, duration_s, now_s + duration_s)

    def _step_s(self, shape: StepShape) -> float:
        """Return the time of a step. Reading ranges here of contexts that decode elsewhere is part of it.

        A step that decodes a spread context takes at least the time in which the other instances read one range each.
        """
        exchanges = shape.num_decodes > 0 and self._residents.num_spread > 0
        if exchanges and shape.num_decode_context_tokens < self.profile.max_kv_tokens:
            shape = shape._replace(num_decode_context_tokens=self.profile.max_kv_tokens)
        limit = self.profile.max_kv_tokens
        sequences = self._machine.sequences.values() if limit else ()
        num_part_tokens = sum([limit for sequence in sequences if sequence.phase is SeqPhase.HOLDING])
        if num_part_tokens:
            shape = shape._replace(num_decode_context_tokens=shape.num_decode_context_tokens + num_part_tokens)
        return self.model.step_s(shape) + (self._part_exchange_s if exchanges else 0.0)

    def _plan_interruption(self) -> None:
        """Plan an interruption at the end of the layer that is being computed, unless it is the last one."""
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
        """Run the urgent plan now; the rest of the interrupted step comes after it."""
        step = self._interrupted = self._step
        assert step is not None
        if step.end is not None:
            step.end.cancel()
        for chunk in step.plan.chunks:
            if run := self._runs.get((chunk.request_id, chunk.epoch)):
                run.num_preemptions += 1
        self._begin_step()

    def _resume(self, step: PlannedStep, nested_s: float) -> None:
        self._busy = True
        self._step, self._interrupted = step, None
        step.nested_s += nested_s
        if not step.waits:  # a waiting step keeps its end
            step.end_s += nested_s
        step.end = self._agenda.at(max(step.end_s, self._agenda.now_s), self._end_step)

    def _begin_chunk(self, chunk: ChunkPlan) -> ChunkShape:
        key, shape = (chunk.request_id, chunk.epoch), ChunkShape(chunk.num_tokens, chunk.start)
        if self._exchange.is_shared(key):
            self._exchange.began(key, chunk, self.instance_id)
        prefill = self._departures.prefills.get(key)
        if prefill is None:
            return shape  # led by another instance
        if prefill.last_turn is None:
            if prefill.run.started_s is None:
                prefill.run.started_s = self._agenda.now_s
        elif self._num_turns - prefill.last_turn > 1:
            prefill.run.num_preemptions += 1
        prefill.last_turn = self._num_turns
        self._departures.began(prefill, chunk.num_tokens)
        if prefill.sequence.asks_others:  # each attends to a range, at the same time
            limit = self.profile.max_kv_tokens
            num_here = chunk.start - len(prefill.sequence.members) * limit
            shape = shape._replace(num_history_tokens=max(limit, num_here))
        return shape

    def _end_step(self) -> None:
        step, now_s = self._step, self._agenda.now_s
        assert step is not None
        if self._groups.waits(step) or self._loads.waits(step):
            return
        if step.interruption is not None:
            step.interruption.cancel()
        self._busy = False
        self._step = None
        self.steps.append(step.span(now_s))
        if self._steps.draws_with(step.running):
            self._ends_s.append(now_s)
        uncomputed = self._groups.uncomputed(step.plan)
        duration_s = step.computed_s(now_s)
        self._do(self._machine.end_step(uncomputed, duration_s=duration_s, began_s=step.started_s, ended_s=now_s))
        if self._interrupted is not None:
            self._resume(self._interrupted, now_s - step.started_s)
        else:
            self._want_turn(self.instance_id)

    def _computed(self, effect: Computed) -> None:
        key, chunk = effect.sequence.key, effect.chunk
        if self._exchange.is_shared(key):
            self._exchange.ended(key, chunk, self.instance_id)
        self._loads.forget(key)
        prefill = self._departures.prefills.get(key)
        if prefill is None:
            return  # led by another instance
        if chunk.is_last:
            prefill.computed_s = self._agenda.now_s
            prefill.run.token_times_s = [*prefill.run.token_times_s, self._agenda.now_s]
        if not effect.ends:
            self._departures.ended(prefill, chunk.num_tokens)

    def _go_on(self, step: PlannedStep) -> None:
        """End a step whose missing KV has come; an interrupted step checks for itself when it is resumed."""
        if self._step is step:
            self._end_step()

    def _begin_decodes(self) -> None:
        self._busy = True
        residents = self._residents
        num_decodes, num_context_tokens = len(residents), residents.num_context_tokens
        num_steps = min(residents.steps_left, self._max_decode_steps, self._machine.own.num_left)
        end_s, step_s = self._agenda.now_s, self._step_s
        num_share = self._steps.shares.largest(num_decodes)
        self._run_started_s = end_s
        ends_s: list[float] = []
        for _ in range(num_steps):
            end_s += step_s(StepShape((), num_share, num_context_tokens * num_share // num_decodes))
            ends_s.append(end_s)
            num_context_tokens += num_decodes
        self._decode_run = ends_s
        self._end_of_run = self._agenda.at(end_s, self._end_decodes)

    def _begin_range_step(self) -> None:
        """Compute a chunk of a lost range, beside the decodes of this instance."""
        self._busy = self._lost_ranges.is_plans_turn = True
        residents, now_s = self._residents, self._agenda.now_s
        num_decodes = 0 if self._machine.own.held else len(residents)
        chunk, size = self._lost_ranges.next_chunk(), self.profile.max_kv_tokens
        # holders of earlier ranges attend at the same time, so a chunk takes as long as one behind a whole range
        shape = ChunkShape(chunk.num_tokens, min(chunk.start, size))
        duration_s = self._step_s(StepShape((shape,), num_decodes, residents.num_context_tokens if num_decodes else 0))
        if chunk.start >= self.profile.max_kv_tokens:
            duration_s += self._part_exchange_s
        span = StepSpan(now_s, now_s + duration_s, (chunk,), num_decodes)
        self._range_step = self._agenda.at(span.end_s, lambda: self._end_range_step(span))

    def _end_range_step(self, span: StepSpan) -> None:
        self._busy, self._range_step = False, None
        self.steps.append(span)
        if span.num_decodes:
            self._ends_s.append(span.end_s)
            self._do(self._machine.draw(1))
        chunk = span.chunks[0]
        sequence = self._machine.sequences.get((chunk.request_id, chunk.epoch))
        if sequence is not None and sequence is self._lost_ranges.next and self._lost_ranges.end_chunk(sequence, chunk):
            self._tell(CopyLanded(sequence.key, self.profile.max_kv_tokens, 0, 0.0))
        self._want_turn(self.instance_id)

    def _end_decodes(self) -> None:
        self._busy = False
        self._end_of_run = None
        num_decodes, num_steps = len(self._residents), len(self._decode_run)
        began_s, ended_s = self._run_started_s, self._agenda.now_s
        before = self.steps[-1] if self.steps else None
        if before is not None and not before.chunks and before.num_decodes == num_decodes and before.end_s == began_s:
            before.end_s = ended_s
            before.num_steps += num_steps
        else:
            self.steps.append(StepSpan(began_s, ended_s, (), num_decodes, num_steps))
        self._ends_s.extend(self._decode_run)
        duration_s = ended_s - began_s
        self._do(self._machine.make_own_steps(num_steps, duration_s=duration_s, began_s=began_s, ended_s=ended_s))
        self._want_turn(self.instance_id)

    # --- transfers ---

    def land_range(self, key: RequestKey, duration_s: float) -> None:
        """Note that a range has landed here, of a prompt that another instance still computes."""
        sequence = None if self._is_dead else self._machine.sequences.get(key)
        if sequence is not None and sequence.phase is SeqPhase.EXPECTED:
            num_bytes = self.profile.max_kv_tokens * self.profile.kv_layout.token_bytes
            self._tell(CopyLanded(key, self.profile.max_kv_tokens, num_bytes, duration_s))

    def _land_load(self, key: RequestKey) -> None:
        """Note that granules from the tier are here, unless they are no longer wanted."""
        if not self._is_dead and key in self._machine.sequences:
            self._tell(CopyLanded(key, 0, 0, 0.0))

    def land(self, key: RequestKey, duration_s: float) -> None:
        """Note that a request's whole KV has landed here, all granules of a fetch, or the tokens of a lost range."""
        if self._is_dead:
            return
        sequence = self._machine.sequences[key]
        transfer = sequence.incoming
        if transfer is None or sequence.phase is SeqPhase.HOLDING:
            return  # landed before
        num_tokens = num_bytes = 0
        if transfer.then is Then.KEEP:
            num_bytes = self.copies.fetches.num_bytes(sequence, transfer)
        elif transfer.computes:
            size = self.profile.max_kv_tokens
            assert sequence.part is not None, f"{key} is no range"
            self._lost_ranges.begin(sequence, sequence.part * size, (sequence.part + 1) * size)
            self._residents_change()
            return
        else:
            run = self._runs[key]
            num_tokens = run.request.num_prompt_tokens + len(run.token_times_s)
            num_bytes = self._departures.num_kv_bytes(run, transfer)
        self._tell(CopyLanded(key, num_tokens, num_bytes, duration_s))
