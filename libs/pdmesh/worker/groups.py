"""Prefill groups as seen by one member: joining a group, and changes of its members."""

from __future__ import annotations

from pdmesh.core.commands import AdmitPrefill
from pdmesh.core.events import GroupPrefix
from pdmesh.errors import ProtocolError
from pdmesh.kv.exchange import KvExchange
from pdmesh.kv.gate import Wakeup
from pdmesh.kv_layout import num_blocks_for
from pdmesh.plans import MAX_GROUP_MEMBERS, PrefillGroup
from pdmesh.worker.context import InstanceContext
from pdmesh.worker.sequences import LocalRequest


class PrefillGroups:
    """An instance's memberships in prefill groups. ``wakeup`` wakes an engine's thread that waits for KV."""

    def __init__(self, context: InstanceContext, *, wakeup: Wakeup) -> None:
        self._context = context
        self._exchanges = context.mover.groups
        self._wakeup = wakeup

    def check(self, command: AdmitPrefill) -> None:
        """Raise ProtocolError if a request is admitted with an impossible group."""
        group = command.group
        if group is None:
            return
        self.check_members(group)
        if self._context.windows.are_freed:
            raise ProtocolError("this instance frees KV outside windows, but a prefill group needs all KV")
        if command.moves_on and not command.leads:
            raise ProtocolError("a group member that is not the leader got a transfer")

    def check_members(self, group: PrefillGroup) -> None:
        """Raise ProtocolError if a group is too large, lacks this instance, or has a member of unknown address."""
        self._own_number(group)
        self._addresses(group)

    def regroup(self, request: LocalRequest, group: PrefillGroup, *, is_new: bool) -> None:
        """Set the members of a prompt's group. A new helper learns the members later.

        Without an exchange, this instance joins a group, or leads one that was formed while the prompt was computed.
        """
        exchange = request.exchange or self._open(request, group)
        if not is_new or request.state.leads:
            self._exchanges.set_members(
                exchange.request_id, exchange.epoch, self._own_number(group), self._addresses(group)
            )

    def wait_no_longer(self, request: LocalRequest, newest_plan_id: int) -> None:
        """End planned chunks that would wait for a lost member. A leader reports how much of the prompt is here."""
        exchange = request.exchange
        assert exchange is not None, f"{request.request_id} is in no group"
        exchange.gate.give_up(newest_plan_id)
        if exchange.leads:
            num_tokens = exchange.ledger.num_complete_blocks * self._context.block_size
            self._context.report(
                GroupPrefix(self._context.instance_id, request.request_id, request.epoch, num_tokens, exchange.num_lost)
            )

    def leave(self, request: LocalRequest) -> None:
        """End the membership, if any, of a request whose prompt is computed."""
        self._exchanges.end(request.request_id, request.epoch, "the prompt is computed")

    def _addresses(self, group: PrefillGroup) -> list[bytes]:
        """Return the members' addresses, empty ones for lost members. Raises ProtocolError if one is unknown."""
        living = dict(zip(group.living_ids, self._context.addresses.of(group.living_ids), strict=True))
        return [living.get(member_id, b"") for member_id in group.member_ids]

    def _own_number(self, group: PrefillGroup) -> int:
        """Return this instance's number in the group. Raises ProtocolError if it is no member or the group is bad."""
        member_ids = group.member_ids
        if self._context.instance_id not in member_ids:
            raise ProtocolError("the instance is not a member of the request's group")
        if len(member_ids) > MAX_GROUP_MEMBERS:
            raise ProtocolError(f"the group has {len(member_ids)} members; at most {MAX_GROUP_MEMBERS} are allowed")
        return member_ids.index(self._context.instance_id)

    def _open(self, request: LocalRequest, group: PrefillGroup) -> KvExchange:
        """Open the exchange by which this instance and others compute the rest of a prompt."""
        num_blocks = num_blocks_for(len(request.sequence.token_ids), request.block_size)
        request.exchange = exchange = self._exchanges.open(
            request.request_id,
            request.epoch,
            capability=group.capability,
            block_ids=request.sequence.block_table[:num_blocks],
            wakeup=self._wakeup,
            ledger=None if request.sender is None else request.sender.ledger,
            on_new=None if request.sender is None else request.sender.add,
        )
        exchange.ledger.reserve(0, num_blocks_for(request.num_begun_tokens, request.block_size))
        num_tokens = request.num_computed_tokens if request.load is None else request.num_shared_tokens
        exchange.add_computed(0, num_tokens // request.block_size)
        return exchange
