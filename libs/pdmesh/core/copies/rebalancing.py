"""Running decodes move from an instance that is short of memory, or too slow for them, to one that is neither.

Which moves pay is the policy's business (`pdmesh.policy.rebalancing`); this module keeps to what may be: a decode moves
so at most once in a while, and between two instances in one direction, so that nothing goes to and fro; for memory only
one that is younger than the oldest that asks for more, as it is for retraction, which a move takes the place of.
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

#: What moved stays so long where it is, and nothing comes back that way, seconds.
COOL_DOWN_S = 10.0

#: How often it is looked whether steps are too slow, at most, seconds.
LOOK_S = 0.25

#: Away from an instance at once, for memory; for time one.
MAX_AT_ONCE = 2

#: Of a move that is timed: with less, its time says little of the link.
MIN_TIMED_BYTES = 1 << 20

#: How much the last timed move counts.
_WEIGHT = 0.25


class Rebalancer:
    def __init__(self, mesh: MeshState, moves: Moves) -> None:
        self._mesh = mesh
        self._moves = moves
        self._bytes_per_s: float | None = None
        self._last_s: dict[tuple[InstanceId, InstanceId], float] = {}  # when something went from the one to the other
        self._look_s = -inf

    def timed(self, event: TransferSent) -> None:
        """A move tells how fast its link is."""
        if event.num_bytes >= MIN_TIMED_BYTES and event.duration_s > 0:
            rate = event.num_bytes / event.duration_s
            before = rate if self._bytes_per_s is None else self._bytes_per_s
            self._bytes_per_s = before + _WEIGHT * (rate - before)

    def lost(self, instance_id: InstanceId) -> None:
        """An instance is gone, and what was known of its links."""
        self._last_s = {pair: at_s for pair, at_s in self._last_s.items() if instance_id not in pair}

    # --- memory ---

    def num_leaving_blocks(self, instance: InstanceState) -> int:
        """Blocks that what moves away from an instance will give back there."""
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
        """Move away what gives back ``num_blocks``, where that takes less than to compute it again.

        Of those that may, first what takes the shortest for each block.
        """
        num_coming = self.num_leaving_blocks(source)
        num_free = MAX_AT_ONCE - sum(1 for _ in self._leaving(source))
        if num_free <= 0 or num_coming >= num_blocks or not (targets := self._targets(source, now_s)):
            return
        found: list[tuple[float, RequestState, int]] = []
        for state, allocation in self._movable(source, now_s):
            num_bytes = self._num_bytes(source, allocation)
            move_s = rule.move_s(source.view, num_bytes, self._bytes_per_s)
            num_kept = self._mesh.num_kept_elsewhere(state.request, source)
            num_freed = source.num_freed_blocks(allocation)
            again_s = rule.again_s(self._num_tokens(source, allocation), num_kept)
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
        """Move one resident from each instance that is too slow for its residents to one that has time for it."""
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

    # --- what may be ---

    def _leaving(self, source: InstanceState) -> Iterator[RequestState]:
        for state in self._mesh.copying.values():
            move = state.move
            if move is not None and move.source_id == source.instance_id and not move.given_up:
                yield state

    def _movable(self, source: InstanceState, now_s: float) -> Iterator[tuple[RequestState, Allocation]]:
        """What decodes there, moves nowhere, and has neither moved of late nor failed to so often."""
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
        """Others of its arithmetic class with room and a backend, to which no move is on its way.

        Nothing came from there of late. Those that could not be reached from here count only if there are no others.
        """
        coming_to = {state.move.target_id for state in self._mesh.copying.values() if state.move is not None}
        targets = [
            each
            for each in self._mesh.instances.values()
            if not each.low  # what says no the soonest, and the most often, first
            and each.instance_id not in coming_to
            and each is not source
            and each.exact_group == source.exact_group
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
        """Return those of ``targets`` that the request's gateway hears of, as far as is known."""
        unheard = self._mesh.cut.of(state.request.gateway_id)
        return [each for each in targets if each.instance_id not in unheard]

    def _begin(self, state: RequestState, source: InstanceState, target: InstanceState, now_s: float) -> None:
        state.rebalance(now_s)
        self._last_s[source.instance_id, target.instance_id] = now_s
        self._moves.begin(state, target)

    @staticmethod
    def _num_bytes(source: InstanceState, allocation: Allocation) -> int:
        layout = source.profile.kv_layout
        return allocation.num_blocks * layout.num_layers * layout.block_bytes

    @staticmethod
    def _num_tokens(source: InstanceState, allocation: Allocation) -> int:
        return allocation.num_tokens or allocation.num_blocks * source.block_size
