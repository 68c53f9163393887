"""KV of prompts that several modelled instances compute in turn: the KV that each has, and the flows between them.

A member sends each other member the KV of its chunks, layer by layer. All but the last layer may move from the start of
a chunk, and the last one when the chunk is done. Between two members that is one flow, in order, which shares their
ports with all other flows. The leader sends earlier KV to members that join.

A lost member sends and receives nothing more. The leader passes the lost member's KV on to members that lack it. KV
that had not reached the leader is lost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from pdmesh.model import InstanceId, RequestKey
from pdmesh.plans import ChunkPlan, PrefillGroup
from pdmesh_lab.sim.agenda import Agenda
from pdmesh_lab.sim.links import FlowId, SimulatedLinks


@dataclass(slots=True, eq=False)
class _Present:
    """The KV of a prompt that one member has.

    All tokens before `frontier` are present. `ends` maps the start of each later range to its end. `reached` lists when
    the frontier came to which token. `waiting` is a start, and the function to call once the frontier reaches it.
    """

    frontier: int
    ends: dict[int, int] = field(default_factory=dict[int, int])
    reached: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    waiting: tuple[int, Callable[[], None]] | None = None

    def add(self, start: int, end: int, now_s: float) -> None:
        self.ends[start] = max(end, self.ends.get(start, 0))
        for start in sorted(self.ends):  # recomputed ranges may have other ends
            if start > self.frontier:
                break
            self.frontier = max(self.frontier, self.ends.pop(start))
        self.reached.append((self.frontier, now_s))
        if self.waiting is not None and self.frontier >= self.waiting[0]:
            self.wake()

    def has(self, start: int, end: int) -> bool:
        return end <= self.frontier or self.ends.get(start, 0) >= end

    def wake(self) -> None:
        """Wake the waiting step, even if the frontier has not reached its start."""
        if self.waiting is not None:
            (_, go_on), self.waiting = self.waiting, None
            go_on()

    def since_s(self, start: int) -> float | None:
        """Return the time at which all KV before ``start`` had come; None if some is missing."""
        if self.frontier < start:
            return None
        index = bisect_left(self.reached, (start, -inf))
        return self.reached[index][1]


@dataclass(slots=True, eq=False)
class _Prompt:
    leader_id: InstanceId
    token_bytes: float
    last_layer_share: float
    landed: Callable[[int], None]
    members: dict[InstanceId, _Present]
    known: dict[int, tuple[InstanceId, ...]] = field(default_factory=dict[int, tuple[InstanceId, ...]])
    computed: dict[int, int] = field(default_factory=dict[int, int])
    #: Pieces that each flow has yet to move, in order: bytes, and the range of tokens that they complete.
    pieces: dict[FlowId, deque[tuple[float, tuple[int, int] | None]]] = field(
        default_factory=dict[FlowId, deque[tuple[float, tuple[int, int] | None]]]
    )


class SimulatedExchange:
    """Exchange of KV between the members of all prefill groups."""

    def __init__(self, agenda: Agenda, links: SimulatedLinks) -> None:
        self._agenda = agenda
        self._links = links
        self._prompts: dict[RequestKey, _Prompt] = {}

    def is_shared(self, key: RequestKey) -> bool:
        """Return whether a prompt has a group and is not yet done."""
        return key in self._prompts

    def num_members(self, key: RequestKey) -> int:
        return len(self._prompts[key].members)

    def set_group(
        self,
        key: RequestKey,
        group: PrefillGroup,
        *,
        num_computed_tokens: int,
        token_bytes: float,
        last_layer_share: float,
        landed: Callable[[int], None],
    ) -> None:
        """Add new members to a prompt's group and remove lost ones; send earlier KV to the new ones.

        ``num_computed_tokens`` of the leader count in the first call only. ``landed`` is called with the number of
        tokens that other members computed and the leader now has.
        """
        leader_id = group.member_ids[0]
        prompt = self._prompts.get(key)
        if prompt is None:
            present = _Present(num_computed_tokens, reached=[(num_computed_tokens, -inf)])
            prompt = _Prompt(leader_id, token_bytes, last_layer_share, landed, {leader_id: present})
            if num_computed_tokens:
                prompt.computed[0] = num_computed_tokens
            self._prompts[key] = prompt
        for lost_id in group.lost_ids:
            if lost_id in prompt.members:  # lost before the group was set here
                self._lose(key, prompt, lost_id)
        for member_id in group.living_ids:
            if member_id in prompt.members:
                continue
            prompt.members[member_id] = _Present(0, reached=[(0, -inf)])
            for start, end in prompt.computed.items():
                self._send(key, prompt, leader_id, member_id, (end - start) * token_bytes, (start, end))

    def began(self, key: RequestKey, chunk: ChunkPlan, member_id: InstanceId) -> None:
        """Begin a member's chunk: all but its last layer may move to the present members."""
        prompt = self._prompts[key]
        others = tuple([name for name in prompt.members if name != member_id])
        prompt.known[chunk.start] = others
        num_bytes = chunk.num_tokens * prompt.token_bytes * (1 - prompt.last_layer_share)
        for other_id in others:
            self._send(key, prompt, member_id, other_id, num_bytes, None)

    def ended(self, key: RequestKey, chunk: ChunkPlan, member_id: InstanceId) -> None:
        """End a chunk: the rest of its KV may move, and all of it to members that have joined since."""
        prompt = self._prompts[key]
        if chunk.is_last:
            self._end(key, prompt)
            return
        start, end = chunk.start, chunk.start + chunk.num_tokens
        prompt.computed[start] = end
        known = prompt.known.pop(start, ())
        for other_id in prompt.members:
            if other_id != member_id:
                share = prompt.last_layer_share if other_id in known else 1.0
                self._send(
                    key, prompt, member_id, other_id, chunk.num_tokens * prompt.token_bytes * share, (start, end)
                )
        prompt.members[member_id].add(start, end, self._agenda.now_s)

    def forget(self, key: RequestKey) -> None:
        """End a prompt's exchange, because its leader frees it, and wake every waiting step."""
        prompt = self._prompts.get(key)
        if prompt is not None:
            self._end(key, prompt)
            for present in prompt.members.values():
                present.wake()

    def lost(self, member_id: InstanceId) -> None:
        """Remove a lost instance from all groups. End the exchange of prompts that it led."""
        for key in [key for key, prompt in self._prompts.items() if member_id in prompt.members]:
            self._lose(key, self._prompts[key], member_id)

    def _lose(self, key: RequestKey, prompt: _Prompt, member_id: InstanceId) -> None:
        del prompt.members[member_id]
        if member_id != prompt.leader_id:
            self._pass_on(key, prompt, member_id)
            return
        self.forget(key)

    def _pass_on(self, key: RequestKey, prompt: _Prompt, lost_id: InstanceId) -> None:
        """Send a lost helper's KV from the leader to members that lack it, as far as the leader has it."""
        leader = prompt.members[prompt.leader_id]
        for flow in [flow for flow in prompt.pieces if lost_id in flow[1:]]:
            self._links.drop(flow)
            owed = [tokens for _, tokens in prompt.pieces.pop(flow) if tokens is not None]
            _, sender_id, receiver_id = flow
            if sender_id != lost_id:
                continue
            for start, end in owed:
                if receiver_id == prompt.leader_id:
                    prompt.computed.pop(start, None)
                elif leader.has(start, end):
                    num_bytes = (end - start) * prompt.token_bytes
                    self._send(key, prompt, prompt.leader_id, receiver_id, num_bytes, (start, end))

    def prefix_tokens(self, key: RequestKey) -> int:
        """Return the number of tokens, from the start of a shared prompt, whose KV the leader has."""
        prompt = self._prompts[key]
        return prompt.members[prompt.leader_id].frontier

    def since_s(self, key: RequestKey, member_id: InstanceId, start: int) -> float | None:
        """Return the time at which a member had all KV before ``start``; None if some is missing."""
        return self._prompts[key].members[member_id].since_s(start)

    def wait(self, key: RequestKey, member_id: InstanceId, start: int, go_on: Callable[[], None]) -> None:
        """Call ``go_on`` once a member has all KV before ``start``, or the exchange ends.

        Only the last call counts: a member computes one chunk of a prompt at a time.
        """
        self._prompts[key].members[member_id].waiting = (start, go_on)

    def drained(self, flow: FlowId) -> bool:
        """Note that a flow's first piece has moved, and send the next. Return False for a flow not between members."""
        prompt = self._prompts.get(flow[0])
        if prompt is None or flow not in prompt.pieces:
            return False
        pieces = prompt.pieces[flow]
        _, tokens = pieces.popleft()
        if pieces:
            self._links.send(flow, pieces[0][0])
        else:
            del prompt.pieces[flow]
        if tokens is not None:
            _, _, receiver_id = flow
            if receiver_id == prompt.leader_id and not prompt.members[receiver_id].has(*tokens):
                prompt.landed(tokens[1] - tokens[0])
            prompt.members[receiver_id].add(*tokens, self._agenda.now_s)
        return True

    def _send(
        self,
        key: RequestKey,
        prompt: _Prompt,
        sender_id: InstanceId,
        receiver_id: InstanceId,
        num_bytes: float,
        tokens: tuple[int, int] | None,
    ) -> None:
        flow = (key, sender_id, receiver_id)
        pieces = prompt.pieces.setdefault(flow, deque())
        pieces.append((num_bytes, tokens))
        if len(pieces) == 1:
            self._links.send(flow, num_bytes)

    def _end(self, key: RequestKey, prompt: _Prompt) -> None:
        """Stop all flows of a prompt whose last chunk is computed, or whose leader frees it."""
        for flow in prompt.pieces:
            self._links.drop(flow)
        del self._prompts[key]
