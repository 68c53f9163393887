"""Batching mode of each instance, and the work that the mode allows now. `pdmesh.policy.batching` defines the modes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf, log, log1p
from typing import NamedTuple

from pdmesh.core.instances.batching_state import BatchingState
from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.instances.lengths_seen import LengthsSeen
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.requests.request import RequestState
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import Role
from pdmesh.plans import StepPlan
from pdmesh.policy.batching import Batching, DecodePhase, Load, Mode, ModeChoice, other_mode
from pdmesh.policy.bundle import Bundle
from pdmesh.policy.latency import ChunkShape, LinearLatencyModel, StepShape
from pdmesh.policy.packing import CHUNK_UNIT_TOKENS, ChunkSizer
from pdmesh.policy.probing import StepTotals
from pdmesh.policy.views import InstanceView

#: Least number of ended requests in a cycle. A cycle of an exclusive instance also has a phase of each kind.
_MIN_CYCLE = 8

#: Cycles that an instance stays in a mode before it may switch again.
_DWELL = 3

#: Share of a running mean that remains after each cycle.
_FORGETTING = 0.7

#: Least share of a decode instance's requests that must be computed there before its modes are compared.
_LEAST_SHARE = 0.05

#: Share of a predicted decode phase after which an interrupted prefill phase resumes. Less than 1, so that the backlog
#: shrinks.
_RESUMED_AFTER = 0.5

#: Share of a decode step's constant time that a prefill phase waits for more requests. The wait costs next to nothing:
#: the instance begins another decode step before any plan can reach it.
_GATHERING = 0.5

#: Least time between the starts of prefill phases of two instances of a pool.
_LEAST_GAP_S = 0.001


class BatchingView(NamedTuple):
    """An instance's batching, for display.

    ``idle_share``: share of the seats at which a decode phase ends. ``gain``: predicted throughput of exclusive over
    mixed batching, less 1. ``reason``: why a faster mode is not chosen.
    """

    mode: Mode
    is_prefill_phase: bool
    num_seats: int
    idle_share: float
    gain: float | None
    reason: str


class Modes:
    """Batching modes and phases of the mesh's instances.

    The packer asks for permission to begin prompts, and reports sent plans and ended requests. ``wake_s`` is the
    earliest time at which time alone may end a decode phase, as of the last packing.
    """

    def __init__(self, mesh: MeshState) -> None:
        self._mesh = mesh
        self._lengths = LengthsSeen()
        self._policy: Batching | None = None
        #: Time at which another instance may begin a prefill phase, by KV group.
        self._turns: dict[str, float] = {}
        self.wake_s = inf

    # --- ended requests ---

    def finished(self, state: RequestState, num_output_tokens: int) -> None:
        """Count the lengths of a request that ended by itself, if it was never resumed and has output."""
        if state.request.epoch == 0 and num_output_tokens > 0:
            self._lengths.add(state.num_reused_tokens, state.num_work_tokens, num_output_tokens - 1)

    def released(
        self, instance: InstanceState, bundle: Bundle, model: LinearLatencyModel, *, was_computed_here: bool
    ) -> None:
        """Count a request that freed its seat. The last one of a cycle may change the instance's mode.

        Not counted unless the bundle adapts the mode and the instance can switch.
        """
        batching = instance.batching
        if not instance.allocated.num_seats_taken:
            batching.meter.forget()
        if not bundle.batching.adapts or not can_switch(instance):
            return
        batching.sum_taken += instance.allocated.num_seats_taken + 1
        batching.sum_waiting += len(self._mesh.queue)
        batching.num_ended += 1
        batching.num_computed += was_computed_here
        if batching.num_ended >= max(_MIN_CYCLE, batching.choice.idle_share * (batching.num_slots or 0)):
            self._end_cycle(instance, bundle, model)

    def _end_cycle(self, instance: InstanceState, bundle: Bundle, model: LinearLatencyModel) -> None:
        batching = instance.batching
        share = batching.num_computed / batching.num_ended
        if not instance.role_prefills and batching.share_computed is not None:
            share = _FORGETTING * batching.share_computed + (1 - _FORGETTING) * share
        batching.share_computed = 1.0 if instance.role_prefills else share
        num_waiting = batching.share_computed * batching.sum_waiting / len(self._pool(instance))
        mean = (batching.sum_taken + num_waiting) / batching.num_ended
        known = batching.num_slots
        batching.num_slots = mean if known is None else _FORGETTING * known + (1 - _FORGETTING) * mean
        batching.sum_taken = batching.sum_waiting = batching.num_ended = batching.num_computed = 0
        batching.num_dwelt += 1
        if self._lengths.is_enough:
            self._choose(instance, bundle, model)

    def _choose(self, instance: InstanceState, bundle: Bundle, model: LinearLatencyModel) -> None:
        batching = instance.batching
        batching.model = model
        assert batching.num_slots is not None
        num_slots = min(batching.num_slots, instance.max_num_seqs)
        costs = self._lengths.costs(model, instance.switches.switch_s(model), num_slots)
        if costs.decode_step_s <= 0 or costs.switch_s <= 0:
            return
        tally = batching.meter.take()
        if batching.choice.mode is Mode.MIXED and not batching.probing.is_on:
            batching.together.note(tally)
        own_s = [slo_s for slo_s in instance.view.slo_tpots_s if slo_s is not None]
        assert batching.share_computed is not None
        few_prompts = batching.share_computed < _LEAST_SHARE
        # A search for a threshold takes up to ``rounds`` times longer.
        rounds = 1.0 if few_prompts else 1 / batching.share_computed
        held, limit = self._lengths.moments, bundle.packing.step_limit(instance.view)
        load = Load(
            num_slots=num_slots,
            max_num_seqs=instance.max_num_seqs,
            num_kv_tokens=instance.num_blocks * instance.block_size,
            lengths=replace(held, mean_output_tokens=rounds * held.mean_output_tokens),
            threshold=self._lengths.threshold(costs, num_slots, rounds),
            costs=costs,
            tpot_s=min(own_s, default=None),
            mixed_limit=limit,
            correction=batching.probing.correction,
            together=batching.together.number,
            held=held,
            max_stall_s=inf if instance.role_prefills else limit.seconds,
            few_prompts=few_prompts,
        )
        if bundle.batching.probes:
            self._learn(batching, tally, load, model)
            load = load._replace(correction=batching.probing.correction)
        choice = bundle.batching.choose(load, batching.home)
        if choice.mode is not batching.home and batching.num_dwelt < _DWELL:
            choice = choice._replace(mode=batching.home)
        if choice.mode is not batching.home or choice.reason:
            batching.probing.restart()
        self._set(instance, choice)

    def _learn(self, batching: BatchingState, tally: StepTotals, load: Load, model: LinearLatencyModel) -> None:
        """Note the cycle that ended, which may begin or end a probe. After a probe, correct the predicted gain."""
        probing, gain = batching.probing, batching.choice.gain
        if gain is None or batching.choice.reason:
            return
        predicted = log1p(gain) - probing.correction.log_gain
        probed = probing.passed(tally, log1p(gain)) if batching.choice.is_open else None
        if probed is None:
            return
        there_s = probed.decode_s(model, load.costs, load.lengths)
        here_s = probing.at_home.decode_s(model, load.costs, load.lengths)
        if there_s is not None and here_s is not None:
            measured = log(here_s / there_s)
            probing.learn((-measured if batching.home is Mode.EXCLUSIVE else measured) - predicted)

    def _set(self, instance: InstanceState, choice: ModeChoice) -> None:
        """Set the chosen mode, or the other one during a probe."""
        batching = instance.batching
        if choice.mode is not batching.home:
            batching.home = choice.mode
            batching.num_dwelt = 0
        if batching.probing.is_on:
            choice = choice._replace(mode=other_mode(choice.mode))
        if choice.mode is not batching.choice.mode:
            batching.gathers_s = None
            self._mesh.changed[instance.instance_id] = None
        batching.choice = choice

    # --- prefill phases that may begin ---

    def look_at(self, bundle: Bundle) -> None:
        """Give changed instances the first choice of the bundle's batching; all instances if the batching is new.

        Call before packing. An instance whose batching policy is equal keeps its choice.
        """
        self.wake_s = inf
        policy = bundle.batching
        changed = self._mesh.changed if policy is self._policy else self._mesh.instances
        self._policy = policy
        for instance_id in list(changed):
            instance = self._mesh.instances.get(instance_id)
            if instance is None:
                continue
            batching = instance.batching
            if batching.chosen_by is not policy:
                # An equal policy is a new object after each change of latencies.
                if batching.chosen_by != policy:
                    batching.probing.restart()
                    self._set(instance, policy.first)
                batching.chosen_by = policy

    def mode_of(self, instance: InstanceState) -> Mode:
        """Return the chosen mode, or mixed if a separate prefill phase would stall decodes for too long.

        Also mixed while the instance computes a prompt that is too long for the choice, or cannot switch.
        """
        choice = instance.batching.choice
        if choice.mode is Mode.MIXED or not can_switch(instance):
            return Mode.MIXED
        if instance.longest_prefill_tokens > choice.max_prompt_tokens:
            return Mode.MIXED
        stall_s = _max_stall_s(instance)
        if stall_s < choice.least_stall_s or stall_s < _least_chunk_s(instance):
            return Mode.MIXED
        return choice.mode

    def may_begin(
        self, instance: InstanceState, head: RequestState, bundle: Bundle, now_s: float, *, has_begun: bool
    ) -> bool:
        """Whether the instance may begin the prefill of ``head`` now. If only time is missing, lower `wake_s`.

        ``has_begun``: the step that is being packed already has a prompt.
        """
        if self.mode_of(instance) is Mode.MIXED:
            return True
        batching, choice = instance.batching, instance.batching.choice
        start = instance.num_reusable_granules(head.request) * GRANULE_TOKENS
        num_tokens = head.request.num_prompt_tokens - start
        if bundle.is_long(head.request, start) and num_tokens > choice.max_prompt_tokens:
            # The instance is mixed once it computes this prompt.
            return True
        num_seats = min(choice.num_seats or instance.max_num_seqs, instance.max_num_seqs)
        num_busy = instance.allocated.num_seats_taken
        num_idle = max(0, num_seats - num_busy)
        if batching.holds_decodes or has_begun:
            least = ChunkShape(min(CHUNK_UNIT_TOKENS, num_tokens), start)
            fits = has_begun or self.within_phase(instance, (), least) > 0
            return fits and (num_idle > 0 or num_busy == 0)
        num_blocks = max(1, instance.num_first_blocks(head.request))
        phase = DecodePhase(
            now_s=now_s,
            began_s=batching.decodes_from_s,
            limit_s=2 * choice.cycle_s if choice.cycle_s else inf,
            num_seats=num_seats,
            num_busy=num_busy,
            num_fillable=min(len(self._mesh.queue), num_idle, instance.num_free_blocks // num_blocks),
            urgent_s=_latest_start_s(head, now_s),
            turn_s=self._turns.get(instance.kv_group, -inf),
        )
        if num_busy and batching.resumes_s > -inf:
            return self._is_time(min(phase.urgent_s, batching.resumes_s), now_s)
        begin_s = bundle.batching.prefills_from_s(choice, phase)
        if begin_s <= now_s < phase.urgent_s and num_busy:
            begin_s = self._gathered_s(instance, now_s)
        else:
            batching.gathers_s = None
        return self._is_time(begin_s, now_s)

    @staticmethod
    def _gathered_s(instance: InstanceState, now_s: float) -> float:
        """Return when a prefill phase that could begin now has waited long enough for more requests.

        Several requests may end with one step, and each is reported separately. A phase that began with the first one
        would leave the other seats idle until the next phase.
        """
        batching = instance.batching
        if batching.gathers_s is None:
            batching.gathers_s = now_s
        model = batching.model
        return batching.gathers_s + _GATHERING * (model.decode_a_s + model.weights_s if model is not None else 0.0)

    def _is_time(self, begin_s: float, now_s: float) -> bool:
        if begin_s <= now_s:
            return True
        self.wake_s = min(self.wake_s, begin_s)
        return False

    def may_go_on(self, instance: InstanceState, now_s: float, *, has_begun: bool) -> bool:
        """Whether the instance may continue its begun prompts now; if only after a decode phase, lower `wake_s`."""
        batching = instance.batching
        if has_begun or batching.holds_decodes or not _is_limited(instance) or self.mode_of(instance) is Mode.MIXED:
            return True
        return self._is_time(batching.resumes_s, now_s)

    def within_phase(self, instance: InstanceState, beside: Sequence[ChunkShape], chunk: ChunkShape) -> int:
        """Return how many tokens of ``chunk`` fit into the phase's time limit, in a step that also has ``beside``."""
        batching = instance.batching
        if batching.model is None or not _is_limited(instance) or self.mode_of(instance) is Mode.MIXED:
            return chunk.num_tokens
        sizer = ChunkSizer(batching.model, chunk.num_tokens)
        step = StepShape(tuple(beside), 0, 0)
        return sizer.largest(step, chunk.num_history_tokens, chunk.num_tokens, _phase_left_s(instance))

    def ends_phase(self, instance: InstanceState) -> bool:
        """Whether a prefill phase is over, given that the packer found no prompt for a free step slot."""
        return not instance.prefills or _is_limited(instance)

    def _pool(self, instance: InstanceState) -> list[InstanceState]:
        """Return the instances of the same KV group that have modes to choose from."""
        return [
            other
            for other in self._mesh.instances.values()
            if other.kv_group == instance.kv_group and can_switch(other)
        ]

    # --- phases ---

    def view(self, instance: InstanceState) -> BatchingView | None:
        """Return the batching of an instance for display; None if it has no modes to choose from."""
        if not can_switch(instance):
            return None
        choice = instance.batching.choice
        return BatchingView(
            mode=self.mode_of(instance),
            is_prefill_phase=instance.batching.holds_decodes,
            num_seats=choice.num_seats or instance.max_num_seqs,
            idle_share=choice.idle_share,
            gain=choice.gain,
            reason=choice.reason,
        )

    def beside(self, instance: InstanceState) -> InstanceView:
        """Return the instance's load beside a new chunk: without decodes if the mode is exclusive."""
        if self.mode_of(instance) is Mode.MIXED:
            return instance.view
        return replace(instance.view, role=Role.MIXED, num_decoding=0, num_resident_tokens=0, slo_tpots_s=frozenset())

    def sent(self, instance: InstanceState, plan: StepPlan, now_s: float) -> None:
        """Follow a plan that was sent: it may begin, extend or end a prefill phase. An urgent plan changes nothing."""
        batching, holds = instance.batching, plan.holds_decodes
        if plan.urgent or not (holds or batching.holds_decodes):
            return
        if holds and not batching.holds_decodes:
            self._enter(instance, now_s)
        if holds:
            self._mesh.in_prefill_phase[instance.instance_id] = instance
            if batching.model is not None:
                chunks = tuple([ChunkShape(chunk.num_tokens, chunk.start) for chunk in plan.chunks])
                batching.phase_s += batching.model.step_s(StepShape(chunks, 0, 0))
        else:
            self._leave(instance, now_s)
            self._mesh.in_prefill_phase.pop(instance.instance_id, None)
        batching.holds_decodes = holds

    def _enter(self, instance: InstanceState, now_s: float) -> None:
        """Begin a prefill phase. Other exclusive instances of the pool wait for half of their share of a cycle."""
        num_exclusive = sum(self.mode_of(other) is Mode.EXCLUSIVE for other in self._pool(instance))
        if num_exclusive > 1:
            gap_s = max(_LEAST_GAP_S, instance.batching.choice.cycle_s / (2 * num_exclusive))
            self._turns[instance.kv_group] = now_s + gap_s
        instance.batching.gathers_s = None
        instance.batching.prefills_from_s = now_s
        instance.batching.phase_s = 0.0

    def _leave(self, instance: InstanceState, now_s: float) -> None:
        """End a prefill phase. If its time limit ended it, resume it after `_RESUMED_AFTER` of a decode phase."""
        batching = instance.batching
        batching.decodes_from_s, batching.resumes_s = now_s, -inf
        if not _is_limited(instance) or batching.model is None:
            return
        least_s = batching.model.step_s(StepShape((ChunkShape(CHUNK_UNIT_TOKENS, 0),), 0, 0))
        if instance.prefills or _phase_left_s(instance) < least_s:
            ends_s = max(now_s, batching.prefills_from_s + batching.phase_s)
            batching.resumes_s = ends_s + _RESUMED_AFTER * batching.choice.decodes_s


