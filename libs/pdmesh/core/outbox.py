"""Commands to instances and gateways that answer an event: each kind is made in one place."""

from __future__ import annotations

from collections.abc import Iterable

from pdmesh.core.commands import (
    Command,
    ExpectCopy,
    FreeKv,
    Hold,
    Places,
    Reject,
    Restart,
    SendCopy,
    SetPlaces,
    Stop,
    StopCopy,
)
from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.requests.copy import Copy
from pdmesh.core.roster import Roster
from pdmesh.model import (
    NO_TRANSFER,
    GatewayId,
    InstanceId,
    PartMember,
    RejectReason,
    Request,
    RequestKey,
    Then,
    TransferId,
)
from pdmesh.plans import NO_EVICTIONS, Evictions


class CommandOutbox(Roster):
    """The instances, and the commands that answer an event. The mesh state adds requests."""

    def __init__(self) -> None:
        super().__init__()
        self.commands: list[Command] = []

    # --- copies ---

    def expect_kv(
        self,
        receiver: InstanceState,
        copy: Copy,
        *,
        home_id: InstanceId | None = None,
        members: tuple[PartMember, ...] = (),
        wanted_by: RequestKey | None = None,
        num_loaded_granules: int = 0,
    ) -> None:
        """Announce a copy to a receiver, whose blocks are taken, and name the granules that it evicts first."""
        self.commands.append(
            ExpectCopy(
                instance_id=receiver.instance_id,
                request_id=copy.key[0],
                epoch=copy.key[1],
                transfer=copy.plan,
                chain=copy.chain,
                home_id=home_id,
                members=members,
                wanted_by=wanted_by,
                num_loaded_granules=num_loaded_granules,
                room=receiver.make_room(),
            )
        )

    def grant(self, copies: Iterable[Copy]) -> None:
        """Tell the sources of copies that the broker granted."""
        for copy in copies:
            request_id, epoch = copy.key
            for source_id in copy.source_ids:
                self.commands.append(
                    SendCopy(
                        instance_id=source_id,
                        request_id=request_id,
                        epoch=epoch,
                        transfer=copy.plan,
                        chain=copy.chain if copy.plan.then is Then.KEEP else (),
                    )
                )

    def stop(self, copy: Copy, how: Stop, *, told_by: InstanceId | None = None) -> None:
        """Stop a copy at its sources. The source ``told_by`` has reported the end itself."""
        for source_id in copy.source_ids:
            if source_id != told_by and source_id in self.instances:
                self.commands.append(
                    StopCopy(
                        instance_id=source_id,
                        request_id=copy.key[0],
                        epoch=copy.key[1],
                        transfer_id=copy.plan.transfer_id,
                        how=how,
                    )
                )

    # --- a request's room on an instance ---

    def set_places(self, instance_id: InstanceId, key: RequestKey, places: Places) -> None:
        """Name the other instances that have KV of a request, or ask for it, to an instance (`SetPlaces`)."""
        self.commands.append(SetPlaces(instance_id=instance_id, request_id=key[0], epoch=key[1], places=places))

    def hold(
        self,
        instance: InstanceState,
        key: RequestKey,
        *,
        decodes: bool = False,
        move_id: TransferId = NO_TRANSFER,
        room: Evictions = NO_EVICTIONS,
    ) -> None:
        """Tell an instance to let a request hold all blocks of the request's allocation there (`Hold`).

        With ``decodes``, the request decodes there from now on; ``move_id`` names a move that is over. The instance
        evicts ``room`` first.
        """
        allocation = instance.allocations[key]
        self.commands.append(
            Hold(
                instance_id=instance.instance_id,
                request_id=key[0],
                epoch=key[1],
                num_blocks=allocation.num_blocks,
                num_elsewhere_blocks=allocation.num_remote_tokens // instance.block_size,
                decodes=decodes,
                move_id=move_id,
                room=room,
            )
        )

    def free(self, instance_id: InstanceId, key: RequestKey) -> None:
        """Tell an instance once to free a request's KV, and likewise the members that it registered with."""
        instance = self.instances.get(instance_id)
        allocation = None if instance is None else instance.allocations.get(key)
        if allocation is not None and not allocation.freeing:
            allocation.freeing = True
            self.commands.append(
                FreeKv(instance_id=instance_id, request_id=key[0], epoch=key[1], transfer_id=allocation.transfer_id)
            )
            for member in allocation.last_sent_members:
                self.free(member.instance_id, key)

    # --- gateways ---

    def refuse(
        self,
        request: Request,
        message: str,
        retry_after_s: float | None,
        reason: RejectReason = RejectReason.OVERLOADED,
        reject_ttl_s: float = 0.0,
    ) -> None:
        """Reject a request at its gateway, without ending one in the core. ``retry_after_s``: None gives no advice."""
        self.commands.append(
            Reject(
                gateway_id=request.gateway_id,
                request_id=request.request_id,
                epoch=request.epoch,
                reason=reason,
                message=message,
                retry_after_s=retry_after_s,
                reject_ttl_s=reject_ttl_s,
            )
        )

    def ask_to_resume(
        self, gateway_id: GatewayId, key: RequestKey, reason: str, *, retracted: bool = False, blame: float = 0.0
    ) -> None:
        """Tell a gateway to resume a request, known to the core or not."""
        self.commands.append(
            Restart(
                gateway_id=gateway_id,
                request_id=key[0],
                epoch=key[1],
                reason=reason,
                retracted=retracted,
                blame=blame,
            )
        )
