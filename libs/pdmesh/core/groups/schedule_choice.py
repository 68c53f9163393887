"""Whether the members of a group take turns or compute at once, where either may be: by what groups took before.

Both are predicted (`pdmesh.policy.prefill_groups`), and each prediction is corrected by how much longer prompts took
that were shared so: what it costs to pass KV on, to wait for each other, and to be interrupted differs from machine to
machine. Each way is tried a few times at first. Later a prompt that was shared one way says something of the other,
too: what sets them apart is slowly forgotten, so that what was slower is tried again after some hundred prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, log

from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.requests import GroupState, RequestState, Shared
from pdmesh.policy.prefill_groups import GroupPolicy, Schedule

#: The weight of one prompt, for how it was shared, and for the other way.
_GAIN, _GAIN_OF_OTHER = 1 / 4, 1 / 256
#: So many prompts are shared each way at first.
_TRIES = 3
#: A prompt counts as no more than so many times as long or short as predicted: many may be stopped, or interrupted.
_MOST = log(4.0)


@dataclass(slots=True)
class _Way:
    """What prompts took that were shared in one way."""

    longer: float = 0.0  # than predicted, as a logarithm
    num: int = 0
    last: tuple[float, ...] = ()

    def took(self, seen: float) -> None:
        """Learn from the median of the last three, so that one interruption has no effect."""
        self.num += 1
        self.last = (*self.last, seen)[-_TRIES:]
        middle = sorted(self.last)[(len(self.last) - 1) // 2]
        self.longer += (1.0 if self.num <= _TRIES else _GAIN) * (middle - self.longer)


@dataclass(slots=True)
class _Taken:
    pipelined: _Way = field(default_factory=_Way)
    parallel: _Way = field(default_factory=_Way)

    def is_parallel(self, in_turn_s: float, at_once_s: float) -> bool:
        """Whether it is better to compute at once."""
        pipelined, parallel = self.pipelined, self.parallel
        if pipelined.num != parallel.num and min(pipelined.num, parallel.num) < _TRIES:
            return parallel.num < pipelined.num
        return at_once_s * exp(parallel.longer) < in_turn_s * exp(pipelined.longer)

    def took(self, seen: float, *, is_parallel: bool) -> None:
        """A prompt was shared in one way."""
        way, other = (self.parallel, self.pipelined) if is_parallel else (self.pipelined, self.parallel)
        way.took(seen)
        other.longer += _GAIN_OF_OTHER * (way.longer - other.longer)


class ScheduleChoice:
    """What is known of both ways, for each make of instances."""

    def __init__(self) -> None:
        self._taken: dict[str, _Taken] = {}  # by device class

    def is_parallel(
        self,
        state: RequestState,
        leader: InstanceState,
        num_members: int,
        num_steps: int,
        group_policy: GroupPolicy,
        now_s: float,
    ) -> bool:
        """Whether so many compute it at once, each in so many steps. What was said of a prompt once, stays so."""
        if group_policy.schedule is not Schedule.AUTO:
            return group_policy.schedule is Schedule.PARALLEL
        group = state.group
        assert group is not None, f"{state.key} is shared by nobody"
        shared = group.shared
        if shared is None:
            shared = self._chosen(state, leader, num_members, num_steps, group_policy, now_s)
            group.share(shared)
        return shared.is_parallel

    def _chosen(
        self,
        state: RequestState,
        leader: InstanceState,
        num_members: int,
        num_steps: int,
        group_policy: GroupPolicy,
        now_s: float,
    ) -> Shared:
        start, layout = state.num_planned_tokens, leader.profile.kv_layout
        num_left = state.request.num_prompt_tokens - start
        in_turn_s = group_policy.in_turn_s(start, num_left, num_members, layout.token_bytes)
        at_once_s = group_policy.at_once_s(
            start, num_left, num_members, layout.token_bytes, layout.num_layers, num_steps
        )
        taken = self._taken.get(leader.device_class, _Taken())
        is_parallel = num_members > layout.num_layers or taken.is_parallel(in_turn_s, at_once_s)
        predicted_s = (at_once_s if is_parallel else in_turn_s) * num_members
        return Shared(is_parallel, leader.device_class, predicted_s, num_members, now_s)

    def ended(self, group: GroupState, now_s: float) -> None:
        """All of its prompt is computed."""
        shared = group.shared
        if shared is None:
            return
        seen = min(max(log(max(shared.taken_s(now_s), 1e-9) / shared.predicted_s), -_MOST), _MOST)
        self._taken.setdefault(shared.device_class, _Taken()).took(seen, is_parallel=shared.is_parallel)
        group.share(None)
