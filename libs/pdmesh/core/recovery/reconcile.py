"""Joins and losses of instances and gateways: residents meet the requests that wait for them.

After a scheduler's restart workers and gateways register again in any order. The side that registers second finds the
other among the orphans. An orphan without counterpart by the end of its grace is freed on its instance, or resumed by
its gateway.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from pdmesh.core.commands import Outcome
from pdmesh.core.copies.receivers import replace_receiver
from pdmesh.core.events import InstanceJoined
from pdmesh.core.instances.allocations import Allocation, AllocationKind
from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.instances.kept_chains import KeptChains
from pdmesh.core.instances.last_uses import last_turns, last_uses
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.recovery.orphans import Orphans
from pdmesh.core.recovery.spread_residents import SpreadResidents
from pdmesh.core.recovery.suspects import Deaths
from pdmesh.core.requests.phases import Phase
from pdmesh.core.requests.request import RequestState
from pdmesh.kv_layout import num_blocks_for
from pdmesh.model import (
    Epoch,
    GatewayId,
    InstanceId,
    LastUse,
    Request,
    RequestId,
    RequestKey,
    Resident,
    SessionName,
)
from pdmesh.policy.views import Rank

_DROPPED = "its instance dropped it while no scheduler was running"


class Reconciler:
    """Matching of instances' residents with gateways' waiting requests."""

    def __init__(self, mesh: MeshState, grace_s: float) -> None:
        self._mesh = mesh
        self._grace_s = grace_s
        self._deaths = Deaths()
        self._spread = SpreadResidents(mesh)
        # Residents that no gateway waits for so far.
        self._unclaimed: Orphans[InstanceId] = Orphans()
        # Requests that a gateway waits for, found on no instance so far.
        self._unfound: Orphans[GatewayId] = Orphans()
        # Requests that instances dropped and no gateway waits for so far, with the time to forget them.
        self._dropped: dict[RequestKey, float] = {}

    @property
    def next_deadline_s(self) -> float:
        """Earliest deadline; infinite if there is none."""
        return min(self._unclaimed.next_deadline_s, self._unfound.next_deadline_s, self._spread.next_deadline_s)

    def expire(self, now_s: float) -> None:
        for unfound in self._unfound.pop_due(now_s):
            self._mesh.ask_to_resume(unfound.owner, unfound.key, "its KV is on no instance")
        for unclaimed in self._unclaimed.pop_due(now_s):
            self._mesh.free(unclaimed.owner, unclaimed.key)
        self._spread.expire(now_s)
        while self._dropped and self._dropped[key := next(iter(self._dropped))] <= now_s:
            del self._dropped[key]

    # --- single requests ---

    def gateway_of(self, request_id: RequestId) -> GatewayId | None:
        """Return the gateway of a request that is known from one side alone; None for any other request."""
        orphan = self._unfound.get(request_id) or self._unclaimed.get(request_id)
        return None if orphan is None else orphan.gateway_id

    def claim(self, key: RequestKey, gateway_id: GatewayId) -> InstanceId | None:
        """Return the instance where exactly this request decodes, else None. Free an older epoch of the request."""
        self._unfound.pop(key[0], gateway_id)
        return self._claim_resident(key, gateway_id)

    def forget(self, request_id: RequestId, gateway_id: GatewayId) -> bool:
        """Forget a request that its gateway cancelled, and free its KV; return whether it was an orphan."""
        unfound = self._unfound.pop(request_id, gateway_id)
        resident = self._unclaimed.pop(request_id, gateway_id)
        if resident is not None:
            self._mesh.free(resident.owner, resident.key)
        return unfound is not None or resident is not None

    def released(self, instance_id: InstanceId, key: RequestKey) -> None:
        """Forget a resident that ended by itself, unclaimed or spread over partly registered instances."""
        self._spread.released(instance_id, key)
        if (resident := self._unclaimed.get(key[0])) and (resident.owner, resident.key) == (instance_id, key):
            self._unclaimed.pop(key[0], resident.gateway_id)

    # --- gateways ---

    def gateway_joined(
        self,
        gateway_id: GatewayId,
        waiting: dict[RequestId, Epoch],
        now_s: float,
        *,
        unbegun: Collection[RequestId] = (),
    ) -> None:
        mesh = self._mesh
        for request_id in list(mesh.of_gateway.setdefault(gateway_id, {})):
            if request_id not in waiting:
                mesh.end(mesh.requests[request_id], Outcome.CANCELLED)
        self._unfound.drop_owner(gateway_id)
        for key in waiting.items():
            known = mesh.requests.get(key[0])
            owner = self.gateway_of(key[0]) if known is None else known.request.gateway_id
            if owner is not None and owner != gateway_id:
                mesh.ask_to_resume(gateway_id, key, "Another gateway's request has this id.")
                continue
            if known is not None:
                if known.request.epoch >= key[1]:
                    continue
                mesh.end(known, Outcome.SUPERSEDED)
            instance_id = self._claim_resident(key, gateway_id)
            if instance_id is not None:
                mesh.adopt(self._open_unknown(key, gateway_id, instance_id, now_s), instance_id)
            elif key[0] in unbegun:
                mesh.ask_to_resume(gateway_id, key, "it did not reach the scheduler")
            elif self._dropped.pop(key, None) is not None:
                mesh.ask_to_resume(gateway_id, key, _DROPPED)
            else:
                self._unfound.add(key, gateway_id, gateway_id, now_s + self._grace_s)

    def gateway_lost(self, gateway_id: GatewayId) -> None:
        mesh = self._mesh
        for request_id in list(mesh.of_gateway.get(gateway_id, ())):
            mesh.end(mesh.requests[request_id], Outcome.GATEWAY_LOST)
        mesh.of_gateway.pop(gateway_id, None)
        self._unfound.drop_owner(gateway_id)

    # --- instances ---

    def instance_joined(self, event: InstanceJoined, now_s: float) -> None:
        mesh, profile, instance_id = self._mesh, event.profile, event.profile.instance_id
        old = mesh.remove_instance(instance_id)
        instance = InstanceState(
            profile,
            changed=mesh.changed,
            growth=mesh.growth,
            cache_index=mesh.cache_index,
            number=mesh.numbers.take() if old is None else old.number,
            next_plan_id=0 if old is None else old.next_plan_id,
            draining=event.stopping,
        )
        mesh.add_instance(instance)
        self._drop_unclaimed(instance_id, old)
        self._spread.lost(instance_id)
        mesh.broker.join(instance_id, profile.num_transfer_backends)
        for resident in event.residents:
            key = (resident.request_id, resident.epoch)
            if key in instance.allocations:
                mesh.ignore("resident")
                continue
            known, user = mesh.find(key), resident.user
            if user is not None:
                mesh.sessions.learn([(LastUse(user, resident.num_context_tokens, 0.0), ())])
            num_remote_tokens = len(resident.members) * instance.max_kv_tokens
            instance.take(
                key,
                Allocation(
                    AllocationKind.RESIDENT if resident.part is None else AllocationKind.PART,
                    resident.num_blocks,
                    max_blocks=num_blocks_for(
                        max(0, resident.max_total_tokens - num_remote_tokens), instance.block_size
                    ),
                    num_tokens=resident.num_context_tokens,
                    num_remote_tokens=num_remote_tokens,
                    members=resident.members,
                    transfer_id=resident.transfer_id,
                    tenant=known.request.tenant if known is not None else None if user is None else user.tenant,
                    share=known.request.share if known is not None else 1 if user is None else user.share,
                    user=user,
                ),
                resident.granules,
                len(resident.granules),
            )
            being_freed = old is not None and key in old.allocations and old.allocations[key].freeing
            if resident.decoding and known is not None and known.move and known.move.target_id == instance_id:
                mesh.land_move(known)
            if not being_freed and (resident.members or resident.part is not None):
                self._spread.joined(instance_id, resident, now_s + self._grace_s)
            elif being_freed or not resident.decoding or not self._keep_resident(instance_id, resident, now_s):
                mesh.free(instance_id, key)
        for home_id, resident in self._spread.pop_complete():
            if not self._keep_resident(home_id, resident, now_s):
                mesh.free(home_id, (resident.request_id, resident.epoch))
        if event.kept or event.offloaded:
            chains, uses = KeptChains(event.kept, event.jumps), last_uses(len(event.kept), event.uses)
            mesh.sessions.learn(last_turns(chains, uses))
            instance.replace_kept(event.kept, event.offloaded, event.states, instance.kept.lines_of(chains, uses))
            instance.recent.learn(chains)
        if old is not None:
            blames = {} if old.profile.is_process_of(profile) else self._died(old, now_s)
            cut_off = [key for key in old.allocations if key not in instance.allocations]
            self._restart_without(instance_id, cut_off, f"instance {instance_id} was cut off", blames)
            mesh.drop_plans(old)
        self._start_dropped(event.dropped, now_s)
        mesh.queue.unpark()

    def instance_lost(self, instance_id: InstanceId, now_s: float) -> None:
        instance = self._mesh.remove_instance(instance_id)
        if instance is None:
            self._mesh.ignore("instance_lost")
            return
        blames = self._died(instance, now_s)
        self._mesh.numbers.give_back(instance.number)
        self._mesh.changed[instance_id] = None
        self._mesh.broker.leave(instance_id)
        self._drop_unclaimed(instance_id, instance)
        self._spread.lost(instance_id)
        self._restart_without(instance_id, instance.allocations, f"instance {instance_id} was lost", blames)
        self._mesh.drop_plans(instance)

    def _drop_unclaimed(self, instance_id: InstanceId, old: InstanceState | None) -> None:
        """Forget residents on this instance, or with a range here, that no gateway claimed. Free their KV on others.

        ``old`` is the instance before its removal, and names the holders of its residents' ranges. If None, these
        ranges are not freed.
        """
        mesh = self._mesh
        for orphan in list(self._unclaimed) if mesh.spreads_contexts else ():
            is_own = orphan.owner == instance_id
            allocation = mesh.allocation_of(orphan.owner, orphan.key)
            if is_own:
                allocation = None if old is None else old.allocations.get(orphan.key)
            members = () if allocation is None else allocation.last_sent_members
            if is_own or instance_id in [member.instance_id for member in members]:
                self._unclaimed.pop(orphan.key[0], orphan.gateway_id)
                for other_id in (orphan.owner, *[member.instance_id for member in members]):
                    mesh.free(other_id, orphan.key)
        self._unclaimed.drop_owner(instance_id)

    def _died(self, instance: InstanceState, now_s: float) -> Mapping[RequestKey, float]:
        """Note a death and return the blame of requests that the instance computed; none if it was about to stop."""
        return {} if instance.draining else self._deaths.note(instance, now_s)

    def _restart_without(
        self, instance_id: InstanceId, keys: Iterable[RequestKey], reason: str, blames: Mapping[RequestKey, float]
    ) -> None:
        for key in keys:
            state = self._mesh.find(key)
            if state is not None and state.needs(instance_id):
                replace_receiver(self._mesh, state, instance_id, reason, blame=blames.get(key, 0.0))

    def _start_dropped(self, keys: Iterable[RequestKey], now_s: float) -> None:
        """Resume the dropped requests that gateways wait for, and remember the others that are unknown."""
        for key in keys:
            unfound = self._unfound.get(key[0])
            if unfound is not None and unfound.key == key:
                self._unfound.pop(key[0], unfound.owner)
                self._mesh.ask_to_resume(unfound.owner, key, _DROPPED)
            elif key[0] not in self._mesh.requests and self._unclaimed.get(key[0]) is None:
                self._dropped[key] = now_s + self._grace_s

    # --- residents ---

    def _keep_resident(self, instance_id: InstanceId, resident: Resident, now_s: float) -> bool:
        """Match a resident with the request that waits for it; without one, keep it as an orphan.

        Returns False if no gateway can still claim it, so that it must be freed.
        """
        mesh, gateway_id = self._mesh, resident.gateway_id
        key = (resident.request_id, resident.epoch)
        known = mesh.requests.get(key[0])
        if known is not None:
            if known.request.gateway_id != gateway_id:
                return False
            if known.key == key and known.decode_id == instance_id:
                mesh.land(known)
            elif known.key == key and known.phase is Phase.WAITING:
                mesh.adopt(known, instance_id)
            else:
                return False
            return True
        unfound = self._unfound.get(key[0])
        if unfound is not None:
            if unfound.key != key or self._unfound.pop(key[0], gateway_id) is None:
                return False
            mesh.adopt(self._open_unknown(key, unfound.owner, instance_id, now_s), instance_id)
            return True
        other = self._unclaimed.get(key[0])
        if other is not None:
            if other.gateway_id != gateway_id or other.key[1] >= key[1]:
                return False
            mesh.free(other.owner, other.key)
        self._unclaimed.add(key, instance_id, gateway_id, now_s + self._grace_s)
        return True

    def _claim_resident(self, key: RequestKey, gateway_id: GatewayId) -> InstanceId | None:
        resident = self._unclaimed.pop(key[0], gateway_id)
        if resident is None:
            return None
        if resident.key == key:
            return resident.owner
        self._mesh.free(resident.owner, resident.key)
        return None

    def _open_unknown(
        self, key: RequestKey, gateway_id: GatewayId, instance_id: InstanceId, now_s: float
    ) -> RequestState:
        """Open a request known from its instance alone, which counts all its tokens as prompt, arrived now."""
        instance = self._mesh.instances[instance_id]
        allocation = instance.allocations[key]
        num_tokens, user = max(1, allocation.num_tokens), allocation.user
        session = None
        if user is not None and user.session is not None:
            session = SessionName(user.session, user.parent, lease_s=user.lease_s)
        request = Request(
            request_id=key[0],
            epoch=key[1],
            gateway_id=gateway_id,
            num_prompt_tokens=num_tokens,
            max_tokens=max(
                1, allocation.max_blocks * instance.block_size + allocation.num_remote_tokens - num_tokens + 1
            ),
            arrival_s=now_s,
            tenant="" if user is None else user.tenant,
            share=1 if user is None else user.share,
            prefix=tuple(allocation.granules.chain),
            prefix_weights=instance.weights,
            session=session,
        )
        return self._mesh.open(request, Rank(), is_adopted=True)
