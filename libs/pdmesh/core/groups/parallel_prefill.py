"""Parallel steps: the members of a group that compute the next tokens of a prompt at once, and the slice of each.

Slices end together: a member that is free sooner gets more tokens. So the start of each member's current step is
recorded, to predict when that step ends. Where more of the prompt follows, later slices may end a little after earlier
ones (`pdmesh.policy.pacing`). Hence members always have their slices in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, islice
from math import ceil

from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.requests.request import RequestState
from pdmesh.model import InstanceId, RequestKey
from pdmesh.plans import StepPlan
from pdmesh.policy.bundle import Bundle
from pdmesh.policy.latency import ChunkShape, StepShape
from pdmesh.policy.pacing import lag
from pdmesh.policy.packing import CHUNK_UNIT_TOKENS
from pdmesh.policy.prefill_groups import GroupPolicy
from pdmesh.policy.views import PartialStep

#: Largest share of a parallel step that its members wait at the beginning, so as to be layers apart.
_MAX_WAIT = 0.1


class ParallelPrefill:
    """Choice of the members and slices of parallel steps."""

    def __init__(self, mesh: MeshState) -> None:
        self._mesh = mesh
        #: Current plan of each member of each prompt's group, and the time since when it is current.
        self._steps: dict[RequestKey, dict[InstanceId, tuple[int, float]]] = {}

    def of(
        self,
        state: RequestState,
        leader: InstanceState,
        spare: Sequence[InstanceState],
        group_policy: GroupPolicy,
        now_s: float,
    ) -> list[InstanceState] | None:
        """Return the members that compute the next tokens at once, in slice order: ``spare`` ones, and the leader last.

        None without a spare member, if fewer than two slices are left, or if the next token does not begin a block.
        """
        self._note_steps(state, now_s)
        start, num_left = state.num_planned_tokens, state.request.num_prompt_tokens - state.num_planned_tokens
        most = num_left // max(CHUNK_UNIT_TOKENS, leader.block_size)
        if start % leader.block_size or not spare or most < 2:
            return None
        left_s = self._left_s(state, group_policy, now_s)
        first = sorted(spare, key=lambda each: (left_s[each.instance_id], each.number))[: most - 1]
        return [*sorted(first, key=lambda each: state.prefill_ids.index(each.instance_id)), leader]

    def slices(
        self,
        members: Sequence[InstanceState],
        state: RequestState,
        group_policy: GroupPolicy,
        bundle: Bundle,
        now_s: float,
    ) -> tuple[list[tuple[InstanceState, int]], bool]:
        """Return the members' slices of the next parallel step, and whether all must be in the same layer.

        The rest of the prompt is cut into equal steps that fit the members. All are in the same layer in the last step,
        and where being layers apart would make the members wait too long (`_MAX_WAIT`).
        """
        size, start = members[-1].block_size, state.num_planned_tokens
        num_left = state.request.num_prompt_tokens - start
        left_s = self._left_s(state, group_policy, now_s)
        begin_s = [left_s[member.instance_id] for member in members]
        num_steps = ceil(num_left / _steps_tokens(members, state, bundle, now_s))
        if num_steps > 1:
            num_tokens, most = max(num_left // num_steps // size, 1) * size, (num_left - 1) // size * size
            step_s = group_policy.latency.step_s(StepShape((ChunkShape(num_tokens // len(members), start),), 0, 0))
            lag_s = step_s * lag(members[-1].profile.kv_layout.num_layers, len(members))
            lagging_s = list(accumulate(begin_s, lambda before_s, each_s: max(each_s, before_s + lag_s)))
            at_once = sum(lagging_s, 0.0) - sum(begin_s, 0.0) > _MAX_WAIT * step_s * len(members)
            slices = group_policy.slices(start, num_tokens, begin_s if at_once else lagging_s, size, lag_s, most)
        else:
            slices, at_once = group_policy.last_slices(start, num_left, begin_s, size), True
        return [(member, num) for member, num in zip(members, slices, strict=True) if num], at_once

    def forget(self, key: RequestKey) -> None:
        """Forget the recorded steps of a prompt's members."""
        self._steps.pop(key, None)

    def _note_steps(self, state: RequestState, now_s: float) -> None:
        known, noted = self._steps.get(state.key, {}), dict[InstanceId, tuple[int, float]]()
        for member_id in state.prefill_ids:
            for plan_id in islice(self._mesh.instances[member_id].plans, 1):
                before = known.get(member_id)
                noted[member_id] = (plan_id, now_s) if before is None or before[0] != plan_id else before
        self._steps[state.key] = noted

    def _left_s(self, state: RequestState, group_policy: GroupPolicy, now_s: float) -> dict[InstanceId, float]:
        """Return the predicted seconds until each member has ended its plans in flight.

        A member ends no chunk of the prompt before the earlier chunks have ended.
        """
        ends_s: dict[InstanceId, float] = {}
        plans: list[tuple[int, int, InstanceId, float]] = []
        for member_id in state.prefill_ids:
            ends_s[member_id] = self._steps[state.key].get(member_id, (-1, now_s))[1] - now_s
            start = -1
            for index, plan in enumerate(self._mesh.instances[member_id].plans.values()):
                starts = [chunk.start for chunk in plan.chunks if (chunk.request_id, chunk.epoch) == state.key]
                start = max([start, *starts])
                plans.append((start, index, member_id, _plan_s(plan, group_policy)))
        before_s = 0.0
        for start, _, member_id, plan_s in sorted(plans):
            ends_s[member_id] += plan_s
            if start >= 0:
                before_s = ends_s[member_id] = max(ends_s[member_id], before_s)
        return {member_id: max(0.0, end_s) for member_id, end_s in ends_s.items()}


def in_flight_s(instance: InstanceState, group_policy: GroupPolicy) -> float:
    """Return the predicted time of all steps that the instance has in flight."""
    return sum([_plan_s(plan, group_policy) for plan in instance.plans.values()])


def _plan_s(plan: StepPlan, group_policy: GroupPolicy) -> float:
    chunks = tuple([ChunkShape(chunk.num_tokens, chunk.start) for chunk in plan.chunks])
    return group_policy.latency.step_s(StepShape(chunks, 0, 0))


def _steps_tokens(members: Sequence[InstanceState], state: RequestState, bundle: Bundle, now_s: float) -> int:
    """Return how many of a prompt's next tokens fit into one step of all members together, at least 1.

    If a member also decodes, each member counts only with the tokens that fit into the shortest of the steps.
    """
    num_tokens, least = 0, state.request.num_prompt_tokens
    for member in members:
        start = state.num_planned_tokens + num_tokens
        fits = bundle.packing.num_tokens(
            member.view, PartialStep(now_s), state.request, start, num_reused_tokens=state.num_reused_tokens
        )
        num_tokens, least = num_tokens + fits, min(least, fits)
    decodes = any(member.allocated.num_decoding for member in members)
    return max(1, least * len(members)) if decodes else num_tokens
