"""Prompts that several instances compute in turn: the helpers and their chunks, by `pdmesh.policy.prefill_groups`.

A request's *leader* is the instance that it was placed on. The leader computes the last chunk, and the request's KV
moves on from there. *Helpers* compute chunks in steps without work of their own: a helper with a step slot takes the
next chunk. So a prompt of another request never waits for more than an instance's steps in flight. Short prompts
interrupt those steps on each member as anywhere.

A helper is asked with room for the whole prompt. It joins when it reports that room, so that no KV is sent to an
instance without it, and is freed after the last chunk. A group pauses while its leader also decodes: the residents
would wait for chunks of other instances. A group of a fixed size (`pdmesh.core.groups.formation`) is formed as its
prompt is placed, does not pause, and takes its members' decodes into its steps.

In a *parallel prefill* all members compute the next tokens at once. Each spare member has one slice. The slices are
planned together once all these members have room for a plan. A policy with `GroupPolicy.at_once` does so while few
prompts share the instances, and has members take turns else.

There is no deadlock. A chunk needs only chunks of the same prompt that were planned earlier. A step has at most one
chunk of a group, and instances run such steps in the planned order. Slices of a parallel step are planned in the order
of the prompt. Urgent plans, which run before others, have no chunk of a group.

If a helper is lost, the other members compute the missing tokens (`pdmesh.core.groups.recovery`). If the leader is
lost, the prompt starts again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, islice
from math import inf

from pdmesh.core.batching.modes import Modes
from pdmesh.core.batching.step_slots import StepSlots
from pdmesh.core.commands import RunStep
from pdmesh.core.events import KvExpected
from pdmesh.core.groups.formation import Formation
from pdmesh.core.groups.parallel_prefill import ParallelPrefill, in_flight_s
from pdmesh.core.groups.recovery import GroupRecovery, tell_group
from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.requests.phases import Phase
from pdmesh.core.requests.request import RequestState
from pdmesh.core.waiting.queue import in_order
from pdmesh.model import InstanceId, RequestKey
from pdmesh.plans import ChunkPlan, StepPlan
from pdmesh.policy.batching import Mode
from pdmesh.policy.bundle import Bundle
from pdmesh.policy.improvement import MinimumGain
from pdmesh.policy.prefill_groups import AT_ONCE_SHARE, GroupPolicy, Schedule
from pdmesh.policy.views import PartialStep

#: Largest share of a helper's free blocks that a prompt may take: the helper's own requests need room.
_MAX_SHARE = 0.5


class GroupPlanner:
    """Prompts that groups compute: asks helpers, and plans the members' chunks."""

    def __init__(self, mesh: MeshState, modes: Modes) -> None:
        self._mesh = mesh
        self._modes = modes
        self.recovery = GroupRecovery(mesh)
        #: Requests that may be helped.
        self._open: dict[RequestKey, RequestState] = {}
        #: Arrival time of the KV of a prompt's computed tokens on a helper, by helper and request.
        self._helping: dict[InstanceId, dict[RequestKey, float]] = {}
        self._minimum_gain = MinimumGain()
        #: Number of planned tokens and of spare instances when helpers were last considered.
        self._considered: dict[RequestKey, tuple[int, int]] = {}
        self._parallel = ParallelPrefill(mesh)
        self._formation = Formation(mesh)

    def arrived(self, state: RequestState, now_s: float) -> None:
        """Count the work of a request that joined the line. A busier mesh forms smaller groups."""
        self._minimum_gain.arrived(now_s, state.work_us * 1e-6, self._num_prefill)

    def _num_prefill(self) -> float:
        return max(1, sum(instance.takes_prompts for instance in self._mesh.instances.values()))

    def _share(self) -> float:
        """Return the number of instances that prefill for each prompt that may be helped."""
        return self._num_prefill() / max(1, len(self._open))

    def _policy(self, bundle: Bundle) -> GroupPolicy | None:
        """Return the rule for groups in force; None: no groups."""
        policy = bundle.group_policy
        if policy is None or policy.at_once is None or self._share() < AT_ONCE_SHARE:
            return policy
        return policy.at_once

    def awaits_members(self, state: RequestState, bundle: Bundle) -> bool:
        """Whether a waiting prompt is for a group of a fixed size, and too few instances are free for that group."""
        return bundle.group_policy is not None and self._formation.awaits_members(state, bundle)

    def placed(self, state: RequestState, bundle: Bundle) -> list[InstanceState]:
        """Let groups help with a request that was just placed, if its prompt is long and its leader joins groups.

        Returns the helpers that were asked; none unless the group has a fixed size.
        """
        leader = self._mesh.instances[state.prefill_ids[0]]
        is_long = bundle.is_long(state.request, state.num_reused_tokens)
        if bundle.group_policy is None or not leader.profile.joins_groups or not is_long:
            return []
        self._open[state.key] = state
        return self._form(state, bundle)

    def _form(self, state: RequestState, bundle: Bundle) -> list[InstanceState]:
        """Ask the helpers that a group of a fixed size lacks, and return them. They count the prompt as a long one."""
        leader = self._mesh.instances[state.prefill_ids[0]]
        helpers = self._formation.helpers(state, leader, bundle)
        for helper in helpers:
            self._formation.admit(state, leader, helper, long_tokens=state.num_work_tokens)
        return helpers

    def may_be_helped(self, key: RequestKey) -> bool:
        """Whether more instances may still be asked to help with a request."""
        return key in self._open or key in self._mesh.recovering

    @property
    def helped(self) -> list[RequestState]:
        """Requests with helpers whose prompts are not planned to the end, and that more instances may help."""
        return [state for state in self._open.values() if self._is_helped_on(state) and len(state.prefill_ids) > 1]

    def recover(self, bundle: Bundle, now_s: float) -> None:
        """Resume the prompts of groups that lost a helper, once the lost tokens are known."""
        for state in self.recovery.recover(bundle):
            self._open[state.key] = state
            self._considered.pop(state.key, None)
            for lost_id in () if state.group is None else state.group.lost_ids:
                self._helping.get(lost_id, {}).pop(state.key, None)
            for helper_id in state.prefill_ids[1:]:
                self._helping.setdefault(helper_id, {}).setdefault(state.key, now_s)

    def joined(self, event: KvExpected, now_s: float, bundle: Bundle) -> None:
        """Add a helper that reports room for the prompt, or free it if the group needs no more help.

        A report of an instance that was not asked is ignored.
        """
        instance = self._mesh.instances.get(event.instance_id)
        state = self._mesh.find((event.request_id, event.epoch))
        if instance is None or state is None or event.instance_id not in self._awaited(state):
            self._mesh.ignore("KvExpected")
            return
        if not self._is_helped_on(state) or state.key not in self._open:
            self._mesh.free(event.instance_id, state.key)
            return
        assert state.group is not None
        in_flight = [chunk.num_tokens for name in state.prefill_ids for chunk in self._in_flight(state, name)]
        num_computed_tokens = state.num_planned_tokens - sum(in_flight)
        state.group.join(event.instance_id, num_computed_tokens)
        copy_s = 0.0
        if bundle.group_policy is not None:
            leader, token_bytes = self._mesh.instances[state.prefill_ids[0]], instance.profile.kv_layout.token_bytes
            copy_s = num_computed_tokens * bundle.group_policy.link_s(leader.view, instance.view, token_bytes)
        self._helping.setdefault(event.instance_id, {})[state.key] = now_s + copy_s
        tell_group(self._mesh, state)

    def _awaited(self, state: RequestState) -> list[InstanceId]:
        """Return the instances that were asked to help and have not answered; empty without a group."""
        if state.group is None:
            return []
        asked = (self._mesh.instances.get(name) for name in state.asked_ids if name not in state.group.member_ids)
        return [
            instance.instance_id
            for instance in asked
            if instance is not None
            and (allocation := instance.allocations.get(state.key)) is not None
            and not allocation.freeing
        ]

    def _answers_soon(self, state: RequestState) -> bool:
        """Whether a healthy instance that was asked to help has not answered yet. Healthy ones answer at once."""
        return any(self._mesh.instances[name].takes_new for name in self._awaited(state))

    # --- the leader's chunks ---

    def first_tokens(
        self, leader: InstanceState, state: RequestState, most: int, idle: Iterable[InstanceState], bundle: Bundle
    ) -> int:
        """Return how many of ``most`` tokens the leader's first chunk has, before helpers are asked.

        The first chunk is short if there may be helpers: a helper gets that chunk's KV only when the chunk's step has
        ended. A short chunk ends with a block or the prompt. All of ``most`` for later chunks, and if no group may
        form.
        """
        if state.key not in self._open or most <= 0 or state.num_planned_tokens > state.num_reused_tokens:
            return most
        group_policy = self._policy(bundle)
        if group_policy is None or not self._may_form_group(leader, group_policy):
            return most
        spare = (each for each in idle if each is not leader and self._is_spare(each, group_policy))
        num_members = 1 + sum(1 for _ in islice(spare, group_policy.max_members - 1))
        first = group_policy.first_chunk_tokens(state.num_work_tokens, num_members, most)
        return self._cut(leader, state, first, None)

    def leader_tokens(
        self, leader: InstanceState, step: PartialStep, state: RequestState, most: int, bundle: Bundle
    ) -> int:
        """Return how many of ``most`` tokens go into the leader's step; 0 if the next chunk may not join the step.

        A step has one chunk of a group. Chunks wait for recoveries, asked helpers, parallel steps, and others' turns.
        """
        if any(self._mesh.requests[chunk.request_id].group is not None for chunk in step.chunks):
            return 0
        if state.is_recovering:
            return 0
        is_fixed = bundle.group_policy is not None and bundle.group_policy.group_size > 1
        if (is_fixed or state.chunks_in_flight) and self._answers_soon(state):
            return 0
        if self._parallel_members(state, bundle, step.now_s) is not None:
            return 0
        if self._had_last(state, leader.instance_id):
            return 0
        return self._cut(leader, state, most, None if state.group is None else self._policy(bundle))

    def holds_decodes_up(self, state: RequestState, bundle: Bundle) -> bool:
        """Whether decodes must stay out of the next chunk's step, because they would wait for a helper's chunk.

        False under a policy with groups beside decodes.
        """
        if state.group is None or (bundle.group_policy is not None and bundle.group_policy.beside_decodes):
            return False
        return any(self._in_flight(state, helper_id) for helper_id in state.prefill_ids[1:])

    def _had_last(self, state: RequestState, member_id: InstanceId) -> bool:
        """Whether a member has the chunk before the next one in flight, while other members could take the next one.

        Two consecutive chunks on one member would make each later chunk of the group a layer's time late.
        """
        ends = [chunk.start + chunk.num_tokens for chunk in self._in_flight(state, member_id)]
        return len(state.prefill_ids) > 1 and state.num_planned_tokens in ends

    def _in_flight(self, state: RequestState, member_id: InstanceId) -> list[ChunkPlan]:
        """Return the chunks of a request that an instance has in flight."""
        member = self._mesh.instances.get(member_id)
        plans = () if member is None else member.plans.values()
        return [chunk for plan in plans for chunk in plan.chunks if (chunk.request_id, chunk.epoch) == state.key]

    def _cut(self, leader: InstanceState, state: RequestState, most: int, group_policy: GroupPolicy | None) -> int:
        """Return a chunk length of about ``most`` tokens that ends with a block or with the prompt.

        With a policy and several members, at most the policy's chunk.
        """
        start, num_prompt_tokens, size = state.num_planned_tokens, state.request.num_prompt_tokens, leader.block_size
        num_members = 1 if state.group is None else len(state.group.living_ids)
        if group_policy is not None and num_members > 1:
            most = min(most, group_policy.chunk_tokens(start, num_prompt_tokens - start, num_members, most))
        end = start + most
        if most <= 0 or end >= num_prompt_tokens:
            return most
        return min(max(end // size, start // size + 1) * size, num_prompt_tokens) - start

    # --- the helpers' ---

    def help(self, step_slots: StepSlots, bundle: Bundle, now_s: float) -> bool:
        """Ask instances for help, and plan a parallel step, or a chunk for each helper with the fewest plans in flight.

        Returns whether a chunk was planned. Only instances with a step slot and no prompt of their own help.
        """
        if not self._open:
            return False
        for key in [key for key, state in self._open.items() if not self._is_helped_on(state)]:
            self._close(key)
        if bundle.group_policy is None or not self._open:
            return False
        spare = [each for each in step_slots.idle() if self._is_spare(each, bundle.group_policy)]
        if not spare or (group_policy := self._policy(bundle)) is None:
            return False
        for state in in_order(bundle.order, list(self._open.values()), now_s):
            if group_policy.group_size > 1:
                self._form(state, bundle)
            else:
                self._ask(state, spare, group_policy, self._most_members(state, group_policy, bundle))
            members = self._parallel_members(state, bundle, now_s)
            if members is not None and self._plan_parallel(members, state, group_policy, step_slots, bundle, now_s):
                return True
        # A helper with fewer plans in flight begins sooner, and later chunks wait for its chunk. Equal helpers take
        # turns in the order of their chunks in flight: in another order members would wait for each other to the end.
        helpers = sorted([each for each in spare if self._helping.get(each.instance_id)], key=_turn)
        for _, equals in groupby(helpers, key=lambda each: len(each.plans)):
            given = [self._give_chunk(instance, group_policy, bundle, now_s) for instance in tuple(equals)]
            if any(given):
                # The other helpers' turn comes after a leader with as few plans.
                return True
        return False

    def _is_helped_on(self, state: RequestState) -> bool:
        return state.phase is Phase.PREFILLING and not state.is_planned and self._mesh.find(state.key) is state

    def _close(self, key: RequestKey) -> None:
        del self._open[key]
        self._considered.pop(key, None)
        self._parallel.forget(key)
        for helped in self._helping.values():
            helped.pop(key, None)

    def _is_spare(self, instance: InstanceState, group_policy: GroupPolicy) -> bool:
        """Whether an instance may help: it joins groups, is in mixed mode, and has no prompt of its own.

        If the policy forbids help beside decodes, it also has no decodes.
        """
        return (
            instance.profile.joins_groups
            and instance.takes_prompts
            and not instance.prefills
            and (group_policy.beside_decodes or not instance.allocated.num_seats_taken)
            and self._modes.mode_of(instance) is Mode.MIXED
        )

    def _may_form_group(self, leader: InstanceState, group_policy: GroupPolicy) -> bool:
        rests = leader.allocated.num_decoding > 0 and not group_policy.beside_decodes
        return leader.takes_new and not rests and self._modes.mode_of(leader) is Mode.MIXED

    def _most_members(self, state: RequestState, group_policy: GroupPolicy, bundle: Bundle) -> int:
        """Return the largest useful group of a prompt: at most its share of the instances where prompts share them."""
        leader = self._mesh.instances[state.prefill_ids[0]]
        most = group_policy.most_members(leader.profile.kv_layout.num_layers)
        shares = bundle.group_policy is not None and bundle.group_policy.at_once is not None
        return min(most, max(2, int(self._share()))) if shares else most

    def _ask(
        self, state: RequestState, spare: list[InstanceState], group_policy: GroupPolicy, most_members: int
    ) -> None:
        """Ask the spare instances that would bring the first token forward by enough.

        Asks again only when the number of planned tokens or of spare instances has changed.
        """
        mesh, request = self._mesh, state.request
        leader = mesh.instances[state.prefill_ids[0]]
        considered = state.num_planned_tokens, len(spare)
        if self._considered.get(state.key) == considered or not self._may_form_group(leader, group_policy):
            return
        self._considered[state.key] = considered
        known = state.asked_ids if state.group is None else (*state.asked_ids, *state.group.member_ids)
        candidates = [
            instance
            for instance in spare
            if instance.arithmetic_class == leader.arithmetic_class
            and instance.instance_id not in known
            and instance.can_prefill(request)
            and instance.num_prefill_blocks(request) <= _MAX_SHARE * instance.num_free_blocks
        ]
        if not candidates:
            return
        members = {leader.instance_id, *state.prefill_ids, *self._awaited(state)}
        # Among instances that are free at the same time, the leader's host comes first.
        candidates.sort(key=lambda each: (each.profile.host != leader.profile.host, each.instance_id))
        line = [*(mesh.instances[name] for name in sorted(members)), *candidates]
        token_bytes = leader.profile.kv_layout.token_bytes
        helper_ids = group_policy.helpers(
            request.num_prompt_tokens,
            state.num_planned_tokens,
            members,
            [(in_flight_s(instance, group_policy), instance.instance_id) for instance in line],
            {each.instance_id: group_policy.link_s(leader.view, each.view, token_bytes) for each in line},
            most_members,
            self._minimum_gain.rate,
        )
        for helper_id in helper_ids:
            self._formation.admit(state, leader, mesh.instances[helper_id])

    def _give_chunk(self, helper: InstanceState, group_policy: GroupPolicy, bundle: Bundle, now_s: float) -> bool:
        """Plan the next chunk of the first helped request that has one for the helper. Return whether there was one."""
        helped = self._helping.get(helper.instance_id, {})
        for state in in_order(bundle.order, [self._open[key] for key in helped], now_s):
            leader = self._mesh.instances[state.prefill_ids[0]]
            if helped[state.key] > now_s + in_flight_s(leader, group_policy):
                # The KV of the computed tokens would arrive after the leader is free.
                continue
            start = state.num_planned_tokens
            if start % leader.block_size or state.is_planned or not self._may_form_group(leader, group_policy):
                continue
            if state.group is None or state.group.is_recovering:
                continue
            if self._parallel_members(state, bundle, now_s) is not None:
                continue
            if self._had_last(state, helper.instance_id):
                continue
            if self._in_flight(state, helper.instance_id) and self._answers_soon(state):
                # An asked instance can begin this chunk at once; here it would wait for the first one.
                continue
            most = bundle.packing.num_tokens(
                helper.view, PartialStep(now_s), state.request, start, num_reused_tokens=state.num_reused_tokens
            )
            num_tokens = self._cut(leader, state, most, group_policy)
            if 0 < num_tokens < state.request.num_prompt_tokens - start:
                self._plan(helper, leader, state, num_tokens, bundle, now_s)
                return True
        return False

    # --- all at once ---

    def _parallel_members(self, state: RequestState, bundle: Bundle, now_s: float) -> list[InstanceState] | None:
        """Return the members that compute the next tokens at once; None if they take turns, or the leader is alone."""
        if state.group is None or state.is_recovering:
            return None
        group_policy, leader = self._policy(bundle), self._mesh.instances[state.prefill_ids[0]]
        if group_policy is None or group_policy.schedule is Schedule.PIPELINED:
            return None
        if leader.prefills != [state] or not self._may_form_group(leader, group_policy):
            return None
        begin_s = now_s + in_flight_s(leader, group_policy)
        helpers = [self._mesh.instances[name] for name in state.prefill_ids[1:]]
        spare = [
            each
            for each in helpers
            if self._is_spare(each, group_policy)
            and self._helping.get(each.instance_id, {}).get(state.key, inf) <= begin_s
        ]
        return self._parallel.of(state, leader, spare, group_policy, now_s)

    def _plan_parallel(
        self,
        members: Sequence[InstanceState],
        state: RequestState,
        group_policy: GroupPolicy,
        step_slots: StepSlots,
        bundle: Bundle,
        now_s: float,
    ) -> bool:
        """Plan all slices of a parallel step, and return whether they were planned.

        They wait until each member has room for a plan, and until asked helpers have answered.
        """
        if state.chunks_in_flight and self._answers_soon(state):
            return False
        if not all(step_slots.has_room(member) for member in members):
            return False
        slices, at_once = self._parallel.slices(members, state, group_policy, bundle, now_s)
        for member, num_tokens in slices:
            self._plan(
                member, members[-1], state, num_tokens, bundle, now_s, in_parallel=len(slices) > 1, at_once=at_once
            )
        return True

    def _plan(
        self,
        member: InstanceState,
        leader: InstanceState,
        state: RequestState,
        num_tokens: int,
        bundle: Bundle,
        now_s: float,
        *,
        in_parallel: bool = False,
        at_once: bool = False,
    ) -> None:
        start = state.num_planned_tokens
        is_last = start + num_tokens == state.request.num_prompt_tokens
        chunk = ChunkPlan(
            request_id=state.key[0], epoch=state.key[1], start=start, num_tokens=num_tokens, is_last=is_last
        )
        group_policy = bundle.group_policy
        plan = StepPlan(
            plan_id=member.next_plan_id,
            chunks=(chunk,),
            with_decodes=group_policy is not None
            and group_policy.beside_decodes
            and member.allocated.num_seats_taken > 0
            and bundle.batching.carries_decodes(state.num_work_tokens),
            in_parallel=in_parallel,
            at_once=in_parallel and at_once,
        )
        member.begin_plan(plan, now_s)
        member.queue_tokens(num_tokens)
        leader.queue_tokens(-num_tokens)
        state.plan_chunk(member.instance_id, plan.plan_id, num_tokens)
        if is_last:
            leader.prefills.remove(state)
        else:
            state.rank_by(bundle.order)
        self._modes.sent(member, plan, now_s)
        self._mesh.commands.append(RunStep(instance_id=member.instance_id, plan=plan))
        if len(state.chunks_in_flight) == 1:
            self._mesh.offer_again(state)


def _turn(instance: InstanceState) -> tuple[int, int, int]:
    """Return the key that sorts helpers for their next chunk: fewest plans, then earliest chunk in flight."""
    starts = [chunk.start for plan in instance.plans.values() for chunk in plan.chunks]
    return len(instance.plans), min(starts, default=0), instance.number