def _max_stall_s(instance: InstanceState) -> float:
    """Return the longest allowed prefill phase: the smallest TPOT target of a resident; infinite without a limit.

    A resident without a target counts with the choice's limit, which also bounds instances that decode by role alone.
    """
    most_s = instance.batching.choice.max_stall_s
    if most_s == inf:
        return inf
    least_s = min([most_s if slo_s is None else slo_s for slo_s in instance.view.slo_tpots_s], default=most_s)
    return least_s if instance.role_prefills else min(most_s, least_s)


def _least_chunk_s(instance: InstanceState) -> float:
    """Return the time of a phase with only the smallest chunk of the prompt with the longest history; 0 without any.

    A prompt whose smallest chunk does not fit into a phase would never end.
    """
    model = instance.batching.model
    if model is None or not instance.prefills:
        return 0.0
    history = max([state.num_planned_tokens for state in instance.prefills])
    return instance.switches.overhead_s + model.step_s(StepShape((ChunkShape(CHUNK_UNIT_TOKENS, history),), 0, 0))


def _is_limited(instance: InstanceState) -> bool:
    """Whether a prefill phase has a time limit, and would stall at least one request that decodes or soon will."""
    if instance.batching.choice.max_stall_s == inf:
        return False
    return instance.allocated.num_seats_taken > len(instance.prefills)


def _phase_left_s(instance: InstanceState) -> float:
    """Return the seconds left for more steps of the current prefill phase, or of a new one."""
    batching = instance.batching
    used_s = batching.phase_s if batching.holds_decodes else 0.0
    return _max_stall_s(instance) - instance.switches.overhead_s - used_s


def can_switch(instance: InstanceState) -> bool:
    """Whether an instance has modes to choose from: it has one stage, decodes by role, and prefills by role or locally.

    An instance of several stages runs steps of both kinds at once.
    """
    return instance.num_stages == 1 and instance.role_decodes and (instance.role_prefills or instance.prefills_locally)


def _latest_start_s(head: RequestState, now_s: float) -> float:
    """Return when a request must begin to keep its own target; infinite if it has none, or has missed it."""
    request = head.request
    if request.slo_ttft_s is None or not 0 < request.slo_ttft_s < inf:
        return inf
    due_s = request.arrival_s + request.slo_ttft_s
    return due_s - head.work_us / 1e6 if due_s > now_s else inf
