"""Moves of decodes from an instance that is short of memory, or too slow for them, to one that is neither.

The policy decides which moves pay (`pdmesh.policy.rebalancing`). This module decides which are allowed. Within
`COOL_DOWN_S` it moves a decode at most once, and between two instances in one direction alone. So no decode moves back
and forth. Moves off an instance that is emptied do not count. For memory, only requests younger than the oldest one
that lacks room may move. A move replaces a retraction, for which the same holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import inf

from pdmesh.core.copies.decode_moves import MAX_FAILED, Moves
from pdmesh.core.events import TransferSent
from pdmesh.core.instances.allocations import Allocation
from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.requests.request import RequestState
from pdmesh.model import InstanceId
from pdmesh.policy.rebalancing import Rebalancing
from pdmesh.policy.seams import DecodePlacement

#: Period, in seconds, in which a moved request stays, and no request moves in the opposite direction.
COOL_DOWN_S = 10.0

#: Shortest period, in seconds, between two searches for instances that are too slow.
LOOK_S = 0.25

#: Largest number of moves from one instance at once for memory; for time it is one.
MAX_AT_ONCE = 2

#: Smallest number of bytes of a timed move: a smaller one's time says little about the link.
MIN_TIMED_BYTES = 1 << 20

#: Weight of the last timed move.
_WEIGHT = 0.25


class Rebalancer:
    """Choice of decodes that move because of memory or time."""

    def __init__(self, mesh: MeshState, moves: Moves) -> None:
        self._mesh = mesh
        self._moves = moves
        self._bytes_per_s: float | None = None
        # Time of the last such move by source and target.
        self._last_s: dict[tuple[InstanceId, InstanceId], float] = {}
        self._look_s = -inf

    def timed(self, event: TransferSent) -> None:
        """Learn the links' rate from a move that was sent, unless it was too small to time."""
        if event.num_bytes >= MIN_TIMED_BYTES and event.duration_s > 0:
            rate = event.num_bytes / event.duration_s
            before = rate if self._bytes_per_s is None else self._bytes_per_s
            self._bytes_per_s = before + _WEIGHT * (rate - before)

    def lost(self, instance_id: InstanceId) -> None:
        """Forget the recent moves of a lost instance."""
        self._last_s = {pair: at_s for pair, at_s in self._last_s.items() if instance_id not in pair}

    # --- memory ---

    def num_leaving_blocks(self, instance: InstanceState) -> int:
        """Return the number of blocks that moves from an instance will free there."""
        allocations = instance.allocations
        return sum([instance.num_freed_blocks(allocations[state.key]) for state in self._leaving(instance)])

    def relieve(
        self,
        source: InstanceState,
        num_blocks: int,
        is_younger: Callable[[RequestState], bool],
        rule: Rebalancing,
        placement: DecodePlacement,
        now_s: float,
    ) -> None:
        """Move requests away to free ``num_blocks``, if a move takes less time than computing them again.

        Requests with the shortest move per freed block come first.
        """
        num_coming = self.num_leaving_blocks(source)
        num_free = MAX_AT_ONCE - sum(1 for _ in self._leaving(source))
        if num_free <= 0 or num_coming >= num_blocks or not (targets := self._targets(source, now_s)):
            return
        found: list[tuple[float, RequestState, int]] = []
        for state, allocation in self._movable(source, now_s):
            num_bytes = self._num_bytes(source, allocation)
            move_s = rule.move_s(source.view, num_bytes, self._bytes_per_s)
            num_cached = self._mesh.num_cached_elsewhere(state.request, source)
            num_freed = source.num_freed_blocks(allocation)
            again_s = rule.again_s(self._num_tokens(source, allocation), num_cached)
            if num_freed and is_younger(state) and move_s < again_s:
                found.append((move_s / num_freed, state, num_freed))
        for _, state, number in sorted(found, key=lambda each: (each[0], each[1].key)):
            if num_free <= 0 or num_coming >= num_blocks:
                return
            able = [
                each
                for each in self._heard(state, targets)
                if self._moves.why_not(state, each, rule.spare_blocks(each.view)) is None
            ]
            target = min(able, default=None, key=lambda each: (placement.key(each.view), each.instance_id))
            if target is not None:
                self._begin(state, source, target, now_s)
                targets = self._targets(source, now_s)
                num_free -= 1
                num_coming += number

    # --- time ---

    def speed_up(self, rule: Rebalancing, now_s: float) -> None:
        """Move one resident from each instance that is too slow for its residents to an instance that has time.

        Does nothing within `LOOK_S` of the last look. Instances that a resident is leaving already are skipped.
        """
        if now_s < self._look_s:
            return
        self._look_s = now_s + LOOK_S
        for source in list(self._mesh.instances.values()):
            if source.reachable and not source.suspected and rule.is_behind(source.view):
                self._speed_up(source, rule, now_s)

    def _speed_up(self, source: InstanceState, rule: Rebalancing, now_s: float) -> None:
        targets = self._targets(source, now_s)
        if not targets or any(True for _ in self._leaving(source)):
            return
        best: tuple[float, RequestState, InstanceState] | None = None
        for state, allocation in self._movable(source, now_s):
            num_tokens = self._num_tokens(source, allocation)
            able = [
                each
                for each in self._heard(state, targets)
                if rule.has_time_for(each.view, num_tokens, allocation.slo_tpot_s)
            ]
            gain = rule.gain(source.view, num_tokens, self._num_bytes(source, allocation), self._bytes_per_s)
            if not able or (best is not None and gain <= best[0]):
                continue
            fastest = sorted(able, key=lambda each: (rule.step_s(each.view), each.instance_id))
            target = next((each for each in fastest if self._moves.why_not(state, each) is None), None)
            if target is not None:
                best = gain, state, target
        if best is not None:
            self._begin(best[1], source, best[2], now_s)

    # --- restrictions ---

    def _leaving(self, source: InstanceState) -> Iterator[RequestState]:
        for state in self._mesh.copying.values():
            move = state.move
            if move is not None and move.source_id == source.instance_id and not move.given_up:
                yield state

    def _movable(self, source: InstanceState, now_s: float) -> Iterator[tuple[RequestState, Allocation]]:
        """Yield the source's decoding requests that may move.

        Others are moving already, moved recently, or failed to move too often.
        """
        for key, allocation in source.allocations.items():
            state = self._mesh.find(key)
            if (
                state is None
                or state.move is not None
                or allocation.num_blocks == 0
                or state.num_failed_moves >= MAX_FAILED
            ):
                continue
            if state.decode_id == source.instance_id and now_s - state.rebalanced_s >= COOL_DOWN_S:
                yield state, allocation

    def _targets(self, source: InstanceState, now_s: float) -> list[InstanceState]:
        """Return other instances of the same arithmetic class with room, a backend and no move on its way to them.

        No request came from a target recently. Unreachable targets, and targets behind slow links, count only if there
        are no others.
        """
        coming_to = {state.move.target_id for state in self._mesh.copying.values() if state.move is not None}
        targets = [
            each
            for each in self._mesh.instances.values()
            # The most selective condition comes first.
            if not each.low
            and each.instance_id not in coming_to
            and each is not source
            and each.arithmetic_class == source.arithmetic_class
            and each.takes_decodes
            and now_s - self._last_s.get((each.instance_id, source.instance_id), -inf) >= COOL_DOWN_S
            and self._mesh.broker.takes_move(each.instance_id)
        ]
        cut = self._mesh.cut.of(source.instance_id)
        targets = [each for each in targets if each.instance_id not in cut] or targets
        num_blocks = max((allocation.num_blocks for allocation in source.allocations.values()), default=0)
        slow = self._mesh.slow_from(source, num_blocks, [each.instance_id for each in targets])
        return [each for each in targets if each.instance_id not in slow] or targets

    def _heard(self, state: RequestState, targets: Iterable[InstanceState]) -> list[InstanceState]:
        """Return the targets whose tokens reach the request's gateway, as far as is known."""
        unreachable = self._mesh.cut.of(state.request.gateway_id)
        return [each for each in targets if each.instance_id not in unreachable]

    def _begin(self, state: RequestState, source: InstanceState, target: InstanceState, now_s: float) -> None:
        state.rebalance(now_s)
        self._last_s[source.instance_id, target.instance_id] = now_s
        self._moves.begin(state, target)

    @staticmethod
    def _num_bytes(source: InstanceState, allocation: Allocation) -> int:
        return allocation.num_blocks * source.profile.kv_layout.bytes_per_block

    @staticmethod
    def _num_tokens(source: InstanceState, allocation: Allocation) -> int:
        return allocation.num_tokens or allocation.num_blocks * source.block_size
