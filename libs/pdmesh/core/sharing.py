"""Whether the members of a group take turns or compute at once, where either may be: by what groups took before.

Both are predicted (`pdmesh.policy.relay`), and each prediction is corrected by how much longer prompts took that were
shared so: what it costs to pass KV on, to wait for each other, and to be interrupted differs from machine to machine.
Each way is tried a few times at first. Later a prompt that was shared one way says something of the other, too: what
sets them apart is slowly forgotten, so that what was slower is tried again after some hundred prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, log

from pdmesh.core.requests import GroupState, RequestState, Shared
from pdmesh.core.state import InstanceBooks
from pdmesh.policy.relay import Relay, Schedule

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
    relay: _Way = field(default_factory=_Way)
    gang: _Way = field(default_factory=_Way)

    def is_gang(self, in_turn_s: float, at_once_s: float) -> bool:
        """Whether it is better to compute at once."""
        relay, gang = self.relay, self.gang
        if relay.num != gang.num and min(relay.num, gang.num) < _TRIES:
            return gang.num < relay.num
        return at_once_s * exp(gang.longer) < in_turn_s * exp(relay.longer)

    def took(self, seen: float, *, is_gang: bool) -> None:
        """A prompt was shared in one way."""
        way, other = (self.gang, self.relay) if is_gang else (self.relay, self.gang)
        way.took(seen)
        other.longer += _GAIN_OF_OTHER * (way.longer - other.longer)


class Sharing:
    """What is known of both ways, for each make of instances."""

    def __init__(self) -> None:
        self._taken: dict[str, _Taken] = {}  # by make

    def is_gang(
        self, state: RequestState, leader: InstanceBooks, num_members: int, num_steps: int, relay: Relay, now_s: float
    ) -> bool:
        """Whether so many compute it at once, each in so many steps. What was said of a prompt once, stays so."""
        if relay.schedule is not Schedule.AUTO:
            return relay.schedule is Schedule.GANG
        group = state.group
        assert group is not None, f"{state.key} is shared by nobody"
        shared = group.shared
        if shared is None:
            shared = self._chosen(state, leader, num_members, num_steps, relay, now_s)
            group.share(shared)
        return shared.is_gang

    def _chosen(
        self, state: RequestState, leader: InstanceBooks, num_members: int, num_steps: int, relay: Relay, now_s: float
    ) -> Shared:
        start, layout = state.num_planned_tokens, leader.profile.kv_layout
        num_left = state.request.num_prompt_tokens - start
        in_turn_s = relay.in_turn_s(start, num_left, num_members, layout.token_bytes)
        at_once_s = relay.at_once_s(start, num_left, num_members, layout.token_bytes, layout.num_layers, num_steps)
        taken = self._taken.get(leader.make, _Taken())
        is_gang = num_members > layout.num_layers or taken.is_gang(in_turn_s, at_once_s)
        predicted_s = (at_once_s if is_gang else in_turn_s) * num_members
        return Shared(is_gang, leader.make, predicted_s, num_members, now_s)

    def ended(self, group: GroupState, now_s: float) -> None:
        """All of its prompt is computed."""
        shared = group.shared
        if shared is None:
            return
        seen = min(max(log(max(shared.taken_s(now_s), 1e-9) / shared.predicted_s), -_MOST), _MOST)
        self._taken.setdefault(shared.make, _Taken()).took(seen, is_gang=shared.is_gang)
        group.share(None)
