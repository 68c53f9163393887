"""A simulated instance: what one does (`pdmesh_lab.sim.untimed`), in the time that a latency model and the links say.

It runs the next plan if there is one, else a decode step over its residents, unless a plan has them held. Consecutive
decode steps are one appointment. When a plan or a resident comes in between, it is cut short to the end of the step
that is then running, so the result is the same as step by step.

An urgent plan runs when a planned step that is running comes to the end of its layer; all layers take equally long.
What is left of the interrupted step is computed after it.

A step with a chunk of a prompt that several instances compute in turn (`pdmesh_lab.sim.exchange`) ends when it is
computed, and no sooner than a layer's time after the KV of the tokens before has come. While it waits, urgent plans
run. The members of a parallel step are all in the same layer, so a slice of it ends no sooner than the one before it,
and its last KV.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

from pdmesh.core.commands import InstanceCommand
from pdmesh.core.events import Event
from pdmesh.core.instances.own_steps import HOLD_LIMIT_S
from pdmesh.model import InstanceId, InstanceProfile, RequestKey, TransferPurpose
from pdmesh.plans import ChunkPlan, PrefillGroup, StepPlan, TransferPlan
from pdmesh.policy.latency import ChunkShape, LatencyModel, StepShape
from pdmesh_lab.sim.agenda import Agenda, Appointment
from pdmesh_lab.sim.departures import Prefill, SimulatedDepartures
from pdmesh_lab.sim.exchange import SimulatedExchange
from pdmesh_lab.sim.flows import SimulatedFlows
from pdmesh_lab.sim.groups import SimulatedGroups
from pdmesh_lab.sim.held import Held
from pdmesh_lab.sim.links import SimulatedLinks
from pdmesh_lab.sim.loads import SimulatedLoads
from pdmesh_lab.sim.lost_ranges import SimulatedLostRanges
from pdmesh_lab.sim.moves import SimulatedMoves
from pdmesh_lab.sim.planned_step import PlannedStep
from pdmesh_lab.sim.residents import Length
from pdmesh_lab.sim.result import RequestRun, StepSpan
from pdmesh_lab.sim.untimed import UntimedInstance
from pdmesh_lab.sim.whole_flows import fetches, part_moves


@dataclass(frozen=True, slots=True, kw_only=True)
class SimContext:
    """What all instances of a simulation have in common."""

    agenda: Agenda
    links: SimulatedLinks
    exchange: SimulatedExchange
    runs: dict[RequestKey, RequestRun]  # by their newest epoch
    report: Callable[[Event], None]  # to the scheduler
    land: Callable[[TransferPlan, RequestKey, float], None]
    land_ranges: Callable[[TransferPlan, RequestKey, int, float], None]
    want_turn: Callable[[InstanceId], None]  # an instance asks to `begin` after all else of this instant
    max_decode_steps: int
    parallel_step_s: float = 0.0
    part_exchange_s: float = 0.0  # of a layer


class SimInstance:
    """One instance, whose latency model says how long a step takes."""

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
        self._untimed = untimed = UntimedInstance(
            profile, report=context.report, length_of=self._length_of, surroundings=self
        )
        flows = SimulatedFlows(
            profile, agenda=agenda, links=links, untimed=untimed, land=context.land, land_ranges=context.land_ranges
        )
        self._departures = departures = SimulatedDepartures(flows)
        self._groups = SimulatedGroups(
            profile,
            agenda=agenda,
            exchange=context.exchange,
            departures=departures,
            held=untimed.held,
            parallel_step_s=context.parallel_step_s,
            end=self._end_step,
            go_on=self._go_on,
        )
        self._loads = SimulatedLoads(profile, agenda=agenda, end=self._end_step)
        self._moves = SimulatedMoves(flows, context.runs)
        self._fetches = fetches(flows)
        self._parts = part_moves(flows)
        self._lost_ranges = SimulatedLostRanges(profile.max_kv_tokens)
        self._range_step: Appointment | None = None  # its end
        self._num_turns = 0
        self._busy = False
        self._step: PlannedStep | None = None
        self._interrupted: PlannedStep | None = None
        self._decode_run: list[float] = []  # when each step of the running decode run ends
        self._run_started_s = 0.0
        self._end_of_run: Appointment | None = None
        self._ends_s = array("d")  # of every step with decodes; a resident's token times are a slice of it
        self._release_of_hold: Appointment | None = None
        self._is_dead = False

    def die(self) -> None:
        """End the instance with all that it has; it does and reports nothing from now on."""
        self._is_dead = self._busy = True
        self._moves.end()
        self._fetches.end()
        self._parts.end()
        self._lost_ranges.clear()
        for key in self._untimed.residents.staying():
            if (run := self._runs.get(key)) is not None:  # else what it drew was taken from it
                run.token_times_s = self._drawn_s(key, run, bisect_left(self._running_s, self._agenda.now_s))
        steps = [step for step in (self._step, self._interrupted) if step is not None]
        kept = [*(step.end for step in steps), *(step.interruption for step in steps)]
        for appointment in (*kept, self._end_of_run, self._release_of_hold, self._range_step):
            if appointment is not None:
                appointment.cancel()
        self._step = self._interrupted = self._end_of_run = None
        self._exchange.lost(self.instance_id)
        self._links.cut_off(self.instance_id)

    # --- what it is told, and what that lets happen ---

    def lose_member(self, instance_id: InstanceId) -> None:
        """Another instance is gone, which may hold ranges of what decodes here."""
        if not self._is_dead:
            self._untimed.lose_member(instance_id)

    def take(self, command: InstanceCommand) -> None:
        if not self._is_dead:
            self._untimed.obey(command)

    def _length_of(self, key: RequestKey) -> Length:
        run = self._runs[key]
        num_total_tokens = run.request.num_prompt_tokens + run.num_output_tokens
        current = run.current
        return Length(num_total_tokens, run.num_output_tokens, current.max_total_tokens, current.chain, run.drawn)

    def admitted(self, held: Held) -> None:
        run = self._runs[held.key]
        run.prefill_id = self.instance_id
        if run.placed_s is None:
            run.placed_s = self._agenda.now_s
            run.num_reused_tokens = held.num_computed_tokens
        num_reused_bytes = held.num_computed_tokens * self._departures.token_bytes
        self._loads.begin(held)
        self._departures.prefills[held.key] = Prefill(held, run, num_ready_bytes=num_reused_bytes)

    def planned(self, plan: StepPlan) -> None:
        if plan.urgent:
            self._plan_interruption()
        self.stirs()

    def began_to_decode(self, held: Held) -> None:
        prefill = self._departures.forget(held.key)
        run = self._runs[held.key] if prefill is None else prefill.run
        run.decode_id = self.instance_id

    def sends(self, held: Held) -> None:
        if held.leaving is not None:
            self._moves.send(held, held.leaving)
        elif held.handing is not None:
            self._parts.send(held, held.handing)
        elif held.transfer is not None and held.transfer.purpose is TransferPurpose.FETCH:
            self._fetches.send(held, held.transfer)
        elif held.transfer is not None:
            self._departures.send(held, held.transfer)

    def stops_sending(self, held: Held) -> None:
        if held.leaving is not None:
            self._moves.stop(held.key)
        elif held.handing is not None:
            self._parts.stop(held.key)
        elif held.transfer is not None:
            self._departures.stop(held, held.transfer)

    def forgets(self, held: Held) -> None:
        self._moves.stop(held.key)
        self._parts.stop(held.key)
        self._lost_ranges.forget(held.key)
        self._fetches.stop(held.key)
        self._loads.forget(held.key)
        if self._departures.forget(held.key) is not None:
            self._exchange.forget(held.key)

    def regrouped(self, held: Held, known: PrefillGroup | None) -> None:
        if held.leads:
            self._groups.lead(held, [step.plan for step in self._untimed.running])

    def gave_up(self, held: Held) -> None:
        step = self._step
        if step is not None and step.waits and step.end is None and step.plan.plan_id in held.given_up:
            self._end_step()

    def has_before(self, held: Held, chunk: ChunkPlan) -> bool:
        return self._groups.has_before(held, chunk)

    def num_present_tokens(self, held: Held) -> int:
        return self._groups.num_present_tokens(held)

    # --- when tokens were drawn ---

    @property
    def _running_s(self) -> Sequence[float]:
        """When each of the decode steps under way ends."""
        return self._decode_run if self._end_of_run is not None else ()

    def stood(self, key: RequestKey, joined_step: int) -> None:
        run = self._runs.get(key)
        if run is not None:  # else it has been resumed in a later epoch, with what it had drawn by then
            run.token_times_s = array("d", [*run.token_times_s, *self._ends_s[joined_step:]])

    def drawn_s(self, key: RequestKey, run: RequestRun) -> Sequence[float]:
        """Return the times of the tokens, up to now, of a request that decodes here."""
        if self._is_dead:
            return run.token_times_s
        return self._drawn_s(key, run, bisect_right(self._running_s, self._agenda.now_s))

    def _drawn_s(self, key: RequestKey, run: RequestRun, num_running: int) -> Sequence[float]:
        """Tokens of all steps that have ended, and of so many of those under way."""
        joined_step = self._untimed.residents.joined_step(key)
        if joined_step is None:
            return [*run.token_times_s]
        return [*run.token_times_s, *self._ends_s[joined_step:], *self._running_s[:num_running]]

    # --- steps ---

    def stirs(self) -> None:
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
        for held in self._untimed.turn():
            self._moves.left(held)
        if self._lost_ranges and not (self._untimed.plans and self._lost_ranges.is_plans_turn):
            self._begin_range_step()
        elif self._untimed.plans:
            self._lost_ranges.is_plans_turn = False
            self._begin_step()
        elif self._untimed.own.held:
            if self._release_of_hold is None:
                self._release_of_hold = self._agenda.at(self._agenda.now_s + HOLD_LIMIT_S, self._decode_on)
        elif self._untimed.residents:
            self._begin_decodes()

    def _decode_on(self) -> None:
        """Decode on, because nothing was planned since the hold began."""
        self._release_of_hold = None
        self._untimed.own.held = False
        self.stirs()

    def _begin_step(self) -> None:
        self._busy = True
        step = self._step = self._next_step()
        step.end = self._agenda.at(step.end_s, self._end_step)

    def _next_step(self) -> PlannedStep:
        """Return the next plan's step, which begins."""
        running = self._untimed.begin_step()
        if self._release_of_hold is not None:
            self._release_of_hold.cancel()
            self._release_of_hold = None
        if self._interrupted is None:
            self._num_turns += 1
        held = self._untimed.held
        chunks = [chunk for chunk in running.plan.chunks if (chunk.request_id, chunk.epoch) in held]
        shapes = tuple([self._begin_chunk(chunk) for chunk in chunks])
        duration_s = self._step_s(StepShape(shapes, running.num_decodes, running.num_context_tokens))
        if any(held[chunk.request_id, chunk.epoch].asks_others for chunk in chunks):
            duration_s += self._part_exchange_s
        now_s = self._agenda.now_s
        return PlannedStep(running, now_s, duration_s, now_s + duration_s)

    def _step_s(self, shape: StepShape) -> float:
        """How long a step takes: ranges that are here of contexts that decode elsewhere are read beside it.

        One that decodes a context of which others hold ranges takes no less time than they take for one.
        """
        exchanges = shape.num_decodes > 0 and self._untimed.residents.num_spread > 0
        if exchanges and shape.num_decode_context_tokens < self.profile.max_kv_tokens:
            shape = shape._replace(num_decode_context_tokens=self.profile.max_kv_tokens)
        held = self._untimed.held.values() if self.profile.max_kv_tokens else ()
        num_part_tokens = sum([self.profile.max_kv_tokens for each in held if each.is_part and each.num_tokens])
        if num_part_tokens:
            shape = shape._replace(num_decode_context_tokens=shape.num_decode_context_tokens + num_part_tokens)
        return self.model.step_s(shape) + (self._part_exchange_s if exchanges else 0.0)

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
        self._begin_step()

    def _resume(self, step: PlannedStep, nested_s: float) -> None:
        self._busy = True
        self._step, self._interrupted = step, None
        step.nested_s += nested_s
        if not step.waits:  # else it took no time of its own
            step.end_s += nested_s
        step.end = self._agenda.at(max(step.end_s, self._agenda.now_s), self._end_step)

    def _begin_chunk(self, chunk: ChunkPlan) -> ChunkShape:
        key, shape = (chunk.request_id, chunk.epoch), ChunkShape(chunk.num_tokens, chunk.start)
        if self._exchange.is_shared(key):
            self._exchange.began(key, chunk, self.instance_id)
        prefill = self._departures.prefills.get(key)
        if prefill is None:
            return shape  # a group's, led by another
        if prefill.last_turn is None:
            if prefill.run.started_s is None:
                prefill.run.started_s = self._agenda.now_s
        elif self._num_turns - prefill.last_turn > 1:
            prefill.run.num_preemptions += 1
        prefill.last_turn = self._num_turns
        self._departures.began(prefill, chunk.num_tokens)
        if prefill.held.asks_others:  # who attend to a range each, at the same time
            limit = self.profile.max_kv_tokens
            num_here = chunk.start - len(prefill.held.members) * limit
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
        if self._untimed.draws_with(step.running):
            self._ends_s.append(now_s)
        self._untimed.end_step(duration_s=step.computed_s(now_s), began_s=step.started_s, ended_s=now_s)
        if self._interrupted is not None:
            self._resume(self._interrupted, now_s - step.started_s)
        else:
            self._want_turn(self.instance_id)

    def computed(self, held: Held, chunk: ChunkPlan, *, ends: bool) -> None:
        if self._exchange.is_shared(held.key):
            self._exchange.ended(held.key, chunk, self.instance_id)
        self._loads.forget(held.key)
        prefill = self._departures.prefills.get(held.key)
        if prefill is None:
            return  # a group's, led by another
        if chunk.is_last:
            prefill.computed_s = self._agenda.now_s
            prefill.run.token_times_s = [*prefill.run.token_times_s, self._agenda.now_s]
        if not ends:
            self._departures.ended(prefill, chunk.num_tokens)

    def _go_on(self, step: PlannedStep) -> None:
        """The KV that it waited for is here. One that is interrupted looks for itself when it is resumed."""
        if self._step is step:
            self._end_step()

    def _begin_decodes(self) -> None:
        self._busy = True
        residents = self._untimed.residents
        num_decodes, num_context_tokens = len(residents), residents.num_context_tokens
        num_steps = min(residents.steps_left, self._max_decode_steps, self._untimed.own.num_left)
        end_s, step_s = self._agenda.now_s, self._step_s
        num_share = self._untimed.shares.largest(num_decodes)
        self._run_started_s = end_s
        ends_s: list[float] = []
        for _ in range(num_steps):
            end_s += step_s(StepShape((), num_share, num_context_tokens * num_share // num_decodes))
            ends_s.append(end_s)
            num_context_tokens += num_decodes
        self._decode_run = ends_s
        self._end_of_run = self._agenda.at(end_s, self._end_decodes)

    def _begin_range_step(self) -> None:
        """Compute some of a lost range, beside the decodes that are here."""
        self._busy = self._lost_ranges.is_plans_turn = True
        residents, now_s = self._untimed.residents, self._agenda.now_s
        num_decodes = 0 if self._untimed.own.held else len(residents)
        chunk, shape = self._lost_ranges.next_chunk()
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
            self._untimed.draw(1)
        held = self._lost_ranges.computed(span.chunks[0])
        if held is not None:
            self._untimed.land(held, self.profile.max_kv_tokens, 0, 0.0)
        self._want_turn(self.instance_id)

    def _end_decodes(self) -> None:
        self._busy = False
        self._end_of_run = None
        num_decodes, num_steps = len(self._untimed.residents), len(self._decode_run)
        began_s, ended_s = self._run_started_s, self._agenda.now_s
        before = self.steps[-1] if self.steps else None
        if before is not None and not before.chunks and before.num_decodes == num_decodes and before.end_s == began_s:
            before.end_s = ended_s
            before.num_steps += num_steps
        else:
            self.steps.append(StepSpan(began_s, ended_s, (), num_decodes, num_steps))
        self._ends_s.extend(self._decode_run)
        self._untimed.make_own_steps(num_steps, duration_s=ended_s - began_s, began_s=began_s, ended_s=ended_s)
        self._want_turn(self.instance_id)

    # --- transfers ---

    def drained(self, key: RequestKey) -> None:
        """All KV of a request that is computed or decodes here, and may move so far, has moved."""
        if key in self._moves:
            self._moves.drained(key)
        elif key in self._fetches:
            self._fetches.drained(key)
        elif key in self._parts:
            self._parts.drained(key)
        else:
            self._departures.drained(key)

    def land_range(self, key: RequestKey, duration_s: float) -> None:
        """A range of a prompt is here, which is still being computed elsewhere."""
        held = None if self._is_dead else self._untimed.held.get(key)
        if held is not None and not held.num_tokens:
            num_bytes = self.profile.max_kv_tokens * self.profile.kv_layout.token_bytes
            self._untimed.land(held, self.profile.max_kv_tokens, num_bytes, duration_s)

    def land(self, key: RequestKey, duration_s: float) -> None:
        """A request's whole KV is here, or all granules of a fetch."""
        if self._is_dead:
            return
        held = self._untimed.held[key]
        if held.is_part and held.num_tokens:
            return  # it landed before
        if held.transfer is not None and held.transfer.purpose is TransferPurpose.FETCH:
            self._untimed.land_kept(held, self._fetches.num_bytes(held), duration_s)
            return
        if held.transfer is not None and held.transfer.purpose is TransferPurpose.LOST_PART:
            self._lost_ranges.begin(held)
            self.stirs()
            return
        run = self._runs[key]
        num_tokens = run.request.num_prompt_tokens + len(run.token_times_s)
        num_bytes = 0 if held.transfer is None else self._departures.num_kv_bytes(run, held.transfer)
        self._untimed.land(held, num_tokens, num_bytes, duration_s)
