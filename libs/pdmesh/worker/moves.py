"""Running decodes that move to another instance, at the source: see `docs/architecture/moves.md`.

The source decodes until the sender has caught up. The last token before the pause names the target. Only before the
commit may the source decode on by itself.
"""

from __future__ import annotations

from pdmesh.instance.copy_state import LeavingCopy
from pdmesh.instance.effects import CopyCaughtUp
from pdmesh.kv.copy_out import KvSource
from pdmesh.kv.piece import FirstToken, KvDestination
from pdmesh.kv.transcript import pack_transcript
from pdmesh.model import InstanceId
from pdmesh.plans import TransferPlan
from pdmesh.wire.messages import pack_token_ids
from pdmesh.worker.context import InstanceContext
from pdmesh.worker.sequences import LocalRequest


class MovingDecodes:
    """The running decodes of an instance that move away."""

    def __init__(self, context: InstanceContext) -> None:
        self._context = context

    def begin(self, request: LocalRequest, destination: KvDestination, transfer: TransferPlan) -> None:
        """Begin to send a request that decodes here."""
        num_kv_tokens = len(request.sequence.token_ids) - 1
        departures = self._context.mover.departures
        request.move = departures.offer(
            request.request_id,
            request.epoch,
            block_ids=request.context_table,
            num_context_tokens=None,
            transcript=pack_transcript(request.generation, request.sequence.token_ids[:num_kv_tokens]),
            on_caught_up=lambda: self._caught_up(request),
            first_held=request.held.first,
        )
        departures.grant(request.request_id, request.epoch, destinations=[destination], capability=transfer.capability)
        request.num_tokens_told = num_kv_tokens
        request.move.advance(num_kv_tokens)

    def successor(self, request: LocalRequest) -> InstanceId | None:
        """Return the instance that decodes on after the token that a step has just drawn; None: this one."""
        copy, sender = _sending(request)
        if copy is None or sender is None or copy.transfer is None or not sender.has_caught_up:
            return None
        # The step has computed the KV of the previous token.
        return copy.transfer.destination_ids[0] if sender.has_room_for(len(request.sequence.token_ids)) else None

    def stepped(self, request: LocalRequest, successor: InstanceId | None) -> None:
        """Freeze a moving request if its last token named a ``successor``; else send the KV of the step."""
        _, sender = _sending(request)
        if sender is None:
            return
        if successor is not None:
            self._context.freeze(request)
        else:
            sender.advance(len(request.sequence.token_ids) - 1)

    def _caught_up(self, request: LocalRequest) -> None:
        """Report that little KV of a request is left to send."""
        _, sender = _sending(request)
        if sender is not None and sender.has_caught_up:
            self._context.hear(request, CopyCaughtUp(request.state.key))

    def leave(self, request: LocalRequest) -> None:
        """Freeze a request with little left to send; if a step computes it, the end of the step does so."""
        copy, _ = _sending(request)
        if copy is not None and copy.transfer is not None and not request.in_step:
            self._context.gateways.hand_over_stream(request, copy.transfer.destination_ids[0])
            self._context.freeze(request)

    def send_rest(self, request: LocalRequest) -> None:
        """Send the rest of a frozen request: the last KV, the new tokens and the next token."""
        token_ids, sender = request.sequence.token_ids, request.move
        assert sender is not None, f"{request.request_id} does not move"
        assert request.held.first <= sender.first_held, f"{request.request_id} freed frames as it moved"
        num_kv_tokens = len(token_ids) - 1
        sender.freeze(
            num_kv_tokens=num_kv_tokens,
            tail=pack_token_ids(token_ids[request.num_tokens_told : num_kv_tokens]),
            next_token=FirstToken(token_ids[-1], request.sequence.num_output_tokens - 1),
        )


def _sending(request: LocalRequest) -> tuple[LeavingCopy | None, KvSource | None]:
    """Return a move that is not frozen yet, and its sender; else two Nones."""
    copy = request.state.move
    return (copy, request.move) if copy is not None and copy.is_sending else (None, None)
