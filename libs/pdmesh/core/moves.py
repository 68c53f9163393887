"""Running decodes move to another instance with their KV, in the same epoch: nothing is computed again.

The target reserves room and a backend; the source decodes on while its KV goes over, stands still for the rest, and
commits. Before the commit it may go on at any time; after it never by itself. Who goes on is then told by the order of
the target's reports: *landed* makes it the target; *released* without landed proves that the target never began, and
the source resumes; *landed*, then *released*, or a target that is gone, is the next epoch (the table is
in `docs/architecture/moves.md`). The gateway takes tokens from the target because the source's last token names it.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdmesh.core.books import Books
from pdmesh.core.commands import CancelMove, PlaceDecode, ResumeDecode
from pdmesh.core.events import MoveFailed, MoveSent
from pdmesh.core.holds import HeldBlocks, HoldKind
from pdmesh.core.requests import Phase, RequestState
from pdmesh.core.state import InstanceBooks
from pdmesh.core.transfers import Move
from pdmesh.model import InstanceId, RequestKey, TransferPurpose
from pdmesh.policy.credit import granted_blocks
from pdmesh.policy.seams import DecodePlacement

#: Away from one instance, or to one, at once: two are sent, and the next are ready.
MAX_AT_ONCE = 4

#: A request whose moves failed so often stays where it is.
MAX_FAILED = 3


class Moves:
    def __init__(self, books: Books) -> None:
        self._books = books
        self._stopping: dict[InstanceId, None] = {}  # said that they are about to stop

    # --- one begins ---

    def why_not(self, state: RequestState, target: InstanceBooks, spare_blocks: int | None = None) -> str | None:
        """Why a request cannot move to an instance now, in the words of a sentence that begins with its name.

        ``spare_blocks`` as for `InstanceBooks.can_take_over`.
        """
        if state.move is not None:
            return f"is on its way to {state.move.target_id} already"
        if state.phase is not Phase.DECODING:
            return f"is {state.phase.replace('_', ' ')}, and only what decodes can move"
        source, hold = self._where(state)
        if source is target:
            return f"decodes on {target.instance_id} already"
        if source.kv_group != target.kv_group:
            return f"has KV of another model or layout than {target.instance_id}"
        if hold.kind is not HoldKind.RESIDENT or hold.freeing:
            return "is about to end"
        request = state.request
        if (
            not target.can_take_over(state.key, self._num_blocks(source, hold), hold.max_blocks, spare_blocks)
            or request.num_prompt_tokens + request.max_tokens > target.profile.max_model_len
        ):
            return f"has no room on {target.instance_id}"
        return None

    def begin(self, state: RequestState, target: InstanceBooks) -> Move:
        """Move a request to an instance that `why_not` says nothing against."""
        source, hold = self._where(state)
        num_blocks = self._num_blocks(source, hold)
        books, (request_id, epoch) = self._books, state.key
        transfer = books.broker.open(
            state.key, TransferPurpose.MOVE, (source.shard(hold.num_blocks),), (target.shard(num_blocks),)
        )
        move = state.begin_move(transfer)
        books.moving[state.key] = state
        target.take(
            state.key,
            num_blocks,
            HoldKind.PROMISED,
            max_blocks=hold.max_blocks,
            num_tokens=hold.num_tokens,
            long_tokens=hold.long_tokens,
            slo_tpot_s=hold.slo_tpot_s,
            transfer_id=transfer.plan.transfer_id,
        )
        books.commands.append(
            PlaceDecode(instance_id=target.instance_id, request_id=request_id, epoch=epoch, transfer=transfer.plan)
        )
        books.grant(books.broker.offer(transfer))
        return move

    def cancel(self, state: RequestState) -> None:
        """Cancel a request's move, which may have landed all the same."""
        if state.move is not None:
            self._tell_source(state, state.move)

    def _where(self, state: RequestState) -> tuple[InstanceBooks, HeldBlocks]:
        assert state.decode_id is not None
        source = self._books.instances[state.decode_id]
        return source, source.holds[state.key]

    @staticmethod
    def _num_blocks(source: InstanceBooks, hold: HeldBlocks) -> int:
        """Return the blocks to reserve, with room for what the request draws on the way."""
        return granted_blocks(hold.num_blocks * source.block_size, hold.max_blocks, source.block_size)

    # --- what instances say of it ---

    def sent(self, event: MoveSent) -> None:
        """Its target has acknowledged all of it, and goes on."""
        state = self._of(event)
        if state is None or state.move is None:
            return  # the target told of it first
        self._books.land_move(state)

    def failed(self, event: MoveFailed) -> None:
        """Its source sends no more. What becomes of it is told by the target, if that is there to tell."""
        state = self._of(event)
        if state is None:
            self._books.free(event.instance_id, (event.request_id, event.epoch))  # it missed the acknowledgement
            return
        move = state.move
        if move is None or move.transfer.plan.transfer_id != event.transfer_id:
            return
        if self._holds(move.target_id, state.key):
            move.given_up, move.committed = True, event.committed
            self._books.free(move.target_id, state.key)
        elif event.committed:
            self._books.restart(state, f"it was lost on its way to {move.target_id}: {event.reason}")
        else:
            self._over(state)

    def released(self, instance_id: InstanceId, key: RequestKey) -> None:
        """An instance has given a request's room back: if it was to move there, it never began there."""
        state = self._books.find(key)
        if state is not None and state.move is not None and state.move.target_id == instance_id:
            self._resume(state, state.move)

    def _of(self, event: MoveSent | MoveFailed) -> RequestState | None:
        """The request, if it needs the source that reports: it has not landed elsewhere."""
        state = self._books.find((event.request_id, event.epoch))
        return state if state is not None and state.needs(event.instance_id) else None

    def _holds(self, instance_id: InstanceId, key: RequestKey) -> bool:
        instance = self._books.instances.get(instance_id)
        return instance is not None and key in instance.holds

    def _resume(self, state: RequestState, move: Move) -> None:
        request_id, epoch = state.key
        self._over(state)
        self._books.commands.append(
            ResumeDecode(
                instance_id=move.source_id,
                request_id=request_id,
                epoch=epoch,
                transfer_id=move.transfer.plan.transfer_id,
            )
        )

    def _over(self, state: RequestState) -> None:
        """End a move: the request stays where it is."""
        self._books.end_move(state, failed=True)

    def _tell_source(self, state: RequestState, move: Move) -> None:
        request_id, epoch = state.key
        self._books.commands.append(
            CancelMove(
                instance_id=move.source_id,
                request_id=request_id,
                epoch=epoch,
                transfer_id=move.transfer.plan.transfer_id,
            )
        )

    # --- instances come and go ---

    def lost(self, instance_id: InstanceId) -> None:
        """An instance is gone: the sources of what was on its way there say how far they were."""
        self._stopping.pop(instance_id, None)
        for state in list(self._books.moving.values()):
            if state.move is not None and state.move.target_id == instance_id:
                self._target_is_gone(state, state.move)

    def _target_is_gone(self, state: RequestState, move: Move) -> None:
        """Handle a target that is gone: only the source knows whether the request may have begun there."""
        move.given_up = True
        if move.committed is None:
            self._tell_source(state, move)
        elif move.committed:
            self._books.restart(state, f"it was lost on {move.target_id}, where it may have moved")
        else:
            self._over(state)

    def suspected(self, instance_id: InstanceId) -> None:
        """An instance is silent: what was to move there goes on where it is, if it can."""
        for state in self._books.moving.values():
            if state.move is not None and state.move.target_id == instance_id:
                self._tell_source(state, state.move)

    def joined(self, instance_id: InstanceId, *, stopping: bool, is_another: bool) -> None:
        """An instance registered, perhaps again: it has dropped what had not landed, and moves no more of its own.

        Unless it ``is_another`` process under the name, or was told to free what may have landed: that says nothing.
        """
        self.stops(instance_id, stopping)
        for state in list(self._books.moving.values()):
            move = state.move
            if move is None:
                continue
            if move.target_id == instance_id and not self._holds(instance_id, state.key):
                if is_another or move.given_up:
                    self._target_is_gone(state, move)
                else:
                    self._resume(state, move)
            elif move.source_id == instance_id:
                move.given_up = True
                self._books.free(move.target_id, state.key)

    # --- everything leaves ---

    def stops(self, instance_id: InstanceId, stopping: bool = True) -> None:
        """An instance is about to stop: what decodes there moves away."""
        self._stopping.pop(instance_id, None)
        if stopping:
            self._stopping[instance_id] = None

    def evacuate(self, leaving: Sequence[InstanceId], placement: DecodePlacement) -> None:
        """Move what decodes on the instances that stop, and on these, to others that have room; after any event."""
        for instance_id in dict.fromkeys((*self._stopping, *leaving)):
            instance = self._books.instances.get(instance_id)
            if instance is not None and instance.held.num_decoding and instance.reachable and not instance.suspected:
                self._empty(instance, placement)

    def _empty(self, source: InstanceBooks, placement: DecodePlacement) -> None:
        targets = [other for other in self._books.instances.values() if other is not source and other.num_decode_tokens]
        under_way = [state.move for state in self._books.moving.values() if state.move is not None]
        num_free = MAX_AT_ONCE - sum(move.source_id == source.instance_id for move in under_way)
        num_left = {
            target.instance_id: MAX_AT_ONCE - sum(move.target_id == target.instance_id for move in under_way)
            for target in targets
        }
        for key, hold in source.holds.items():
            if num_free <= 0 or not any(number > 0 for number in num_left.values()):
                return
            state = self._books.find(key)
            if (
                hold.kind is not HoldKind.RESIDENT
                or state is None
                or state.move is not None
                or state.num_failed_moves >= MAX_FAILED
            ):
                continue
            able = [each for each in targets if self.why_not(state, each) is None]
            exact = [each for each in able if each.exact_group == source.exact_group]
            found = [each for each in exact or able if num_left[each.instance_id] > 0]
            target = min(found, default=None, key=lambda each: (placement.key(each.view), each.instance_id))
            if target is not None:
                self.begin(state, target)
                num_free -= 1
                num_left[target.instance_id] -= 1

    def check_integrity(self) -> None:
        for key, state in self._books.moving.items():
            assert self._books.find(key) is state, f"{key} moves, and is over"
            assert state.phase is Phase.MOVING, f"{key} moves, and is {state.phase}"
        num_moving = sum(state.phase is Phase.MOVING for state in self._books.requests.values())
        assert num_moving == len(self._books.moving), f"{num_moving} move, books say {len(self._books.moving)}"
        gone = self._stopping.keys() - self._books.instances.keys()
        assert not gone, f"{gone} stop, and are gone"
